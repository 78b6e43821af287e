"""The terminal, the log and the summary say why sessions fail, in one line without control
characters."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from small_config import small_config

from asyncrl.observe.failed_sessions import WHERE, failed_in_all
from asyncrl.observe.live import Live, RunRecorder
from asyncrl.observe.progress import ProgressView
from asyncrl.preflight.specs import observe_spec
from asyncrl.run.train import TrainingJob
from asyncrl.rundir.metrics import MetricsWriter, read_metrics
from asyncrl.rundir.outcomes import OutcomesWriter
from asyncrl.runtime.redact import RedactingFormatter

if TYPE_CHECKING:
    from asyncrl.preflight.plan.text import Plan

REASON = "env_error: RuntimeError: the \x1b[31mdatabase\x1b[0m is down"
SHOWN = "env_error: RuntimeError: the �[31mdatabase�[0m is down"


def failed(failed: int, reason: str = REASON, sessions: int = 16) -> dict[str, Any]:
    return {"sessions": sessions, "failed": failed, "reason": reason, "times": failed - 1}


def test_it_is_shown_while_it_happens_and_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    stream = io.StringIO()
    with MetricsWriter(tmp_path) as writer, ProgressView(stream=stream, live=False) as view:
        live = Live(observe_spec(small_config()), 0.0)
        recorder = RunRecorder(writer, OutcomesWriter(tmp_path / "outcomes", 0), live)
        for metrics in (failed(14), failed(15), failed(2, "agent_error: rare", 64)):
            recorder.record("failed_sessions", 0, 0, metrics)
        alarms = {"kl_k3": 3.0, "ess": 0.1, "clip_fraction": 0.9, "chi2": 7.0}
        recorder.record("step", 1, 1, {"applied": 1.0, **alarms})
        view.show(live.progress)
        assert len(live.progress.notes) == 1 and "sessions failed" in live.progress.notes[-1]
        assert live.progress.alarms.keys() == alarms.keys()
    line = f"14 of 16 sessions failed, most often (13 times) {SHOWN}; {WHERE}"
    assert [part for part in stream.getvalue().splitlines() if "sessions failed" in part] == [
        f"  note: step 0: {line}"
    ]
    assert "\x1b" not in stream.getvalue()
    logged = [RedactingFormatter("%(message)s").format(one) for one in caplog.records]
    assert logged[0] == f"step 0: {line}" and len(logged) == 5
    (whole,) = failed_in_all(list(read_metrics(tmp_path)))
    assert whole.startswith(
        f"31 sessions failed, most often (at least 27 times) {REASON.split()[0]}"
    )


def test_reasons_that_all_differ_do_not_fill_the_terminal(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        live = Live(observe_spec(small_config()), 0.0)
        recorder = RunRecorder(writer, OutcomesWriter(tmp_path / "outcomes", 0), live)
        for step in range(9):
            recorder.record("failed_sessions", step, step, failed(16, f"env_error: task {step}"))
        assert "step 4: 16 of 16 sessions failed" in live.progress.notes[-1]


def test_a_run_without_failures_says_nothing() -> None:
    assert failed_in_all([{"event": "step", "step": 1}]) == []


def test_reasons_that_differ_by_a_number_are_shown_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    reasons = [f"env_error: no server at port {port}" for port in (40001, 40002)]
    with MetricsWriter(tmp_path) as writer:
        live = Live(observe_spec(small_config()), 0.0)
        recorder = RunRecorder(writer, OutcomesWriter(tmp_path / "outcomes", 0), live)
        for step, reason in enumerate((*reasons, "env_error: other")):
            times = 10 if step < 2 else 15
            metrics = {"sessions": 16, "failed": 16, "reason": reason, "times": times}
            recorder.record("failed_sessions", step, step, metrics)
    shown = [one.message for one in caplog.records if "sessions failed" in one.message]
    assert len(shown) == 2 and reasons[0] in shown[0] and "env_error: other" in shown[1]
    (whole,) = failed_in_all(list(read_metrics(tmp_path)))
    assert f"most often (at least 20 times) {reasons[0]}; " in whole


def test_the_summary_of_a_run_says_why_sessions_failed() -> None:
    job = TrainingJob(small_config(), cast("Plan", None))  # only a description needs the plan
    record = {"event": "failed_sessions", "step": 1, **failed(14)}
    assert job.changes([record]) == failed_in_all([record]) != []
    assert job.changes([]) == []
