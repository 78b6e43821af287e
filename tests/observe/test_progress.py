"""The live table and the log lines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
from dataclasses import replace

import pytest

from asyncrl.observe.progress import (
    Progress,
    ProgressView,
    display_line,
    duration,
    line,
    table,
    time_left,
)

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
        == "4m01s | training | step 73/200 | version 73 (committed 72) | reward 0.812 | accuracy"
        " 77.4% of the last batch | staleness mean 1.42, max 2 of 2 | generated 1,834 tok/s |"
        " trained 1,790 tok/s | waited learner 12s, generators 40s | left 3m10s"
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
        view.show(Progress("evaluating", step=50, max_steps=50, held_out_accuracy=0.9))
    lines = stream.getvalue().splitlines()
    assert lines == [
        "0s | training | step 0/50",
        "0s | evaluating | step 50/50",
        "0s | evaluating | step 50/50 | held-out 90.0% at the last evaluation",
    ]


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
