"""What demonstrations show is, token for token, what an episode shows: the same words for the same output."""

import itertools
import random

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.builtin.shell import ShellEnvironment, vocabulary
from sandmill.environments.builtin.shell.evaluator import evaluate
from sandmill.environments.builtin.shell.families import COMMANDS, SIZES
from sandmill.environments.builtin.shell.generate import problem_from
from sandmill.environments.builtin.shell.options import DEMO_FAMILIES, Difficulty
from sandmill.environments.builtin.shell.words import WORDS
from sandmill.environments.observe import observation_line
from sandmill.environments.task import Message
from sandmill.models.chat import Answer, Call, Observation, encode_plain
from sandmill.models.line_dialogue import LineDialogue
from sandmill.models.model import StopReason
from sandmill.models.tiny import build_tiny

LOADED = build_tiny(vocabulary(), seed=0)
DIALOGUE = LineDialogue(LOADED.tokenizer, context_length=LOADED.context_length)


def encode(text):
    return tuple(encode_plain(LOADED.tokenizer, text))


def test_observations_are_encoded_alike():
    rng = random.Random(4)
    for family, template in itertools.product(DEMO_FAMILIES, COMMANDS.values()):
        problem = problem_from(rng, family, WORDS, SIZES[Difficulty.EASY], "train")
        for name in (problem.subject, "missing.txt"):
            output, exit_code = evaluate(template.format(f=name, k=problem.key), problem.files)
            ok = exit_code == 0
            shown = DIALOGUE.observe([Observation(text=output, ok=ok)], StopReason.STOP)
            assert shown == encode(observation_line(output, ok=ok) + "\n")


def test_prompts_and_actions_are_encoded_alike_and_nothing_is_unknown():
    shell = ShellEnvironment(EnvironmentSection(name="shell@1.0.0"))
    for demonstration in itertools.islice(shell.demonstrations(5), 300):
        prompt, *rest = demonstration.segments
        assert DIALOGUE.open([Message.user(prompt.text.removeprefix("Q: ").removesuffix("\n"))]) == encode(prompt.text)
        for segment in rest:
            ids = encode(segment.text)
            assert LOADED.tokenizer.unk_token_id not in ids
            if segment.text.startswith("$ "):
                (action,) = DIALOGUE.parse(ids, StopReason.STOP)
                assert action == Call(tool="bash", arguments={"command": segment.text[2:-1]})
            if segment.text.startswith("= "):
                assert DIALOGUE.parse(ids, StopReason.STOP) == (Answer(text=segment.text[2:-1]),)


def test_every_prompt_of_every_split_is_known():
    shell = ShellEnvironment(EnvironmentSection(name="shell@1.0.0"))
    for tasks in shell.splits.values():
        for task in tasks:
            assert LOADED.tokenizer.unk_token_id not in DIALOGUE.open(task.opening)
