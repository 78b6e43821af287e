"""The page in a real browser: it opens without a network, and text of the run stays text."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_run import small_group, write_small_run

import asyncrl
from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.outcomes import Outcome
from asyncrl.contracts.rows import SESSION_COLUMNS, TURN_COLUMNS, Group
from asyncrl.page.report import write_report
from asyncrl.rundir.outcomes import OutcomesWriter

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)"
)
HOSTILE = "</script><img src=x onerror=\"document.title='taken'\">\u202e\u0301\x07<b>bold</b>"


class Opened:
    """A page of the browser, and what its console said."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.set_default_timeout(60_000)

    def go(self, address: str) -> None:
        self.page.goto(address)
        self.page.wait_for_selector("header.top")

    def text(self, selector: str = "main") -> str:
        return str(self.page.inner_text(selector))

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any) -> Iterator[Opened]:
    context = chromium.new_context(viewport={"width": 1200, "height": 800}, offline=True)
    yield Opened(context.new_page())
    context.close()


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_run(tmp_path_factory.mktemp("runs") / "small")


def report(run: Path) -> str:
    write_report(asyncrl.open_run(run), run / "report.html")
    return (run / "report.html").as_uri()


def add(run: Path, number: int, *groups: Group) -> None:
    """Write a file of groups with their outcomes."""
    known = pq.read_schema(next((run / "groups").glob("*.parquet")))
    table = groups_to_table(list(groups))
    for name in known.names:
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(len(table), known.field(name).type))
    pq.write_table(table, run / "groups" / f"attempt_0-{number:06d}.parquet")
    writer = OutcomesWriter(run / "outcomes", attempt=0)
    writer.write([Outcome(0, group.ordinal, "trained", "", 6, 5, 1) for group in groups])
    writer.flush()


def hostile(ordinal: int) -> Group:
    group = small_group(ordinal, 3)
    first = group.trajectories[0]
    said = replace(first, completion=replace(first.completion, text=HOSTILE))
    return replace(
        group,
        prompt=replace(group.prompt, text=HOSTILE, columns={"answer": HOSTILE}),
        trajectories=(said, *group.trajectories[1:]),
    )


def test_a_report_opens_without_a_network_and_goes_back(small_run: Path, opened: Opened) -> None:
    opened.go(report(small_run))
    assert opened.page.title() == "small · asyncrl" and "It learns" in opened.text(".verdict")
    opened.page.wait_for_selector("#chart-accuracy svg")
    opened.page.click("text=Timeline")
    opened.page.wait_for_selector("#chart-timeline svg")
    opened.page.click("text=Groups")
    assert "14 of 14 groups" in opened.text()
    opened.page.keyboard.press("ArrowDown")
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_selector("text=Siblings")
    assert opened.page.evaluate("location.hash").endswith("/group/3")
    opened.page.go_back()
    opened.page.wait_for_selector(".list")
    assert opened.said == []


@pytest.mark.slow
def test_an_address_opens_a_token_and_arrows_go_on(small_run: Path, opened: Opened) -> None:
    opened.go(f"{report(small_run)}#/step/6/group/12/1/token/1")
    facts = opened.text(".facts")
    assert "2 of 3" in facts and "-0.4" in facts and "version" in facts
    assert "-0.3" in facts and "1.1052" in facts and "stops its gradient" not in facts
    opened.page.keyboard.press("ArrowRight")
    assert "3 of 3" in opened.text(".facts") and "stops its gradient" in opened.text(".facts")
    assert opened.page.evaluate("location.hash") == "#/step/6/group/12/1/token/2"
    opened.page.evaluate("location.hash = '#/group/100/0/token/0'")
    opened.page.wait_for_selector("text=no: its group is dropped")
    for missing, said in (("12/7", "no trajectory 7"), ("12/0/token/9", "no token 9")):
        opened.page.evaluate("place => { location.hash = place; }", f"#/group/{missing}")
        opened.page.wait_for_selector(f"text={said}")
    for hostile_place in ("#/group/<img src=x>", "#/timeline/<b>", "#/nothing", "#/group/99999"):
        opened.page.evaluate("place => { location.hash = place; }", hostile_place)
        opened.page.wait_for_selector("main section")
    assert opened.count("main img") == 0 and opened.said == []


