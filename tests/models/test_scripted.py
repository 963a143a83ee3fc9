"""The scripted model keeps the rules of a real engine."""

from __future__ import annotations

import asyncio

import pytest

from sandmill.errors import ContextFull, EngineDied
from sandmill.models.engines.scripted import ScriptedModel
from sandmill.models.model import Sampling, StopReason

LINE = Sampling(max_new_tokens=4, stop_ids=frozenset({3}))


def test_replies_follow_seed_turn_and_context_and_stop_as_asked():
    async def main():
        model = ScriptedModel(lambda seed, turn, context: [seed, turn, len(context), 3, 9])
        session = await model.session(seed=7)
        first = await session.sample([1, 2], LINE)
        model.publish(5)
        second = await session.sample([1], Sampling(max_new_tokens=2, stop_ids=frozenset()))
        await session.close()
        await session.close()
        with pytest.raises(RuntimeError, match="closed"):
            await session.sample([1], LINE)
        return first, second

    first, second = asyncio.run(main())
    assert (first.token_ids, first.stop, first.policy_versions) == ((7, 0, 2, 3), StopReason.STOP, (0, 0, 0, 0))
    assert (second.token_ids, second.stop, second.policy_versions) == ((7, 1), StopReason.LENGTH, (5, 5))


def test_the_context_is_bounded():
    async def main():
        model = ScriptedModel.cycle([[5, 5, 5, 5]], context_length=6)
        session = await model.session(seed=0)
        sample = await session.sample([1, 2, 3], LINE)
        with pytest.raises(ContextFull):
            await session.sample([1], LINE)
        return sample

    sample = asyncio.run(main())
    assert (sample.token_ids, sample.stop) == ((5, 5, 5), StopReason.CONTEXT)


def test_rows_are_waited_for_and_death_is_final():
    async def main():
        model = ScriptedModel(lambda *_: [3], rows=1)
        session = await model.session(seed=0)
        waiting = asyncio.ensure_future(model.session(seed=1))
        await asyncio.sleep(0)
        assert not waiting.done()
        await session.close()
        second = await waiting
        assert (await second.sample([1], LINE)).token_ids == (3,)
        model.die("out of memory")
        with pytest.raises(EngineDied, match="out of memory"):
            await second.sample([1], LINE)
        await model.close()

    asyncio.run(main())


def test_a_script_without_a_reply_is_an_error():
    async def main():
        model = ScriptedModel(lambda *_: [])
        with pytest.raises(ValueError, match="no reply"):
            await (await model.session(seed=0)).sample([1], LINE)

    asyncio.run(main())
