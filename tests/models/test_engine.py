"""The engine's promises: limits, exact log-probabilities, versions, admission, cancellation, death and closing."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch
from torch.nn import functional

from sandmill.config.manifest import LoraSection
from sandmill.errors import ContextFull, EngineDied
from sandmill.models.decoder import decoder_for
from sandmill.models.engines.torch import TorchEngine
from sandmill.models.lora_policy import LoraPolicy
from sandmill.models.model import Sampling, StopReason
from sandmill.models.sampling import choose, uniform

NOTHING = Sampling(max_new_tokens=0, stop_ids=frozenset())
FREE = Sampling(max_new_tokens=6, stop_ids=frozenset())


def _run(main, deadline_s=60):
    async def bounded():
        async with asyncio.timeout(deadline_s):
            return await main

    return asyncio.run(bounded())


class _Failing:
    """A real decoder that breaks at its n-th call, or waits for leave before every call."""

    def __init__(self, decoder, fail_at=None, gate=None):
        self._decoder, self._left, self._gate = decoder, fail_at, gate
        self.calls = 0

    def extend(self, chunks):
        self.calls += 1
        if self._gate is not None:
            self._gate.wait(20)
        if self.calls == self._left:
            raise MemoryError("no memory for the next step")
        return self._decoder.extend(chunks)

    def __getattr__(self, name):
        return getattr(self._decoder, name)


def _logits(loaded, ids):
    with torch.no_grad():
        return loaded.model(input_ids=torch.tensor([ids])).logits[0, -1]


def test_a_reply_ends_at_a_stop_token_which_is_kept(tiny):
    async def main():
        engine = TorchEngine(tiny, rows=2)
        session = await engine.session(seed=1)
        first = await session.sample([5, 6, 7], Sampling(max_new_tokens=1, stop_ids=frozenset()))
        again = await engine.session(seed=1)
        stopped = await again.sample([5, 6, 7], Sampling(max_new_tokens=9, stop_ids=frozenset(first.token_ids)))
        await engine.close()
        return first, stopped

    first, stopped = _run(main())
    assert first.stop is StopReason.LENGTH
    assert stopped.token_ids == first.token_ids
    assert stopped.stop is StopReason.STOP
    assert stopped.logprobs == first.logprobs


def test_the_context_limit_ends_a_reply_and_refuses_what_cannot_fit(tiny):
    async def main():
        engine = TorchEngine(tiny, rows=1, context_length=16)
        session = await engine.session(seed=1)
        sample = await session.sample(list(range(5, 17)), Sampling(max_new_tokens=9, stop_ids=frozenset()))
        with pytest.raises(ContextFull, match="16"):
            await session.sample([5], FREE)
        await session.close()
        fresh = await engine.session(seed=2)
        with pytest.raises(ContextFull):
            await fresh.sample(list(range(5, 21)), FREE)
        last = await fresh.sample(list(range(5, 20)), FREE)
        await engine.close()
        return sample, last

    sample, last = _run(main())
    assert (len(sample.token_ids), sample.stop) == (4, StopReason.CONTEXT)
    assert (len(last.token_ids), last.stop) == (1, StopReason.CONTEXT)


def test_greedy_is_argmax_with_the_log_probability_at_temperature_one(tiny):
    async def main():
        engine = TorchEngine(tiny, rows=1)
        session = await engine.session(seed=1)
        sample = await session.sample([5, 6, 7], Sampling(max_new_tokens=5, stop_ids=frozenset(), temperature=0.0))
        await engine.close()
        return sample

    sample = _run(main())
    ids = [5, 6, 7]
    for token, logprob in zip(sample.token_ids, sample.logprobs, strict=True):
        logits = _logits(tiny, ids)
        assert token == int(logits.argmax())
        assert logprob == pytest.approx(float(functional.log_softmax(logits, -1)[token]), abs=1e-4)
        ids.append(token)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.6), (1.7, 0.9)])
def test_log_probabilities_are_of_the_distribution_sampled_from(temperature, top_p, tiny):
    logits = _logits(tiny, [5, 6, 7])
    probabilities = functional.softmax(logits.double() / temperature, -1)
    order = probabilities.argsort(descending=True)
    mass_before = probabilities[order].cumsum(0) - probabilities[order]
    kept = order[mass_before < top_p]
    wanted = torch.zeros_like(probabilities)
    wanted[kept] = probabilities[kept] / probabilities[kept].sum()
    count = 20000
    uniforms = uniform(np.arange(count, dtype=np.uint64), np.zeros(count, np.uint64))
    tokens, logprobs = choose(
        logits[None],
        torch.zeros(count, dtype=torch.int64),
        torch.full((count,), temperature),
        torch.full((count,), top_p),
        torch.from_numpy(uniforms),
    )
    torch.testing.assert_close(logprobs, wanted.log()[tokens], rtol=0, atol=1e-5)
    frequencies = torch.bincount(tokens, minlength=len(wanted)).double() / count
    assert float((frequencies - wanted).abs().sum()) < 2.5 * (2 / torch.pi / count) ** 0.5 * float(wanted.sqrt().sum())
    assert float(frequencies[wanted == 0].sum()) == 0


def test_the_largest_uniform_number_still_chooses_a_token_with_mass():
    logits = torch.tensor([[0.0, 1.0, -200.0, -200.0]]).repeat(2, 1)
    largest = torch.tensor([1 - 2**-53, 0.0], dtype=torch.float64)
    tokens, logprobs = choose(logits, torch.arange(2), torch.ones(2), torch.ones(2), largest)
    assert tokens.tolist() == [1, 0]
    assert torch.isfinite(logprobs).all()


def test_uniform_numbers_are_uniform_and_distinct():
    seeds, counters = np.divmod(np.arange(40000, dtype=np.uint64), np.uint64(200))
    draws = uniform(seeds, counters)
    assert len(np.unique(draws)) == len(draws)
    assert 0 <= draws.min() < draws.max() < 1
    counts, _ = np.histogram(draws, 50, (0, 1))
    assert ((counts - 800) ** 2 / 800).sum() < 95
    table = draws.reshape(200, 200)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02


def test_tokens_carry_the_version_they_were_sampled_under_and_follow_the_weights(tiny):
    policy = LoraPolicy(tiny, LoraSection(r=4), seed=0)
    greedy = Sampling(max_new_tokens=4, stop_ids=frozenset(), temperature=0.0)

    async def main():
        engine = TorchEngine(tiny, rows=4)
        session = await engine.session(seed=1)
        before = await session.sample([5, 6, 7], greedy)
        with torch.no_grad():
            for parameter in policy.trainable().values():
                parameter.normal_(0, 0.3)
        unpublished = await (await engine.session(seed=1)).sample([5, 6, 7], greedy)
        await asyncio.to_thread(engine.publish, 7)
        after = await (await engine.session(seed=1)).sample([5, 6, 7], greedy)
        going_on = await session.sample([8], greedy)
        await engine.close()
        return engine.version, before, unpublished, after, going_on

    version, before, unpublished, after, going_on = _run(main())
    assert version == 7
    assert before.policy_versions == (0,) * 4
    assert unpublished == before
    assert after.policy_versions == (7,) * 4
    assert after.logprobs != before.logprobs
    assert going_on.policy_versions == (7,) * 4
    assert after.logprobs[0] == pytest.approx(float(functional.log_softmax(_logits(tiny, [5, 6, 7]), -1).max()), abs=1e-4)


def test_publish_takes_effect_in_the_middle_of_a_reply(tiny):
    gate = threading.Semaphore(0)

    async def main():
        real = decoder_for(tiny.model, rows=1, context_length=64)

        class Stepwise(_Failing):
            def extend(self, chunks):
                gate.acquire(timeout=20)
                return super().extend(chunks)

        engine = TorchEngine(tiny, rows=1, decoder=Stepwise(real))
        session = await engine.session(seed=1)
        sampling = asyncio.ensure_future(session.sample([5, 6], Sampling(max_new_tokens=6, stop_ids=frozenset())))
        publishing = asyncio.ensure_future(asyncio.to_thread(engine.publish, 1))
        gate.release(3)
        await publishing
        gate.release(10)
        sample = await sampling
        await engine.close()
        return sample

    versions = _run(main()).policy_versions
    assert len(versions) == 6
    assert versions == tuple(sorted(versions))
    assert versions[-1] == 1


def test_more_sessions_than_rows_wait_their_turn(tiny):
    async def episode(engine, seed):
        session = await engine.session(seed=seed)
        sample = await session.sample([5, 6], FREE)
        await session.close()
        await session.close()
        return sample

    async def main():
        engine = TorchEngine(tiny, rows=2)
        samples = await asyncio.gather(*(episode(engine, seed % 7) for seed in range(21)))
        await engine.close()
        return samples

    samples = _run(main())
    assert samples[:7] == samples[7:14] == samples[14:]


def test_a_cancelled_sample_frees_its_row_and_disturbs_nobody(tiny):
    async def main():
        engine = TorchEngine(tiny, rows=2)
        alone = await (lonely := await engine.session(seed=9)).sample([5, 6], FREE)
        await lonely.close()
        victim, other = await engine.session(seed=1), await engine.session(seed=9)
        long = Sampling(max_new_tokens=100, stop_ids=frozenset())
        task = asyncio.ensure_future(victim.sample([5, 6], long))
        await asyncio.sleep(0)
        waiter = asyncio.ensure_future(engine.session(seed=3))
        given_up = asyncio.ensure_future(engine.session(seed=4))
        await asyncio.sleep(0.005)
        given_up.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(RuntimeError, match="closed"):
            await victim.sample([5], FREE)
        await victim.close()
        third = await waiter
        assert await other.sample([5, 6], FREE) == alone
        assert len((await third.sample([5, 6], FREE)).token_ids) == 6
        await engine.close()

    _run(main())


def test_a_leader_that_leaves_half_way_does_not_strand_its_siblings(tiny):
    gate = threading.Event()

    async def main():
        engine = TorchEngine(tiny, rows=3, decoder=_Failing(decoder_for(tiny.model, rows=3, context_length=128), gate=gate))
        prompt = list(range(5, 95))
        sessions = [await engine.session(seed=1) for _ in range(3)]
        tasks = [asyncio.ensure_future(session.sample(prompt, FREE)) for session in sessions]
        await asyncio.sleep(0.05)
        tasks[0].cancel()
        await sessions[0].close()
        gate.set()
        first, second = await asyncio.gather(*tasks[1:])
        await engine.close()
        assert first == second
        return first

    assert len(_run(main()).token_ids) == 6


@pytest.mark.parametrize("fail_at", [1, 4])
def test_a_dead_engine_fails_everything_that_waits_and_everything_after(fail_at, tiny):
    async def main():
        engine = TorchEngine(tiny, rows=2, decoder=_Failing(decoder_for(tiny.model, rows=2, context_length=64), fail_at=fail_at))
        sessions = [await engine.session(seed=1), await engine.session(seed=2)]
        waiting = asyncio.ensure_future(engine.session(seed=3))
        await asyncio.sleep(0)
        results = await asyncio.gather(*(session.sample([5, 6], FREE) for session in sessions), waiting, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDied] * 3
        assert all("MemoryError: no memory for the next step" in str(result) for result in results)
        with pytest.raises(EngineDied, match="MemoryError"):
            await engine.session(seed=4)
        with pytest.raises(EngineDied):
            await sessions[0].sample([5], FREE)
        with pytest.raises(EngineDied):
            engine.publish(1)
        await sessions[0].close()
        await engine.close()
        await engine.close()

    _run(main(), 20)


def test_weights_that_are_no_numbers_end_the_engine_with_their_name(tiny):
    async def main():
        engine = TorchEngine(tiny, rows=1)
        with torch.no_grad():
            tiny.model.model.norm.weight.fill_(float("nan"))
        session = await engine.session(seed=1)
        with pytest.raises(EngineDied, match="non-finite number in the model's log-probabilities"):
            await session.sample([5, 6], FREE)
        await engine.close()

    _run(main(), 20)


def test_closing_fails_what_is_pending_and_is_idempotent(tiny):
    async def main():
        gate = threading.Event()
        engine = TorchEngine(tiny, rows=1, decoder=_Failing(decoder_for(tiny.model, rows=1, context_length=64), gate=gate))
        session = await engine.session(seed=1)
        task = asyncio.ensure_future(session.sample([5, 6], FREE))
        await asyncio.sleep(0.02)
        closing = [asyncio.ensure_future(engine.close()) for _ in range(2)]
        await asyncio.sleep(0.02)
        gate.set()
        await asyncio.gather(*closing)
        with pytest.raises(EngineDied, match="closed"):
            await task
        with pytest.raises(EngineDied, match="closed"):
            await engine.session(seed=1)

    _run(main(), 20)


def test_it_serves_several_event_loops_at_once(tiny):
    engine = TorchEngine(tiny, rows=8)
    results = {}

    async def episodes():
        async def one(seed):
            session = await engine.session(seed=seed)
            sample = await session.sample([5, 6], FREE)
            await session.close()
            return sample

        return await asyncio.gather(*(one(seed) for seed in range(12)))

    threads = [threading.Thread(target=lambda key=key: results.update({key: asyncio.run(episodes())})) for key in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    asyncio.run(engine.close())
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    ("context", "sampling", "message"),
    [
        ([], FREE, "empty"),
        ([5, 100000], FREE, "vocabulary"),
        ([-1], FREE, "vocabulary"),
        ([5], Sampling(max_new_tokens=0, stop_ids=frozenset()), "at least 1"),
    ],
)
def test_nonsense_is_refused_before_it_reaches_the_engine(context, sampling, message, tiny):
    async def main():
        engine = TorchEngine(tiny, rows=1)
        session = await engine.session(seed=1)
        with pytest.raises(ValueError, match=message):
            await session.sample(context, sampling)
        assert len((await session.sample([5], FREE)).token_ids) == 6
        await engine.close()

    _run(main())
