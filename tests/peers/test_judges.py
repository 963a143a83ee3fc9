"""A JudgeRubric of verifiers 0.1.14, unchanged, asks the judge that a manifest gives it; a judge that breaks is no 0.0.

Installs verifiers 0.1.14 with its dependencies (about 500 MB).
"""

import asyncio

import pytest
from judge_server import judge_server
from projects import write

from sandmill.config.manifest import EnvironmentSection, GradingSection, JudgeSection, ToolsSection
from sandmill.environments import registry
from sandmill.environments.access.access import access_of
from sandmill.environments.grading import grade_episode
from sandmill.environments.task import Boundary, Graded, InfrastructureFailure, Submission

SOURCE = """
import verifiers as vf
from datasets import Dataset


def load_environment():
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} for n in range(8)]
    rubric = vf.JudgeRubric(judge_prompt="{question} {answer} {response}")

    async def right(judge, prompt, completion, answer, state):
        return 1.0 if "yes" in (await judge(prompt, completion, answer, state)).lower() else 0.0

    async def lenient(judge, prompt, completion, answer, state):
        try:
            return 1.0 if "yes" in (await judge(prompt, completion, answer, state)).lower() else 0.0
        except Exception:
            return 0.0

    rubric.add_reward_func(right)
    rubric.add_reward_func(lenient, weight=0.5)
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
"""


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Verdicts on answers, by a judge under the name that JudgeRubric asks for."""
    folder = write(tmp_path, "asks-a-judge", SOURCE)

    def grade(judge, answers):
        section = JudgeSection(name="gpt-4.1-nano", url=judge.url, model="real-judge", retries=0)
        access = access_of(GradingSection(judge=(section,)), ToolsSection(), None)
        name = f"verifiers/{folder}"
        environment = registry.get(name, EnvironmentSection(name=name, train_tasks=4, held_out_tasks=2), access=access)

        async def main():
            task = environment.splits["train"][0]
            try:
                return [await grade_episode(environment, task, Submission(answer=one), None, timeout_s=120.0) for one in answers]
            finally:
                await environment.close()

        return asyncio.run(main())

    return grade


def test_a_judge_rubric_asks_the_judge_that_it_is_given(judged):
    with judge_server() as judge:
        good, busy, broken = judged(judge, ["fine yes", "once-busy", "error"])
    assert good == Graded(reward=1.5, passed=True, parts=good.parts)
    assert judge.heard[0]["model"] == "real-judge"
    for verdict in (busy, broken):
        assert isinstance(verdict, InfrastructureFailure)
        assert (verdict.boundary, verdict.retryable) == (Boundary.JUDGE, True)
