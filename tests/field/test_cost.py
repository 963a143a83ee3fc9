"""Field cases F: unknown prices and failed attempts."""

import pytest

from sandmill.accounts import Activity, Ledger, LedgerRow, PriceBook, RunPrices, TokenPrices, Usage, read_ledger
from sandmill.config.quantities import format_usd

PRICED = TokenPrices(input=3_000_000, output=15_000_000, cache_read=300_000, cache_write=3_750_000)


def test_optio_456_all_four_usage_counters_are_billed():
    book = PriceBook(tokens={"judge": PRICED})
    usage = Usage(input=100, output=10, cache_read=1_000_000, cache_write=10_000)
    assert book.token_cost("judge", usage) == 300 + 150 + 300_000 + 37_500


def test_software_agent_sdk_4382_unknown_model_or_bucket_costs_unknown_not_zero():
    book = PriceBook(tokens={"judge": PRICED})
    assert book.token_cost("not-in-the-table", Usage(input=1)) is None
    assert book.token_cost("judge", Usage(input=1, thinking=1)) is None
    assert format_usd(book.token_cost("not-in-the-table", Usage(input=1))) == "unknown"


def test_cc_plugin_eval_330_an_attempt_that_fails_after_it_was_billed_is_on_the_books(tmp_path):
    prices = RunPrices(machine_microusd_per_hour=3_600_000, sandbox_microusd_per_hour=0)
    path = tmp_path / "ledger.jsonl"

    def attempt(ledger, number, reply):
        ledger.append(
            LedgerRow(
                run="r",
                activity=Activity.EPISODE,
                step=0,
                attempt=number,
                outcome="ended",
                machine_s=1.0,
                tokens_in=10,
                cost_microusd=prices.cost(machine_s=1.0),
            )
        )
        return int(reply)

    with Ledger(path) as ledger:
        with pytest.raises(ValueError, match="invalid literal"):
            attempt(ledger, 0, "not a number")
        assert attempt(ledger, 1, "7") == 7
        assert ledger.spent.microusd == 2000
    assert [(row.attempt, row.cost_microusd) for row in read_ledger(path)] == [(0, 1000), (1, 1000)]


def test_microsoft_agentic_harness_267_the_total_is_the_sum_of_every_attempt(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        for number, outcome in enumerate(("infrastructure-failure", "infrastructure-failure", "graded")):
            ledger.append(LedgerRow(run="r", activity=Activity.EPISODE, step=3, attempt=number, outcome=outcome, cost_microusd=11))
    with Ledger(path) as resumed:
        assert resumed.spent.microusd == 33