@pytest.mark.slow
def test_filters_choose_groups(small_run: Path, opened: Opened) -> None:
    opened.go(f"{report(small_run)}#/groups")
    opened.page.select_option("select >> nth=0", "dropped")
    assert "1 of 14 groups" in opened.text()
    opened.page.select_option("select >> nth=0", "all")
    opened.page.fill("input[type=search]", "12 + 1")
    assert "1 of 14 groups" in opened.text()
    opened.page.fill("input[type=search]", "")
    opened.page.fill("input[type=number]", "6")
    assert "3 of 14 groups" in opened.text() and opened.said == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_telephone_scrolls_down_only(small_run: Path, chromium: Any, scheme: str) -> None:
    address = report(small_run)
    context = chromium.new_context(
        viewport={"width": 390, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
    )
    opened = Opened(context.new_page())
    for place in ("", "#/timeline", "#/groups", "#/group/12/1/token/0", "#/lost", "#/settings"):
        opened.go(f"{address}{place}")
        opened.page.reload()
        opened.page.wait_for_selector("main section")
        assert opened.page.evaluate("document.documentElement.scrollWidth") == 390, place
    page = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert page == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(30, 30, 30)")
    assert opened.said == []
    context.close()


@pytest.mark.slow
def test_text_of_the_run_stays_text(tmp_path: Path, opened: Opened) -> None:
    run = write_small_run(tmp_path / "small")
    add(run, 200, hostile(200))
    address = report(run)
    for place in ("#/groups", "#/group/200", "#/group/200/0/token/0", "#/lost", "#/timeline"):
        opened.go(f"{address}{place}")
        opened.page.wait_for_selector("main section")
    opened.go(f"{address}#/group/200")
    opened.page.reload()
    assert "<img src=x" in opened.text() and "\\u{202e}" in opened.text()
    assert opened.count("main img") == opened.count("main b >> text=bold") == 0
    assert opened.page.title() == "small · asyncrl" and opened.said == []


@pytest.mark.slow
def test_a_session_is_a_conversation(tmp_path: Path, opened: Opened) -> None:
    run = write_small_run(tmp_path / "small")
    add(run, 200, small_group(200, 3))
    path = run / "groups" / "attempt_0-000200.parquet"
    call = {"type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    chat = [
        {"role": "user", "content": HOSTILE},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "long " * 400},
        {"role": "assistant", "content": "the end"},
    ]
    columns: dict[str, list[Any]] = {
        "session_messages": [json.dumps(chat)] * 2,
        "session_end": ["done", "deadline"],
        "session_note": [None, HOSTILE],
        "turn_trajectory": [0, 0, 1],
        "turn_parent": [-1, 0, -1],
        "turn_context": [[5, 6], [7], [5]],
        "turn_tokens": [1, 1, 3],
        "turn_status": ["ok"] * 3,
        "turn_replica": ["replica-1"] * 3,
        "turn_finish_reason": ["stop"] * 3,
        "turn_branch_reason": [""] * 3,
        "turn_started_at": [210.1, 210.6, 210.1],
        "turn_finished_at": [210.4, 210.9, 210.9],
    }
    table = pq.read_table(path)
    kinds = TURN_COLUMNS | SESSION_COLUMNS
    for name, values in columns.items():
        table = table.append_column(name, pa.array([values], kinds[name]))
    pq.write_table(table, path)
    opened.go(f"{report(run)}#/group/200")
    opened.page.click("text=session 0")
    opened.page.wait_for_selector(".conversation")
    said = opened.text(".conversation")
    assert "1 token in 0.3 s" in said and "0.2 s after the turn before" in said
    assert "<img src=x" in said and opened.count("main img") == 0
    opened.page.click("text=as the model saw it")
    assert "[5][6][8]" in opened.text(".conversation")
    assert opened.said == []


@pytest.mark.slow
def test_a_long_run_stays_smooth(tmp_path: Path, opened: Opened) -> None:
    """20,000 groups: the page is at most 5 MB, opens in two seconds, and draws few rows."""
    run = write_small_run(tmp_path / "small")
    group = small_group(0, 3)
    many = [
        replace(group, prompt=replace(group.prompt, ordinal=ordinal))
        for ordinal in range(1_000, 21_000)
    ]
    add(run, 300, *many)
    address = report(run)
    assert (run / "report.html").stat().st_size < 5_000_000
    opened.go(f"{address}#/groups")
    assert "20,014 of 20,014 groups" in opened.text() and opened.count(".list .row") < 60
    opened.page.evaluate("document.querySelector('.list').scrollTop = 1e9")
    opened.page.wait_for_selector("text=#20999")
    assert opened.count(".list .row") < 60 and opened.said == []


@pytest.mark.slow
def test_a_damaged_run_opens_with_what_is_left(tmp_path: Path, opened: Opened) -> None:
    run = write_small_run(tmp_path / "small")
    next((run / "groups").glob("*.parquet")).write_bytes(b"no parquet")
    opened.go(report(run))
    assert "These files are damaged" in opened.text() and "groups/" in opened.text(".note.bad")
    assert opened.said == []


@pytest.mark.slow
def test_a_live_page_grows_with_the_run(tmp_path: Path, chromium: Any) -> None:
    run = write_small_run(tmp_path / "small")
    command = [sys.executable, "-m", "asyncrl.cli", "watch", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[0]
            context = chromium.new_context()
            opened = Opened(context.new_page())
            opened.go(f"{address}#/groups")
            assert "14 of 14 groups" in opened.text() and "live" in opened.text("header")
            add(run, 200, hostile(200))
            opened.page.wait_for_selector("text=15 of 15 groups")
            record = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record | {"event": "step", "step": 7, "version": 7}) + "\n")
            opened.page.wait_for_selector("text=step 7 of 6")
            assert opened.said == []
            other = chromium.new_context()
            answer = other.request.get(f"{address}values", headers={"Origin": "http://evil.test"})
            assert answer.status == 403
            assert other.request.get(f"{address[:-3]}/").status == 404
            server.terminate()
            opened.page.wait_for_selector("text=does not answer")
            other.close()
            context.close()
        finally:
            server.kill()
