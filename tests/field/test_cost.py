"""Field cases F: unknown prices and failed attempts."""

import pytest

from sandmill.accounts import Activity, LedgerRow, PriceBook, RunPrices, TokenPrices, Usage, read_ledger, spend
from sandmill.config.manifest import EnvironmentSection, Manifest, ModelSection, Spec
from sandmill.config.quantities import format_usd
from sandmill.store import RunFolder, Stream

PRICED = TokenPrices(input=3_000_000, output=15_000_000, cache_read=300_000, cache_write=3_750_000)


@pytest.mark.case(69)
def test_optio_456_all_four_usage_counters_are_billed():
    book = PriceBook(tokens={"judge": PRICED})
    usage = Usage(input=100, output=10, cache_read=1_000_000, cache_write=10_000)
    assert book.token_cost("judge", usage) == 300 + 150 + 300_000 + 37_500


@pytest.mark.case(69)
def test_software_agent_sdk_4382_unknown_model_or_bucket_costs_unknown_not_zero():
    book = PriceBook(tokens={"judge": PRICED})
    assert book.token_cost("not-in-the-table", Usage(input=1)) is None
    assert book.token_cost("judge", Usage(input=1, thinking=1)) is None
    assert format_usd(book.token_cost("not-in-the-table", Usage(input=1))) == "unknown"


def new_run(path):
    section = EnvironmentSection(name="shell@1.0.0")
    return RunFolder.create(path, Manifest(spec=Spec(model=ModelSection(uri="sandmill/tiny-shell"), environment=section)))


def row(attempt, outcome, cost):
    return LedgerRow(run="r", activity=Activity.EPISODE, step=0, attempt=attempt, outcome=outcome, machine_s=1.0, cost_microusd=cost)


@pytest.mark.case(70)
def test_cc_plugin_eval_330_an_attempt_that_fails_after_it_was_billed_is_on_the_books(tmp_path):
    prices = RunPrices(machine_microusd_per_hour=3_600_000, sandbox_microusd_per_hour=0)

    def attempt(folder, number, reply):
        folder.append(Stream.LEDGER, row(number, "ended", prices.cost(machine_s=1.0)))
        return int(reply)

    with new_run(tmp_path / "run") as folder:
        with pytest.raises(ValueError, match="invalid literal"):
            attempt(folder, 0, "not a number")
        assert attempt(folder, 1, "7") == 7
    rows = list(read_ledger(tmp_path / "run" / Stream.LEDGER))
    assert [(one.attempt, one.cost_microusd) for one in rows] == [(0, 1000), (1, 1000)]
    assert spend(rows).microusd == 2000


@pytest.mark.case(70)
def test_microsoft_agentic_harness_267_the_total_is_the_sum_of_every_attempt(tmp_path):
    with new_run(tmp_path / "run") as folder:
        for number, outcome in enumerate(("infrastructure-failure", "infrastructure-failure", "graded")):
            folder.append(Stream.LEDGER, row(number, outcome, 11))
        assert spend(read_ledger(folder.path / Stream.LEDGER)).microusd == 33
