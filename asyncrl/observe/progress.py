"""Displays the progress of a run: a live table on a terminal, plain lines in a log.

The run fills in a `Progress` and passes it to a `ProgressView`. Model output is shown without
secrets and control characters, and is never read as markup.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TextIO

from asyncrl.contracts.errors import RunStoppedError
from asyncrl.runtime.redact import redact

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table
BORDER, BORDER_LINES = 4, 3
"""Columns of the frame, and lines of the frame and the terminal's last line."""
COLUMN_WIDTH, MOST_COLUMNS = 44, 3
"""Characters that one column of names and values needs, and the most such columns."""
MOST_NOTES, MOST_ALARMS = 3, 4
MOST_SAMPLE_LINES = 6


class Alarm(NamedTuple):
    """A metric that has been outside its healthy range."""

    text: str
    """The newest line of the alarm."""
    step: int
    """The step of that line."""
    steps: int = 1
    """Steps that had the alarm."""


@dataclass(slots=True)
class Progress:
    """The state of a run at one moment. None means not known yet. Times are in seconds, rates in
    tokens per second."""

    phase: str
    """What the run is doing: `starting`, `warm start`, `evaluating`, `training`, `saving`, `done`,
    …"""
    step: int = 0
    max_steps: int = 0
    learner_version: int | None = None
    committed_version: int | None = None
    reward: float | None = None
    accuracy: float | None = None
    """Mean of the reward `eval.accuracy` over the last batch's trajectories (sampled)."""
    loss: float | None = None
    """Loss of the last step on a dataset, in nats per token or per pair."""
    held_out_loss: float | None = None
    """Loss on the held-out rows of the last evaluation, in nats per token or per pair."""
    held_out: str | None = None
    """Result of the last evaluation's first set."""
    staleness_mean: float | None = None
    staleness_max: int | None = None
    max_staleness: int | None = None
    generated_tokens_per_s: float | None = None
    """Tokens that the engines generate, unfinished completions included."""
    trained_tokens_per_s: float | None = None
    learner_waited_s: float | None = None
    """Total seconds in which the learner had no batch to train."""
    generators_waited_s: float | None = None
    """Total seconds in which no group was being generated."""
    elapsed_s: float = 0.0
    left_s: float | None = None
    prompt: str = ""
    """The prompt of a trajectory of the last batch, without the text that all prompts share."""
    completion: str = ""
    sample_reward: float | None = None
    """The reward of that completion."""
    sample_parts: Mapping[str, float | None] = field(default_factory=dict)
    """Reward function → its reward for that completion."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Reward function → mean over the last batch."""
    logprob_difference: float | None = None
    """Largest difference between log-probs of generator and learner in the last check, in nats."""
    logprob_checks: int = 0
    notes: tuple[str, ...] = field(default=())
    """Short lines about unusual events, newest last."""
    alarms: Mapping[str, Alarm] = field(default_factory=dict)
    """Metric → its alarm."""


class ProgressView:
    """Shows the newest `Progress`. A terminal gets a table that is redrawn. A log gets one
    line per interval and one per change of phase.

    Use it as a context manager. `show` is cheap and may be called often.
    """

    def __init__(
        self,
        interval_s: float = 10.0,
        stream: TextIO | None = None,
        live: bool | None = None,
        sample_every_s: float = 60.0,
    ) -> None:
        self._stream = stream or sys.stdout
        self._interval_s = interval_s
        self._live_wanted = self._stream.isatty() if live is None else live
        self._live: Live | None = None
        self._last_line = -float("inf")
        self._last_phase = ""
        self._last: Progress | None = None
        self._newest: Progress | None = None
        self._sample_every_s = sample_every_s
        self._last_sample = -float("inf")
        self._notes: tuple[str, ...] = ()
        self._alarmed: set[str] = set()
        """Metrics whose alarm a log has."""

    def __enter__(self) -> ProgressView:
        if self._live_wanted:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(file=self._stream), refresh_per_second=4, transient=False
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._newest is not None:
            ways = (KeyboardInterrupt, asyncio.CancelledError, RunStoppedError)
            stopped = isinstance(error, ways)
            # A full disk may be why the run failed; its own error must reach the user.
            with contextlib.suppress(OSError):
                self.show(replace(self._newest, phase="interrupted" if stopped else "failed"))
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._last is not None:
            self._print(self._last)

    def show(self, progress: Progress) -> None:
        """Show this state. A log gets it only if the phase is new or the interval is over."""
        self._newest = progress
        if self._live is not None:
            self._live.update(table(progress))
        elif (
            progress.phase != self._last_phase
            or time.monotonic() - self._last_line >= self._interval_s
        ):
            self._print(progress)
        else:
            self._last = progress

    def _print(self, progress: Progress) -> None:
        now = time.monotonic()
        self._last_phase, self._last_line, self._last = progress.phase, now, None
        lines = [
            line(progress),
            *(
                f"  note: {display_line(note, None)}"
                for note in progress.notes
                if note not in self._notes
            ),
            *(
                f"  alarm: {_alarm(alarm)}"
                for name, alarm in progress.alarms.items()
                if name not in self._alarmed
            ),
        ]
        self._alarmed |= progress.alarms.keys()
        self._notes = progress.notes
        if progress.prompt and now - self._last_sample >= self._sample_every_s:
            self._last_sample = now
            lines.append(
                f"  sample: {display_line(progress.prompt, 160)} →"
                f" {display_line(progress.completion, 320)}   reward {_sample_reward(progress)}"
            )
        print("\n".join(lines), file=self._stream, flush=True)


