"""The live table and the log lines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
from small_config import small_config

from asyncrl.control.bookkeeping import RunProgress
from asyncrl.control.coordinator import Coordinator
from asyncrl.observe.live import Live, RunRecorder, _rate
from asyncrl.observe.progress import (
    Alarm,
    Progress,
    ProgressView,
    display_line,
    duration,
    line,
    table,
    time_left,
)
from asyncrl.observe.summary import before_and_after
from asyncrl.preflight.specs import observe_spec
from asyncrl.rundir.metrics import MetricsWriter
from asyncrl.rundir.outcomes import OutcomesWriter
from asyncrl.testing.generators import fake_status

TRAINING = Progress(
    phase="training",
    step=73,
    max_steps=200,
    learner_version=73,
    committed_version=72,
    reward=0.812,
    accuracy=0.774,
    staleness_mean=1.42,
    staleness_max=2,
    max_staleness=2,
    generated_tokens_per_s=1834.2,
    trained_tokens_per_s=1790.0,
    learner_waited_s=12.4,
    generators_waited_s=40.0,
    elapsed_s=241.0,
    left_s=190.0,
    prompt="12 - 34 =",
    completion="-22\x1b[31m[bold]\n",
)


def test_a_line_has_all_known_values() -> None:
    assert (
        line(TRAINING)
        == "4m01s | training | step 73/200 | reward 0.812 | accuracy 77.4% | staleness 1.42, max 2"
        " | tok/s generated 1,834 | trained 1,790 | left 3m10s"
    )
    assert line(Progress("starting", elapsed_s=3)) == "3s | starting"


def test_the_table_has_all_known_values_and_model_text_is_harmless() -> None:
    from rich.console import Console

    console = Console(width=104, file=io.StringIO(), record=True)
    console.print(table(TRAINING))
    text = console.export_text()
    for shown in (
        "training",
        "73 of 200",
        "73 (committed 72)",
        "0.812",
        "77.4%",
        "mean 1.42, max 2 of 2",
        "1,834 tok/s",
        "learner 12s, generators 40s",
        "3m10s",
    ):
        assert shown in text
    assert "[bold]" in text
    assert "\x1b" not in text


def test_model_text_is_one_printable_line() -> None:
    assert display_line("a\nb\x1b[2Jc\x07") == "a⏎b�[2Jc�"
    assert len(display_line("x" * 500)) == 80


def test_a_log_gets_one_line_per_phase_and_interval() -> None:
    stream = io.StringIO()
    with ProgressView(interval_s=3600, stream=stream) as view:
        for step in range(50):
            view.show(Progress("training", step=step, max_steps=50))
        view.show(Progress("evaluating", step=50, max_steps=50))
        view.show(Progress("evaluating", step=50, max_steps=50, held_out="90.0%"))
    lines = stream.getvalue().splitlines()
    assert lines == [
        "0s | training | step 0/50",
        "0s | evaluating | step 50/50",
        "0s | evaluating | step 50/50 | held-out 90.0%",
    ]


def test_a_line_with_everything_stays_short() -> None:
    """Names of rewards, of which there may be many, are in the table and the metrics."""
    full = replace(
        TRAINING,
        held_out="90.0%",
        reward_parts={f"reward_{number}": 0.5 for number in range(9)},
        alarms={"ess": Alarm("ess = 0.3", 3)},
    )
    assert len(line(full)) <= 170


def test_an_alarm_stays_red_with_a_count_while_other_notes_come(tmp_path: Path) -> None:
    """Notes used to push it away. A log gets it once."""
    from rich.console import Console

    stream = io.StringIO()
    with MetricsWriter(tmp_path) as writer, ProgressView(0.0, stream, live=False) as view:
        live = Live(observe_spec(small_config()), 0.0)
        recorder = RunRecorder(writer, OutcomesWriter(tmp_path / "outcomes", 0), live)
        check = {"check/logprob_max_diff": 2e-5, "check/tokens": 2048.0}
        for step in range(1, 6):
            values = {"kl_k3": 3.0} if step < 4 else {"kl_k3": 0.01}
            recorder.record("step", step, step, {"applied": 1.0, **values})
            recorder.record("logprob_check", step, step, check)
            live.note(f"note {step}")
            view.show(live.progress)
    console = Console(width=104, file=io.StringIO(), record=True)
    console.print(table(live.progress))
    shown = console.export_text(styles=True)
    assert "\x1b[31m3 steps, the last is 3: kl_k3 = 3 is outside 0 to 0.1: " in shown
    assert "2.0e-05 apart at most, 5 checks" in shown
    text = stream.getvalue()
    assert text.count("  alarm: step 1: kl_k3 = 3 is outside") == text.count("alarm:") == 1
    assert "alarms 1" in text and "differ" not in text


def test_more_alarms_than_fit_are_counted() -> None:
    from rich.console import Console

    alarms = {f"metric_{step}": Alarm(f"metric_{step} = 1", step) for step in range(7)}
    console = Console(width=104, file=io.StringIO(), record=True)
    console.print(table(replace(TRAINING, alarms=alarms)))
    text = console.export_text()
    assert "metric_6 = 1" in text and "metric_2 = 1" not in text and "7 alarms in all" in text


def test_a_note_that_comes_again_is_shown_once(tmp_path: Path) -> None:
    live = Live(observe_spec(small_config()), 0.0)
    for text in ("no room", "other", "no room"):
        live.note(text)
    assert live.progress.notes == ("other", "no room")


def test_the_values_of_a_line_are_of_one_step() -> None:
    """The coordinator is a step further than its last record."""
    live = Live(observe_spec(small_config(max_steps=9)), 0.0)
    progress = RunProgress(version=448, committed=447)
    live.follow(create_autospec(Coordinator, instance=True, progress=progress, first_version=440))
    metrics = {"reward/mean": 0.5, "reward/f": 0.25, "staleness/mean": 1.5, "staleness/max": 2}
    live.recorded("step", 447, metrics)
    live._update()
    shown = live.progress
    assert (shown.step, shown.reward, shown.reward_parts) == (447, 0.5, {"f": 0.25})
    assert (shown.staleness_mean, shown.staleness_max, shown.learner_version) == (1.5, 2, 448)


@pytest.mark.parametrize(
    ("settings", "value", "shown"),
    [
        ({"accuracy": "f"}, 0.25, "25.0%"),
        ({"accuracy": "f"}, 10.333, "10.33"),
        ({}, 10.333, "f 10.33"),
        ({}, 0.25, "f 0.25"),
    ],
)
def test_only_a_reward_that_the_user_calls_accuracy_is_a_percentage(
    settings: dict[str, str], value: float, shown: str
) -> None:
    spec = observe_spec(small_config(eval={"data": "d", **settings}))
    live = Live(spec, 0.0)
    live.recorded("evaluation", 1, {"eval/accuracy": value})
    live.recorded("step", 1, {"reward/f": value})
    assert live.progress.held_out == shown
    assert (live.progress.accuracy is None) == (not settings)
    (first, *_) = before_and_after(
        spec, [{"event": "evaluation", "eval/greedy_accuracy": value, "eval/greedy_f": value}]
    )
    name = "accuracy" if settings else "f"
    assert first.startswith(f"held-out greedy {name}  ") and shown.split()[-1].rstrip("%") in first


async def test_the_rate_counts_tokens_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that generates long completions has a rate before one of them ends. A replaced
    replica counts from 0 again, and one that does not answer changes nothing."""
    monkeypatch.setattr("asyncrl.observe.live.ASK_EVERY_S", 0.0)
    answers = iter([{"a": 100}, {"a": 200, "b": 50}, RuntimeError("gone"), {}, {"b": 250}])
    live, counts = Live(observe_spec(small_config()), 0.0), []

    async def statuses() -> list[Any]:
        counts.append([tokens for _, tokens in live._generated])
        if (found := next(answers, None)) is None:
            raise asyncio.CancelledError
        if isinstance(found, RuntimeError):
            raise found
        return [replace(fake_status(name), tokens_generated=count) for name, count in found.items()]

    with pytest.raises(asyncio.CancelledError):
        await live.count_tokens(statuses)
    assert counts == [[], [100], [100, 250], [100, 250], [100, 250], [100, 250, 450]]
    assert (live.progress.generated_tokens_per_s or 0) > 0
    assert _rate([(10.0, 100), (12.0, 400)]) == 150.0
    assert _rate([(10.0, 400), (12.0, 100)]) == 0.0 and _rate([(10.0, 400)]) is None


