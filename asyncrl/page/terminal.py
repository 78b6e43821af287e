"""One run on one screen, and all runs of a folder as a list."""

from __future__ import annotations

import math
import shlex
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from asyncrl.config import ConfigError, OfflineConfig
from asyncrl.page.verdict import verdict
from asyncrl.rundir.reader import Run, RunNotFoundError, open_run
from asyncrl.runtime.redact import shown

MARKS = {"good": "+", "bad": "!", "note": "."}
LABEL = 12
MOST_ALARMS = 5
LONGEST_NAME = 32
BESIDE = ("alarm", "memory", "error", "failed_sessions")
"""Events that a run records while it waits."""
DASH = "-"


@dataclass(frozen=True, slots=True)
class Listed:
    """A run in the list."""

    name: str
    state: str
    step: str
    reward: str
    held_out: str
    seen: str
    """How long ago it wrote its newest record."""


def status_text(run: Run, now: float, width: int = 0) -> str:
    """What a run does now, what it waits for and since when, and what went wrong.

    Args:
        now: Unix seconds.
        width: characters of a line; default: the terminal's.
    """
    width = width or shutil.get_terminal_size().columns
    status, records = run.status(), run.records()
    generates = not isinstance(run.settings, OfflineConfig)
    damaged = list[str]()
    outcomes = Counter(run.outcomes(damaged)["outcome"].to_pylist())
    ago = DASH if status.time is None else f"{age(now - status.time)} ago"
    lines = [
        f"{run.settings.name}: {status.state}, step {status.step:,} of {status.max_steps:,}",
        *(
            _wrapped(f"{MARKS[one.level]} ", one.text, width)
            for one in verdict(status, records, outcomes, generates)
        ),
        "",
        _line("newest", f"{status.phase}, {ago}", width),
    ]
    if status.state == "running" and (waiting := _waits(records)):
        lines.append(_line("waits for", waiting, width))
    lines += [_line(label, text, width) for label, text in _figures(records)]
    lines += [_line("alarm", text, width) for text in _alarms(records)[-MOST_ALARMS:]]
    lines += [_line("damaged", said, width) for said in damaged]
    lost = [(name, count) for name, count in outcomes.items() if name != "trained"]
    if lost:
        said = ", ".join(f"{count:,} {name}" for name, count in sorted(lost))
        lines.append(_line("groups", f"{outcomes['trained']:,} trained, {said}", width))
    lines += ["", _line("look at it", f"asyncrl report {shlex.quote(str(run.directory))}", width)]
    return "\n".join(lines)


def list_text(root: Path, now: float) -> str:
    """The runs of a folder, the newest first. A damaged one is named with what is wrong.

    Raises:
        ConfigError: there is no such folder, or it has no run.
    """
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder; name the folder of your runs, such as runs")
    if (root / "config.yaml").is_file():
        raise ConfigError(f"{root} is one run; use `asyncrl status`, or name the folder above it")
    found = [run for path in root.iterdir() if (run := _opened(path)) is not None]
    if not found:
        raise ConfigError(f"{root} has no run; name the folder of your runs, such as runs")
    listed = [_listed(run, now) for run in sorted(found, key=_newest, reverse=True)]
    head = Listed("run", "state", "step", "reward", "held out", "newest")
    rows = [
        (one.name, one.state, one.step, one.reward, one.held_out, one.seen)
        for one in (head, *listed)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(wide) for text, wide in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def age(seconds: float) -> str:
    """A span of time in its two largest units."""
    left = max(0, round(seconds))
    parts = list[str]()
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def _opened(path: Path) -> Run | None:
    """The run in a folder; None if it is no run."""
    try:
        return open_run(path)
    except (RunNotFoundError, ConfigError, OSError, RuntimeError):  # also a loop of links
        return None


def _newest(run: Run) -> float:
    path = run.directory / "metrics.jsonl"
    return (path if path.exists() else run.directory).stat().st_mtime


def _listed(run: Run, now: float) -> Listed:
    name = shown(" ".join(run.directory.name.split()))
    name = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
    try:
        status, records = run.status(), run.records()
    except Exception as error:  # a file that somebody else wrote; the others are listed
        said = " ".join(str(error).replace(f"{run.directory}/", "").split())
        return Listed(name, f"damaged: {shown(said[:60])}", DASH, DASH, DASH, DASH)
    reward = _last(records, "step", "reward/mean")
    held_out = _last(records, "evaluation", "eval/accuracy")
    return Listed(
        name,
        status.state,
        f"{status.step:,} of {status.max_steps:,}",
        DASH if reward is None else f"{reward:.3g}",
        DASH if held_out is None else f"{held_out:.1%}",
        DASH if status.time is None else f"{age(now - status.time)} ago",
    )


def _figures(records: Sequence[dict[str, Any]]) -> Iterable[tuple[str, str]]:
    """Labels and their texts: the newest figures that there are."""
    for record in reversed(records):
        if record["event"] == "evaluation":
            found = {
                name: value
                for name, value in record.items()
                if name in ("eval/accuracy", "eval/loss") and isinstance(value, float)
            }
            for name, value in found.items():
                said = f"{value:.1%}" if name == "eval/accuracy" else f"loss {value:.4g}"
                yield "held out", f"{said}, at version {record['version']:,}"
            break
    step = next((one for one in reversed(records) if one["event"] == "step"), None)
    if step is None:
        return
    for label, name, form in (
        ("reward", "reward/mean", "{:.3g}, mean of the last step"),
        ("loss", "loss", "{:.4g}, of the last step"),
        ("staleness", "staleness/mean", "{:.2f} versions, mean of the last step"),
    ):
        if isinstance(value := step.get(name), int | float):
            yield label, form.format(value)


def _alarms(records: Sequence[dict[str, Any]]) -> list[str]:
    """The newest alarm of each metric with its steps, the newest last."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if record["event"] == "alarm":
            metric = str(record.get("alarm") or "").partition(" = ")[0]
            found.setdefault(metric, []).append(record)
    texts = []
    for alarms in sorted(found.values(), key=lambda alarms: alarms[-1]["step"]):
        first, last, count = alarms[0]["step"], alarms[-1]["step"], len(alarms)
        steps = f"step {last:,}" if count == 1 else f"{count} times, steps {first:,} to {last:,}"
        texts.append(f"{steps}: {alarms[-1].get('alarm') or ''}")
    return texts


def _waits(records: Sequence[dict[str, Any]]) -> str:
    """What the run waits for and since when, if nothing has happened since it was found."""
    newest = next((one for one in reversed(records) if one["event"] not in BESIDE), None)
    if newest is None or newest["event"] != "stall":
        return ""
    since = newest["time"] - (newest.get("stall_s") or 0.0)
    return f"{newest.get('stage', '')}: {newest.get('waits_for', '')}, since {_clock(since)}"


def _last(records: Sequence[dict[str, Any]], event: str, name: str) -> float | None:
    for record in reversed(records):
        value = record.get(name)
        if record["event"] == event and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S} UTC"


def _line(label: str, text: str, width: int) -> str:
    return _wrapped(f"{label:<{LABEL}}", text, width)


def _wrapped(first: str, text: str, width: int) -> str:
    return textwrap.fill(
        " ".join(text.split()),
        max(width, 40),
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,  # a path
        break_on_hyphens=False,
    )
