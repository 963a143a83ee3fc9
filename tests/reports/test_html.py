"""The report in a real browser: it loads without a network or a console message, hostile text stays text, and it can be read."""

from __future__ import annotations

import re
import shutil

import pytest
from playwright.sync_api import sync_playwright
from synthetic_run import SyntheticRun

from sandmill.reports.html import write_report
from sandmill.reports.metrics import read_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield started
        started.close()


@pytest.fixture(scope="module")
def page(browser, finished_run):
    """The finished run's page, with everything it said and asked for while it loaded."""
    report = write_report(read_run(finished_run))
    opened = browser.new_page()
    opened.said, opened.asked = [], []
    opened.on("console", lambda message: opened.said.append(message.text))
    opened.on("pageerror", lambda error: opened.said.append(str(error)))
    opened.on("request", lambda request: opened.asked.append(request.url))
    opened.goto(report.as_uri())
    return opened


@pytest.fixture
def fresh(page):
    for name in ("kind", "step", "outcome"):
        page.select_option(f"#filter-{name}", "")
    page.fill("#filter-text", "")
    return page


def test_it_loads_silently_and_asks_for_nothing_but_itself(page):
    assert page.said == []
    assert len(page.asked) == 1
    assert page.asked[0].startswith("file://")
    assert page.locator("h1").inner_text() == "demo"


def test_its_policy_forbids_every_other_script_style_and_connection(page):
    policy = page.locator('meta[http-equiv="Content-Security-Policy"]').get_attribute("content")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    blocked = page.evaluate(
        """async () => {
            const script = document.createElement("script");
            script.textContent = "window.injected = 1";
            document.body.append(script);
            const reached = await fetch("https://example.com").then(() => true, () => false);
            return [window.injected === 1, reached];
        }"""
    )
    assert blocked == [False, False]
    page.said.clear()


def test_hostile_text_of_every_episode_stays_text(fresh):
    for index in range(0, fresh.locator(".item").count(), 9):
        fresh.locator(".item").nth(index).click()
    assert fresh.evaluate("window.pwned") is None
    assert fresh.locator("main img, main iframe, main script, main b b").count() == 0
    text = fresh.locator("main").inner_text()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


def test_filters_narrow_the_list_and_say_how_many_are_left(fresh):
    everything = fresh.locator(".item").count()
    fresh.select_option("#filter-outcome", "failure")
    failures = fresh.locator(".item").count()
    assert 0 < failures < everything
    assert fresh.locator("#episode-count").inner_text() == f"{failures} shown"
    assert set(fresh.locator(".item .chip").all_inner_texts()) == {"failure"}
    assert "was never trained on" in fresh.locator("#episode").inner_text()
    fresh.select_option("#filter-outcome", "passed")
    fresh.select_option("#filter-step", "17")
    assert fresh.locator(".item").count() > 0
    assert all("step 17" in words for words in fresh.locator(".item .meta").all_inner_texts())
    fresh.fill("#filter-text", "no such words")
    assert fresh.locator(".item").count() == 0
    assert "No episode fits" in fresh.locator("#episode").inner_text()


def test_an_episode_reads_turn_by_turn_with_sampled_and_given_tokens(fresh):
    fresh.select_option("#filter-outcome", "passed")
    fresh.locator(".item").nth(1).click()
    assert fresh.locator(".item").nth(1).get_attribute("aria-selected") == "true"
    roles = fresh.locator("#episode .turn .who b").all_inner_texts()
    assert roles == ["task", "model", "tool", "model"]
    assert fresh.locator("#episode .turn.sampled").count() == 2
    fresh.locator("#episode .turn.sampled button").first.click()
    fresh.locator("#episode .turn.given button").first.click()
    assert fresh.locator("#episode .tok.own").count() >= 3
    assert fresh.locator("#episode .tok:not(.own)").count() == 12
    assert "log-probability" in fresh.locator("#episode .tok.own").first.get_attribute("title")
    fresh.locator("#episode .turn.sampled button").first.click()
    assert fresh.locator("#episode .tok.own").count() == 0


def test_arrow_keys_walk_the_list(fresh):
    fresh.locator(".item").first.click()
    fresh.locator(".list").press("ArrowDown")
    assert fresh.locator(".item").nth(1).get_attribute("aria-selected") == "true"


def test_a_click_on_a_step_opens_its_episodes(fresh):
    fresh.locator("#time-body svg g").nth(4).click()
    assert fresh.locator("#filter-step").input_value() == "5"


def test_results_show_every_split_with_intervals_and_failures_apart(page):
    rows = page.locator("table.results tbody tr").all_inner_texts()
    assert len(rows) == 4
    assert all(re.search(r"\d+\.\d %\s\[\d+\.\d, \d+\.\d\]", row.replace("\xa0", " ")) for row in rows)
    assert page.locator("table.results th").last.inner_text() == "failures"
    assert page.locator("table.results circle.before").count() == 4
    assert page.locator("table.results circle.after").count() == 4


def test_a_point_tells_its_counts_and_pass_at_k(page):
    page.locator("table.results circle.after").first.hover()
    told = page.locator("#tip").inner_text().replace("\xa0", " ")
    assert re.search(r"after training\n\d+\.\d % \[.*\]\n\d+ of \d+ attempts at 48 tasks\npass@4: \d+\.\d %", told)
    page.mouse.move(0, 0)


def test_every_drawing_fills_the_room_it_has(page):
    page.wait_for_timeout(200)
    drawn = page.evaluate("[...document.querySelectorAll('main svg')].map((one) => [one.viewBox.baseVal.width, one.clientWidth])")
    assert len(drawn) >= 10
    assert [pair for pair in drawn if abs(pair[0] - pair[1]) > 1] == []


def test_an_evaluation_alone_has_neither_before_nor_after(browser, tmp_path):
    folder = SyntheticRun(tmp_path / "alone", steps=0, finished=False).write()
    rows = folder / "evaluations.jsonl"
    rows.write_bytes(rows.read_bytes().replace(b'"phase":"before"', b'"phase":"alone"'))
    opened = browser.new_page()
    opened.goto(write_report(read_run(folder)).as_uri())
    heads = opened.locator("table.results th").all_inner_texts()
    assert [head for head in heads if "%" not in head] == ["split", "sampling", "pass rate", "failures"]
    assert opened.locator("table.results tbody tr").count() == 4
    assert "evaluation" in opened.locator("#subtitle").inner_text()
    opened.close()


def test_an_unfinished_run_says_so_and_shows_no_after(browser, unfinished_run):
    opened = browser.new_page(color_scheme="dark", viewport={"width": 420, "height": 800})
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.goto(write_report(read_run(unfinished_run)).as_uri())
    assert said == []
    assert "step 7 of 40" in opened.locator("#subtitle").inner_text()
    assert opened.locator("circle.after").count() == 0
    assert "unknown" in opened.locator("#cost-body").inner_text()
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing may stick out on a narrow screen"
    opened.close()


def test_without_its_script_the_page_still_says_the_result(browser, finished_run):
    context = browser.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.goto(write_report(read_run(finished_run)).as_uri())
    assert "held-out pass rate" in opened.locator("noscript").inner_text()
    context.close()


def test_the_page_is_small_and_replaced_in_one_move(finished_run):
    report = write_report(read_run(finished_run))
    assert report.stat().st_size < 1_500_000
    assert not list(finished_run.glob(".report-*"))


def test_tasks_are_compared_early_and_late(page):
    rows = page.locator("#halves tbody tr")
    assert rows.count() == 24
    assert "points" in page.locator("#halves").inner_text()
    assert "how many lines in a.txt of t" in rows.first.inner_text()
