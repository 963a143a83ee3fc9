"""A judge that is a model of our own: it answers in the form of an endpoint, the same request alike, and says what it cannot do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sandmill.config.manifest import JudgeSection
from sandmill.environments.access.judge import Reply, Sent
from sandmill.errors import JudgeFailed, ModelNotFound
from sandmill.models.judging import EmbeddedJudge

ASKED = [{"role": "system", "content": "You judge."}, {"role": "user", "content": [{"type": "text", "text": "is 4 right?"}]}]


def ask(*requests: dict[str, Any]) -> list[Reply]:
    async def main() -> list[Reply]:
        judge = EmbeddedJudge("own", "sandmill/tiny-text")
        try:
            return list(await asyncio.gather(*(judge.ask({"model": "own", "messages": ASKED, **request}, Sent()) for request in requests)))
        finally:
            await judge.close()
            await judge.close()

    return asyncio.run(main())


def test_it_answers_in_the_form_of_an_endpoint_and_the_same_request_alike() -> None:
    first, again, sampled, other, two = ask(
        {"max_tokens": 8},
        {"max_tokens": 8},
        {"max_tokens": 8, "temperature": 1.0, "seed": 1},
        {"max_tokens": 8, "temperature": 1.0, "seed": 2},
        {"max_completion_tokens": 8, "temperature": 1.0, "n": 2},
    )
    whole = json.loads(first.body)
    assert (whole["object"], whole["model"], whole["choices"][0]["message"]["role"]) == ("chat.completion", "own", "assistant")
    assert first.completion.usage is not None
    assert first.completion.usage.prompt_tokens > 4
    assert 1 <= first.completion.usage.completion_tokens <= 8
    assert first.completion == again.completion
    assert sampled.completion.choices != other.completion.choices
    assert len(two.completion.choices) == 2


@pytest.mark.parametrize(
    "request_", [{"messages": []}, {"messages": [{"role": "oracle", "content": "x"}]}, {"max_tokens": 0}, {"messages": "x"}, {"n": 99}]
)
def test_what_it_cannot_read_is_no_answer(request_: dict[str, Any]) -> None:
    with pytest.raises(JudgeFailed, match="judge own cannot read the request") as caught:
        ask(request_)
    assert not caught.value.retryable


def test_a_request_that_does_not_fit_its_context_is_no_answer() -> None:
    with pytest.raises(JudgeFailed, match="cannot take the request"):
        ask({"messages": [{"role": "user", "content": "4 " * 5000}]})


def test_a_model_that_is_not_there_is_named_before_anything_runs() -> None:
    with pytest.raises(ModelNotFound, match="no bundled model"):
        EmbeddedJudge.of(JudgeSection(name="own", uri="sandmill/large"))
