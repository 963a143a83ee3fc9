"""What the tests of foreign packages share: loading one, and grading answers with it."""

import asyncio

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import registry
from sandmill.environments.grading import grade_episode
from sandmill.environments.task import Submission


def environment(reference, train=1, held_out=1, *, seed=42, **options):
    """The environment that a manifest would get; it is closed by `graded`."""
    return registry.get(
        reference, EnvironmentSection(name=reference, train_tasks=train, held_out_tasks=held_out, seed=seed, options=options)
    )


def graded(environment, pairs, timeout_s=120.0):
    """Verdicts on pairs of a task and an answer, in their order; ends the package."""

    async def main():
        try:
            return [await grade_episode(environment, task, Submission(answer=answer), None, timeout_s=timeout_s) for task, answer in pairs]
        finally:
            await environment.close()

    return asyncio.run(main())
