"""One scripted episode of an environment that takes part in the dialogue."""

import json

from sandmill.environments.task import Message, Role, Submission, ToolCall


async def said(environment, *turns, task=None, limit=None, cut=None, beside="let me see"):
    """Reactions to the turns, a text or (tool, arguments) each, and the verdict; `beside` is what was written beside a call, `cut` a last
    reply that never came to its end."""
    task = task or environment.splits["train"][0]
    episode = await environment.interact(task, 7)
    messages, reactions = [], []
    try:
        for turn in turns:
            if isinstance(turn, str):
                reactions.append(await episode.reply(turn))
                messages.append(Message(role=Role.ASSISTANT, text=turn))
                continue
            tool, arguments = turn
            reactions.append(await episode.call(tool, arguments))
            call = ToolCall(name=tool, arguments=json.dumps(arguments))
            messages += [
                Message(role=Role.ASSISTANT, text=beside, calls=(call,)),
                Message(role=Role.TOOL, text=reactions[-1].text),
            ]
        if cut is not None:
            messages.append(Message(role=Role.ASSISTANT, text=cut))
        answer = turns[-1] if turns and isinstance(turns[-1], str) else None
        submission = Submission(answer=answer, messages=tuple(messages), limit=limit)
        record = await episode.finish(submission)
        return reactions, await environment.grade(task, Submission(answer=answer, limit=limit, record=record), {})
    finally:
        await episode.close()


async def left(environment, *texts, task=None):
    """What an episode of these replies leaves to be graded with others; of an environment without a dialogue, the reply."""
    task = task or environment.splits["train"][0]
    if not hasattr(environment, "interact"):
        return Submission(answer=texts[-1])
    episode = await environment.interact(task, 7)
    try:
        for text in texts:
            await episode.reply(text)
        messages = tuple(Message(role=Role.ASSISTANT, text=text) for text in texts)
        submission = Submission(answer=texts[-1], messages=messages)
        return Submission(answer=texts[-1], messages=messages, record=await episode.finish(submission))
    finally:
        await episode.close()