def test_rates_cover_the_last_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a large model takes minutes, and its tokens are counted when it ends."""
    clock, counters = (
        [100.0],
        SimpleNamespace(
            version=0, committed=0, examples=(), learner_waited_s=0.0, generators_waited_s=0.0
        ),
    )
    monkeypatch.setattr("asyncrl.observe.live.time.monotonic", lambda: clock[0])
    live = Live(observe_spec(small_config()), 100.0)
    live._coordinator = SimpleNamespace(progress=counters, first_version=0)
    rates = []
    for seconds, tokens in ((0, 0), (50, 0), (100, 1000), (120, 1000), (200, 4000), (300, 4500)):
        clock[0], counters.trained_tokens = 100.0 + seconds, tokens
        live._update()
        rates.append(live.progress.trained_tokens_per_s)
    assert rates == [None, None, 10.0, 10.0, 20.0, 17.5]
    # A fast run has the rate of the last RATE_WINDOW_S.
    for step in range(1, 101):
        clock[0], counters.trained_tokens = 400.0 + step, 4500 + 100 * step
        live._update()
    assert live.progress.trained_tokens_per_s == 100.0 and len(live._trained) == 16
    # Nothing is trained any more.
    clock[0] += 85
    live._update()
    assert live.progress.trained_tokens_per_s == 15.0


def test_a_terminal_gets_the_live_table() -> None:
    stream = io.StringIO()
    with ProgressView(stream=stream, live=True) as view:
        view.show(TRAINING)
    assert "73 of 200" in stream.getvalue()


def test_durations_and_time_left() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.4, 60, 307, 7500)] == [
        "0s",
        "59s",
        "1m00s",
        "5m07s",
        "2h05m",
    ]
    assert time_left(0, 100, 5.0) is None
    assert time_left(25, 100, 50.0) == 150.0
    assert time_left(101, 100, 50.0) == 0.0


def test_secrets_are_in_no_sample_and_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    monkeypatch.setenv("JUDGE_API_KEY", "correct-horse-battery")
    token = "hf_" + "a" * 30
    progress = Progress(
        "training",
        prompt="say correct-horse-battery",
        completion=f"{'x' * 300} correct-horse-battery {token}",
        sample_parts={"own": 1.0, token: 0.0},
        notes=(f"the judge refused {token}",),
    )
    plain = io.StringIO()
    with ProgressView(stream=plain, live=False) as view:
        view.show(progress)
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(table(progress))
    for text in (plain.getvalue(), console.export_text()):
        assert "[redacted" in text and "correct" not in text and "hf_" not in text


@pytest.mark.parametrize(
    ("error", "phase"),
    [
        (MemoryError("full"), "failed"),
        (asyncio.CancelledError(), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
@pytest.mark.parametrize("live", [False, True])
def test_the_last_update_of_a_run_that_ends_early_says_how_it_ended(
    error: BaseException, phase: str, live: bool
) -> None:
    stream = io.StringIO()
    with contextlib.suppress(type(error)), ProgressView(stream=stream, live=live) as view:
        view.show(replace(TRAINING, phase="stopping"))
        raise error
    assert phase in stream.getvalue().split("stopping")[-1]
    assert (" | step 73/200 | " if not live else "73 of 200") in stream.getvalue()


def test_a_last_update_that_cannot_be_written_does_not_hide_the_cause() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            if "failed" in text:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    with (
        pytest.raises(MemoryError, match="the cause"),
        ProgressView(stream=Full(), live=False) as view,
    ):
        view.show(TRAINING)
        raise MemoryError("the cause")
