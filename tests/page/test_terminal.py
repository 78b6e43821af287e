"""A run on one screen, and the list of runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small_run import write_small_run

import asyncrl
from asyncrl.cli import main
from asyncrl.page.terminal import age, list_text, status_text


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_small_run(tmp_path / "runs" / "small")
    return tmp_path / "runs"


def add(run: Path, event: str, step: int, **values: object) -> None:
    """One more record."""
    newest = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    record = {key: newest[key] for key in ("schema", "attempt", "version", "time")}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record | {"event": event, "step": step} | values) + "\n")


def screen(run: Path, width: int = 80) -> str:
    found = asyncrl.open_run(run)
    return status_text(found, (found.status().time or 0.0) + 125, width)


def test_a_screen_says_what_a_run_did_and_when(runs: Path) -> None:
    text = screen(runs / "small")
    assert text.startswith("small: interrupted, step 6 of 6")
    assert "newest      evaluation, 2 min 5 s ago" in text
    assert "held out    90.0%, at version 6" in text and "12 trained, 1 dropped" in text
    assert f"asyncrl report {runs / 'small'}" in " ".join(text.split())


@pytest.mark.parametrize("width", [40, 80])
def test_alarms_of_one_metric_are_one_line_and_lines_fit(runs: Path, width: int) -> None:
    for step in (3, 4, 6):
        add(
            runs / "small", "alarm", step, alarm=f"entropy = 0.{step} is below 0.5: {'advice ' * 9}"
        )
    add(runs / "small", "alarm", 5, alarm="kl_k3 = 9 is above 1: lower the learning rate")
    text = " ".join(screen(runs / "small", width).split())
    assert "alarm step 5: kl_k3 = 9 is above 1" in text
    assert "alarm 3 times, steps 3 to 6: entropy = 0.6 is below 0.5" in text
    long = [line for line in screen(runs / "small", width).splitlines() if len(line) > width]
    assert all(str(runs) in line for line in long)


def test_a_run_that_waits_says_for_what_until_it_goes_on(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs / "small"
    add(run, "stall", 6, stage="generation", waits_for="replica a", stall_s=61.0)
    add(run, "alarm", 6, alarm="entropy = 0 is below 1")
    assert "waits for" not in screen(run), "it has ended"
    monkeypatch.setattr("asyncrl.rundir.reader.is_locked", lambda directory: True)
    assert "waits for   generation: replica a, since " in screen(run)
    add(run, "checkpoint", 6)
    assert "waits for" not in screen(run)


def test_a_screen_names_damaged_files_and_quotes_its_command(tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "my run")
    for path in (run / "outcomes").iterdir():
        path.write_bytes(b"x")
    text = " ".join(screen(run).split())
    assert "damaged outcomes/" in text and f"asyncrl report '{run}'" in text


@pytest.mark.parametrize(
    "line", ['{"event": "x", "attempt": null}', '{"event": "x", "version": "1"}', "[]", "{}"]
)
def test_a_record_that_is_none_is_named(
    runs: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    with (runs / "small" / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(SystemExit) as ended:
        main(["status", str(runs / "small")])
    assert ended.value.code == 2 and "remove that line" in capsys.readouterr().err
    assert "damaged: " in list_text(runs, 0.0)


def test_the_list_has_each_run_and_the_newest_first(runs: Path) -> None:
    shutil.copytree(runs / "small", runs / "other")
    add(runs / "other", "step", 5, **{"reward/mean": 0.25})
    (runs / "no_run").mkdir()
    (runs / "loop").symlink_to(runs / "loop")
    shutil.copytree(runs / "small", runs / "old")
    (runs / "old" / "config.yaml").write_text("max_steps: [\n")
    shutil.copytree(runs / "small", runs / ("long" * 40))
    shutil.copytree(runs / "small", runs / "two\nlines")
    damaged = runs / "damaged"
    shutil.copytree(runs / "small", damaged)
    (damaged / "metrics.jsonl").write_text("{\n{}\n")
    text = list_text(runs, 0.0)
    head, *rows = text.splitlines()
    assert head.split() == ["run", "state", "step", "reward", "held", "out", "newest"]
    assert len(rows) == 6 and max(map(len, text.splitlines())) < 140
    assert "old" in [row.split()[0] for row in rows if "damaged: " in row]
    other = next(row for row in rows if row.startswith("other"))
    assert "0.25" in other and "90.0%" in other and "damaged: " in text


def test_the_commands_print_and_refuse(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        found = capsys.readouterr()
        return int(stop.value.code or 0), found.out + found.err

    monkeypatch.setenv("ASYNCRL_RUNS", str(runs))
    code, text = ended("ls")
    assert code == 0 and "small" in text
    assert ended("status", str(runs / "small"))[0] == 0
    code, text = ended("ls", str(runs / "nothing"))
    assert code == 2 and "is no folder" in text
    code, text = ended("ls", str(runs / "small"))
    assert code == 2 and "is one run" in text
    code, text = ended("ls", str(runs / "small" / "groups"))
    assert code == 2 and "has no run" in text
    code, text = ended("status", str(runs / "nothing"))
    assert code == 2


def test_an_age_has_two_units() -> None:
    assert [age(one) for one in (0, 59.6, 3_725, 90_061, -4)] == [
        "0 s",
        "1 min",
        "1 h 2 min",
        "1 d 1 h",
        "0 s",
    ]
