"""driver.log has the course of the training. The end of a run names every reward and evaluation
set."""

import logging
import math
from unittest.mock import create_autospec

from small_config import small_config

from asyncrl.contracts.messages import TrajectoryText
from asyncrl.control.bookkeeping import BatchExample, RunProgress
from asyncrl.control.coordinator import Coordinator
from asyncrl.observe.live import Live, RunRecorder
from asyncrl.observe.log_lines import record_line
from asyncrl.observe.summary import before_and_after
from asyncrl.preflight.specs import observe_spec
from asyncrl.run.supervise import startup_parts, timeline
from asyncrl.rundir.metrics import MetricsWriter, read_metrics
from asyncrl.rundir.outcomes import OutcomesWriter
from asyncrl.testing import FakeSink


def test_the_log_has_phases_steps_alarms_evaluations_and_checkpoints(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with MetricsWriter(tmp_path) as writer:
        live = Live(observe_spec(small_config(max_steps=20)), 0.0)
        recorder = RunRecorder(writer, OutcomesWriter(tmp_path / "outcomes", 0), live)
        live.phase("training")
        step = {
            "applied": 1.0,
            "loss": -0.25,
            "reward/mean": 0.5,
            "reward/f": 0.75,
            "staleness/mean": 1.5,
            "staleness/max": 2,
            "kl_k3": 3.0,
        }
        recorder.record("step", 7, 6, step)
        recorder.record("push", 7, 6, {"replica": "a"})
        recorder.record("commit", 7, 6, {})
        recorder.record("evaluation", 7, 6, {"eval/math_accuracy": 0.625, "eval/math_f": math.nan})
        recorder.record("checkpoint", 7, 6, {"checkpoint/save_s": 1.25})
    lines = [record.message for record in caplog.records]
    assert lines[0].startswith("training (connecting to Ray took ")
    assert (
        lines[1]
        == "step 7/20: version 6, reward 0.5, loss -0.25, mean staleness 1.5, max staleness 2,"
        " reward f 0.75"
    )
    assert lines[2].startswith("first_step at step 7, version 6: startup/first_step_s ")
    assert (
        lines[3].startswith("step 7: kl_k3 = 3 is outside")
        and caplog.records[3].levelno == logging.WARNING
    )
    assert lines[4:] == [
        "evaluation of version 6: math_accuracy 0.625",
        "checkpoint at step 7, version 6: checkpoint/save_s 1.25",
    ]


def test_the_parts_of_a_start_are_one_line():
    record = {
        "event": "startup",
        "startup/generators_s": 21.3,
        "startup/learner_s": 18.52,
        "startup/learner_engine_s": 1.7,
        "startup/learner_meet_s": 0.01,
        "startup/learner_caches_removed": 0.0,
        "startup/generator_import_s": 8.34,
        "startup/generator_config_s": 0.06,
    }
    assert startup_parts(record) == (
        "generators 21.3s (import 8.3s, config 0.1s); learner 18.5s (engine 1.7s)"
    )
    assert startup_parts({"startup/learner_s": 2.0}) == "learner 2.0s"


def test_the_first_step_has_the_time_since_the_command_once(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("asyncrl.observe.live.time.monotonic", lambda: now[0])
    with MetricsWriter(tmp_path) as writer:
        live = Live(observe_spec(small_config()), 100.0, 95.0)  # the command began 5 s earlier
        recorder = RunRecorder(writer, OutcomesWriter(tmp_path / "outcomes", 0), live)
        for seconds, phase in ((6.0, "starting generators and learner"), (20.0, "training")):
            now[0] += seconds
            live.phase(phase)
        recorder.record("evaluation", 0, 0, {})
        now[0] += 3.0
        for step in (1, 2):
            recorder.record("step", step, step, {"applied": 1.0})
    (record,) = [one for one in read_metrics(tmp_path) if one["event"] == "first_step"]
    assert {name: value for name, value in record.items() if name.startswith("startup/")} == {
        "startup/first_step_s": 34.0,
        "startup/phase/preparation_s": 5.0,
        "startup/phase/connecting_to_Ray_s": 6.0,
        "startup/phase/starting_generators_and_learner_s": 20.0,
        "startup/phase/training_s": 3.0,
    }
    assert timeline(record) == (
        "34s from the start: preparation 5s, connecting to Ray 6s, starting generators and learner"
        " 20s, training 3s"
    )


def test_a_record_is_one_line_of_the_log():
    assert (
        record_line("evaluation_lost", 3, 2, {"reason": "gone:\n  why\x1b[2J"})
        == "evaluation_lost at step 3, version 2: reason gone: why\x1b[2J"
    )
    assert record_line("step", 3, 2, {"applied": 0.0}, 9) == "step 3/9 skipped: version 2"


def test_the_end_names_every_set_and_every_reward():
    config = small_config(
        reward={"functions": {"f": {"function": "m:f"}, "style": {"function": "m:g"}}},
        eval={"data": "d", "accuracy": "f", "sets": {"hard": {"data": "h"}}},
    )
    first, hard = next(iter(config.evaluation_sets)), "hard"
    evaluation = {
        f"eval/{first}_accuracy": 0.25,
        f"eval/{first}_prompts": 8.0,
        f"eval/{first}_style": 0.5,
        f"eval/{first}_style/spaces": 0.125,
    }
    evaluation |= {
        f"eval/{hard}_accuracy": None,
        f"eval/{hard}_prompts": 2000.0,
        f"eval/{hard}_late_ratio": 0.0,
        f"eval/{hard}_pass_at_4": 0.5,
    }
    later = evaluation | {f"eval/{first}_accuracy": 0.5, f"eval/{hard}_accuracy": 1.0}
    steps = [
        {
            "event": "step",
            "step": n,
            "reward/mean": n / 8,
            "reward/f": None,
            "reward/style": 1.0,
            "reward/zero_variance_ratio": 0.0,
        }
        for n in range(1, 9)
    ]
    lines = before_and_after(
        observe_spec(config),
        [{"event": "evaluation", **evaluation}, *steps, {"event": "evaluation", **later}],
    )
    assert [" ".join(line.split()) for line in lines] == [
        f"held-out {first} accuracy 25.0% → 50.0% (+25.0% on 8 prompts)",
        f"held-out {first} style 0.500 → 0.500",
        f"held-out {first} style/spaces 0.125 → 0.125",
        "held-out hard accuracy none → 100.0% (on 2,000 prompts)",
        "held-out hard pass_at_4 0.500 → 0.500",
        "reward mean 0.188 → 0.938 (mean of steps 1-2 and 7-8)",
        "reward f none → none",
        "reward style 1.000 → 1.000",
    ]
    assert len({line.index("→") for line in lines}) == 1
    assert before_and_after(observe_spec(config), []) == []


def test_the_sinks_get_completions_and_rewards_every_few_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "correct-horse-battery")
    config = small_config(max_steps=20, observe={"completions_every": 3})
    name = next(iter(config.reward.functions))
    example = TrajectoryText("say correct-horse-battery", "x\x1b" * 10_000, 0.5, {name: 0.25}, 2)
    shown = {"rewards": (0.5, 1.0), "completion_tokens": (3, 4), "staleness": (1,)}
    seen = RunProgress(examples=(BatchExample(example, 1, 17),) * 40, distributions=shown)
    coordinator = create_autospec(Coordinator, instance=True, progress=seen, first_version=3)
    sink = FakeSink()
    with MetricsWriter(tmp_path, sinks=[sink]) as writer:
        live = Live(observe_spec(config), 0.0)
        recorder = RunRecorder(writer, OutcomesWriter(tmp_path / "outcomes", 0), live)
        recorder.record("step", 3, 3, {"applied": 1.0})
        assert not sink.tables and not sink.histograms, "there is no batch yet"
        live.follow(coordinator)
        for step in (4, 5, 6, 7):
            recorder.record("step", step, step, {"applied": 1.0})
        recorder.record("commit", 6, 6, {})
    assert sink.histograms == [(6, name_, values) for name_, values in shown.items()]
    assert sink.closed is False
    ((step, table, rows),) = sink.tables
    assert (step, table) == (6, "completions")
    assert (
        len(rows) == 16
        and len(rows[0]["completion"]) == 4096
        and "\x1b" not in rows[0]["completion"]
    )
    assert rows[0]["prompt"] == "say [redacted JUDGE_API_KEY]"
    assert (
        rows[0]["reward"],
        rows[0][f"reward/{name}"],
        rows[0]["version"],
        rows[0]["staleness"],
        rows[0]["group"],
        rows[0]["step"],
    ) == (0.5, 0.25, 2, 1, 17, 6)