def line(progress: Progress) -> str:
    """The most important values as one plain line, without those that are not known yet."""
    values = {
        "step": f"{progress.step}/{progress.max_steps}" if progress.max_steps else None,
        "reward": _number(progress.reward, ".3f"),
        "accuracy": share(progress.accuracy),
        "loss": _number(progress.loss, ".4g"),
        "held-out loss": _number(progress.held_out_loss, ".4g"),
        "held-out": progress.held_out,
        "staleness": _number(progress.staleness_mean, ".2f", f", max {progress.staleness_max}"),
        "tok/s generated": _number(progress.generated_tokens_per_s, ",.0f"),
        "trained": _number(progress.trained_tokens_per_s, ",.0f"),
        "alarms": str(len(progress.alarms)) if progress.alarms else None,
        "left": None if progress.left_s is None else duration(progress.left_s),
    }
    return " | ".join(
        [
            duration(progress.elapsed_s),
            display_line(progress.phase),
            *(f"{name} {value}" for name, value in values.items() if value is not None),
        ]
    )


def table(progress: Progress) -> RenderableType:
    """The live table, as wide as the terminal: progress bar, known values in columns, full notes,
    and as much of a sample as fits."""
    from rich.console import ConsoleOptions, RenderResult

    class Fitted:
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            yield _panel(progress, console, options.max_width)

    return Fitted()


def _panel(progress: Progress, console: Console, width: int) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    inner = max(1, width - BORDER)
    rows = list(_rows(progress).items())
    columns = max(1, min(MOST_COLUMNS, inner // COLUMN_WIDTH))
    per_column = -(-len(rows) // columns)
    known = Table.grid(padding=(0, 2), expand=True)
    for _ in range(columns):
        known.add_column(ratio=1)
    known.add_row(
        *(
            _pairs(rows[start : start + per_column])
            for start in range(0, columns * per_column, per_column)
        )
    )
    body: list[RenderableType] = [known]
    if progress.max_steps:
        bar = Table.grid(expand=True)  # a bar outside a table would not end its line
        bar.add_row(
            ProgressBar(total=progress.max_steps, completed=min(progress.step, progress.max_steps))
        )
        body = [bar, known]
    newest = sorted(progress.alarms.values(), key=lambda alarm: alarm.step)
    body += [Text(_alarm(alarm), style="red", overflow="fold") for alarm in newest[-MOST_ALARMS:]]
    if len(newest) > MOST_ALARMS:
        body.append(Text(f"{len(newest)} alarms in all: see metrics.jsonl", style="red"))
    body += [
        Text(display_line(note, None), style="yellow", overflow="fold")
        for note in progress.notes[-MOST_NOTES:]
    ]
    taken = BORDER_LINES + len(
        console.render_lines(Group(*body), console.options.update(width=inner))
    )
    body += _sample(progress, console, inner, console.size.height - taken)
    return Panel(
        Group(*body),
        title=Text(f"asyncrl · {display_line(progress.phase)}", style="bold"),
        title_align="left",
        width=width,
    )


def _sample(progress: Progress, console: Console, width: int, lines: int) -> list[RenderableType]:
    """A trajectory of the last batch on at most `lines` lines: prompt, completion and reward."""
    from rich.text import Text

    if not progress.prompt or lines < 3:
        return []
    prompt_lines = min(MOST_SAMPLE_LINES, lines // 3)
    parts = {
        "prompt": (progress.prompt, prompt_lines),
        "completion": (progress.completion, min(MOST_SAMPLE_LINES, lines - prompt_lines - 1)),
        "its reward": (_sample_reward(progress), 1),
    }
    shown: list[RenderableType] = []
    for name, (value, most) in parts.items():
        wrapped = Text.assemble((f"{name:<12}", "dim"), display_line(value, None)).wrap(
            console, width, overflow="fold"
        )
        if len(wrapped) > most:
            wrapped[most - 1].truncate(width - 1)
            wrapped[most - 1].append("…")
        shown += wrapped[:most]
    return shown


def _alarm(alarm: Alarm) -> str:
    times = (
        f"{alarm.steps} steps, the last is {alarm.step}"
        if alarm.steps > 1
        else f"step {alarm.step}"
    )
    return display_line(f"{times}: {alarm.text}", None)


def _sample_reward(progress: Progress) -> str:
    return _reward(progress.sample_reward, progress.sample_parts) or "none"


def _reward(reward: float | None, parts: Mapping[str, float | None]) -> str | None:
    """The reward, followed by the reward of each function if there are several."""
    if len(parts) < 2:
        return _number(reward, ".3f")
    each = ", ".join(
        f"{display_line(name, 40)} {_number(value, '.3g') or 'none'}"
        for name, value in parts.items()
    )
    return f"{_number(reward, '.3f') or 'none'} ({each})"


def display_line(text: str, limit: int | None = 80) -> str:
    """The text on one line, at most `limit` characters long, without secrets and control characters
    (model output may contain escape sequences)."""
    text = redact(text)  # before the cut, because half a secret is not recognized
    cut = text if limit is None or len(text) <= limit else text[: limit - 1] + "…"
    return "".join(
        character if character.isprintable() else "�" for character in cut.replace("\n", "⏎")
    )


def duration(seconds: float) -> str:
    """Seconds as `47s`, `5m07s` or `2h05m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def time_left(step: int, max_steps: int, training_s: float) -> float | None:
    """Seconds left at the mean pace of the steps so far; None before the first step."""
    return None if step <= 0 else training_s / step * max(0, max_steps - step)


def _pairs(rows: list[tuple[str, str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(Text(name, style="dim"), Text(value, overflow="fold"))
    return grid


def _rows(progress: Progress) -> dict[str, str]:
    """Name → text of each value that is known, in the order in which they are shown."""
    rows = {
        "step": f"{progress.step} of {progress.max_steps}" if progress.max_steps else None,
        "version": _versions(progress),
        "reward": _reward(progress.reward, progress.reward_parts),
        "accuracy": share(progress.accuracy, " of the last batch"),
        "loss": _number(progress.loss, ".4g"),
        "held-out loss": _number(progress.held_out_loss, ".4g", " at the last evaluation"),
        "held-out": progress.held_out and f"{progress.held_out} at the last evaluation",
        "staleness": _staleness(progress),
        "generated": _number(progress.generated_tokens_per_s, ",.0f", " tok/s"),
        "trained": _number(progress.trained_tokens_per_s, ",.0f", " tok/s"),
        "log-probs": _logprobs(progress),
        "waited": _waited(progress),
        "elapsed": duration(progress.elapsed_s),
        "left": None if progress.left_s is None else duration(progress.left_s),
    }
    return {name: value for name, value in rows.items() if value is not None}


def share(value: float | None, unit: str = "") -> str | None:
    """A mean as a percentage if it can be one, and otherwise as a number."""
    form = ".1%" if value is not None and 0 <= value <= 1 else ".4g"
    return _number(value, form, unit)


def _number(value: float | None, form: str, unit: str = "") -> str | None:
    return None if value is None else f"{value:{form}}{unit}"


def _versions(progress: Progress) -> str | None:
    if progress.learner_version is None:
        return None
    committed = "none" if progress.committed_version is None else progress.committed_version
    return f"{progress.learner_version} (committed {committed})"


def _staleness(progress: Progress) -> str | None:
    if progress.staleness_mean is None:
        return None
    bound = "" if progress.max_staleness is None else f" of {progress.max_staleness}"
    return f"mean {progress.staleness_mean:.2f}, max {progress.staleness_max}{bound}"


def _logprobs(progress: Progress) -> str | None:
    if progress.logprob_difference is None:
        return None
    checks = f"{progress.logprob_checks} check{'s' if progress.logprob_checks > 1 else ''}"
    return f"{progress.logprob_difference:.1e} apart at most, {checks}"


def _waited(progress: Progress) -> str | None:
    sides = {"learner": progress.learner_waited_s, "generators": progress.generators_waited_s}
    known = [
        f"{side} {duration(seconds)}" for side, seconds in sides.items() if seconds is not None
    ]
    return ", ".join(known) or None
