"""Alarms on single steps, and on recorded runs."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest
from small_config import small_config

from asyncrl.contracts.rows import FAILED_ENDS
from asyncrl.observe.alarms import FIRST_STEPS, RANGES, Alarms, Range, alarms
from asyncrl.preflight.specs import observe_spec
from asyncrl.rundir.metrics import MetricsWriter, first_entropies


def test_what_mask_leaves_out_has_alarms():
    assert alarms({"stale/masked_ratio": 0.3, "stale/empty_ratio": 0.1}) == []
    masked, empty = alarms({"stale/masked_ratio": 0.31, "stale/empty_ratio": 0.11})
    assert masked.startswith("stale/masked_ratio = 0.31") and "on_stale: mask" in masked
    assert empty.startswith("stale/empty_ratio = 0.11")


def test_a_line_for_each_metric_outside_its_range():
    assert (
        alarms(
            {
                "ess": 0.9,
                "kl_k3": 0.01,
                "loss": 1e9,
                "rollout/truncated_ratio": 0.3,
                "nonfinite_loss": None,
            }
        )
        == []
    )
    lines = alarms({"ess": 0.25, "rollout/truncated_ratio": 0.8})
    assert (
        lines[0].startswith("ess = 0.25 is outside 0.5 to 1: lower staleness.max_staleness")
        and "max_completion_length" in lines[1]
    )


def test_gibberish_raises_an_alarm():
    assert (
        alarms(
            {
                "rollout/logprob_mean": -0.7,
                "rollout/loop_ratio": 0.02,
                "rollout/unprintable_ratio": 0.0,
            }
        )
        == []
    )
    lines = alarms(
        {"rollout/logprob_mean": -11.9, "rollout/loop_ratio": 0.4, "rollout/unprintable_ratio": 0.2}
    )
    assert [line.split(" ")[0] for line in lines] == [
        "rollout/logprob_mean",
        "rollout/loop_ratio",
        "rollout/unprintable_ratio",
    ]
    assert all("garbled" in line for line in lines) and "rollout.repetition_stop" in lines[1]


def test_restricted_sampling_raises_no_alarm_of_the_ratio_metrics():
    metrics = {
        "ess": 0.25,
        "chi2": 1.5,
        "ratio_mean": 0.7,
        "kl_k3": 0.3,
        "rollout/truncated_ratio": 0.8,
    }
    assert len(alarms(metrics)) == 5 and len(alarms(metrics, restricted=True)) == 1


OFF_POLICY = ("ess", "chi2", "ratio_mean", "kl_k3", "clip_fraction")
RECORDED = {
    "healthy": (1, 1e-4, (0.9973, 0.002809, 0.9893, 0.001442, 0.0), ()),
    "healthy, later": (1, 1e-4, (1.0, 2.492e-05, 1.001, 1.245e-05, 0.0), ()),
    "stale": (8, 1e-3, (0.16, 18.18, 1.826, 1.089, 0.8008), OFF_POLICY),
    "stale, later": (8, 1e-3, (0.6081, 0.9446, 1.188, 0.2292, 0.6774), ("kl_k3", "clip_fraction")),
    "diverging": (1, 1e-2, (0.06411, 363.6, 4.886, 4.767, 0.8537), OFF_POLICY),
    "diverging faster": (
        1,
        3e-2,
        (0.2955, 0.7986, 0.4623, 1.209, 0.4323),
        ("ess", "ratio_mean", "kl_k3", "clip_fraction"),
    ),
}
"""Steps of the real learner on the tests' tiny Qwen3, with its own log-probs in place of the
generator's. Each has its staleness, its learning rate, the OFF_POLICY metrics, and the metrics that
raise an alarm."""


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_steps_raise_the_alarms_of_their_kind_with_advice_that_follows(name):
    staleness, _, values, expected = RECORDED[name]
    lines = alarms(dict(zip(OFF_POLICY, values, strict=True)) | {"staleness/max": staleness})
    assert tuple(line.split(" ")[0] for line in lines) == expected
    for line in lines:
        assert line.endswith(
            ": lower learner.learning_rate"
            if staleness == 1
            else ": lower staleness.max_staleness or learner.learning_rate"
        )


RUNS = Path(__file__).parent / "recorded"
"""The metrics with alarms of four whole runs of the main job (jobs/quickstart/quickstart.yaml), for
each step and evaluation. `healthy` has a learning rate of 8e-4, `diverging` 2e-2, and `stale`
a max_staleness of 16. `stale_and_fast` has that and a learning rate of 3e-3."""


def records(run):
    with (RUNS / f"{run}.csv").open() as file:
        for row in csv.DictReader(file):
            yield (
                row.pop("event"),
                int(row.pop("step")),
                {name: float(value) for name, value in row.items() if value},
            )


def replayed(run):
    """Metric → the step and the line of its first alarm; metric → number of new alarms."""
    watch, first, new_alarms = Alarms(), {}, Counter()
    for event, step, metrics in records(run):
        if event == "step":
            metrics |= watch.entropy_ratio(metrics.get("entropy"))
        for name, (line, begins) in watch.check(metrics).items():
            first.setdefault(name, (step, line))
            new_alarms[name] += begins
    return first, new_alarms


@pytest.mark.parametrize("run", ["healthy", "stale"])
def test_a_run_that_learns_raises_no_alarm(run):
    """Stale data alone raises no alarm if the policy moves slowly."""
    assert replayed(run) == ({}, Counter())
    oldest = max(metrics.get("staleness/max", 0) for _, _, metrics in records(run))
    assert oldest == 2 if run == "healthy" else oldest > 8


def test_a_diverging_run_raises_alarms_at_once_and_names_its_collapse():
    first, new_alarms = replayed("diverging")
    steps = {name: step for name, (step, _) in first.items()}
    assert steps == {
        "ess": 2,
        "chi2": 2,
        "ratio_mean": 2,
        "kl_k3": 2,
        "clip_fraction": 3,
        "reward/zero_variance_ratio": 6,
        "entropy_ratio": 7,
    }
    assert all(
        first[name][1].endswith(": lower learner.learning_rate")
        for name in ("ess", "chi2", "ratio_mean", "kl_k3")
    )
    for name in ("reward/zero_variance_ratio", "entropy_ratio"):
        assert (
            "the entropy has collapsed" in first[name][1]
            and "checkpoint.ckpt_step" in first[name][1]
        ), "other prompts would not help"
    assert new_alarms["entropy_ratio"] == new_alarms["reward/zero_variance_ratio"] == 1, (
        "a hundred steps outside raise one new alarm"
    )


def test_stale_data_with_large_steps_names_both_remedies():
    first, new_alarms = replayed("stale_and_fast")
    assert {name: step for name, (step, _) in first.items()} == {"kl_k3": 3, "ess": 9, "chi2": 9}
    assert all(
        line.endswith(": lower staleness.max_staleness or learner.learning_rate")
        for _, line in first.values()
    )
    assert new_alarms["kl_k3"] == 7


def test_a_limit_that_is_moved_is_noticed(monkeypatch):
    """The recorded runs test the limits, not only the names."""
    for name, low, high in (
        ("kl_k3", 0.0, 0.04),
        ("time/event_loop_lag_s", 0.0, 0.2),
        ("ess", 0.8, 1.0),
        ("grad_norm_ratio", 0.0, 1.5),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(RANGES, name, Range(low, high, "tighter"))
            assert name in replayed("healthy")[0]
    with monkeypatch.context() as patch:
        patch.setitem(RANGES, "reward/zero_variance_ratio", Range(0.0, 0.9, "one step is enough"))
        assert "reward/zero_variance_ratio" in replayed("healthy")[0]
    with monkeypatch.context() as patch:
        patch.setitem(RANGES, "entropy_ratio", Range(0.0, 1.0, "never"))
        assert "entropy_ratio" not in replayed("diverging")[0]


def test_the_entropy_is_compared_with_the_runs_beginning(tmp_path):
    fresh = Alarms()
    assert [fresh.entropy_ratio(value) for value in (0.5, 1.0, 0.25)] == [
        {"entropy_ratio": ratio} for ratio in (1.0, 1.0, 0.25)
    ]
    assert [fresh.entropy_ratio(value) for value in (None, float("nan"), "0.5")] == [{}, {}, {}]
    assert Alarms().entropy_ratio(0.0) == {}
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 20):
            writer.write("step", step, step, {"entropy": 1.0 / step if step != 2 else None})
    first = first_entropies(tmp_path, FIRST_STEPS)
    assert len(first) == FIRST_STEPS and first[:2] == [1.0, pytest.approx(1 / 3)]
    assert Alarms(entropies=first).entropy_ratio(0.1) == {"entropy_ratio": 0.1}, (
        "a resumed run compares with its first attempt"
    )
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"event": "step", "entropy": 0.5}) + "\nno record\n"
    )
    assert first_entropies(tmp_path, FIRST_STEPS) == [0.5]
    assert first_entropies(tmp_path / "none", FIRST_STEPS) == []


def test_a_metric_that_returns_to_its_range_can_raise_a_new_alarm():
    watch = Alarms()
    outside, inside = {"reward/zero_variance_ratio": 0.95}, {"reward/zero_variance_ratio": 0.5}
    seen = [
        [begins for _, begins in watch.check(metrics).values()]
        for metrics in (*[outside] * 4, {"ess": 1.0}, outside, inside, *[outside] * 3)
    ]
    assert seen == [[], [], [True], [False], [], [False], [], [], [], [True]]


def test_sessions_that_failed_are_no_fault_of_the_reward() -> None:
    """Their own alarm says why they have no reward."""
    failed = {"session/env_error_ratio": 0.5, "session/deadline_ratio": 0.25}
    names = [line.split(" ")[0] for line in alarms({**failed, "reward/unscored_ratio": 0.8})]
    assert names == list(failed)
    names = [line.split(" ")[0] for line in alarms({**failed, "reward/unscored_ratio": 0.9})]
    assert names == [*failed, "reward/unscored_ratio"]


def test_sessions_have_alarms_for_calls_that_stay_text_and_for_a_small_cache() -> None:
    """One step is noisy. The demo has hits of 0.94 and above, and at most 0.003 unparsed turns."""
    healthy = {"session/unparsed_ratio": 0.2, "session/prefix_hit_ratio": 0.9}
    for name, value in {"session/unparsed_ratio": 0.3, "session/prefix_hit_ratio": 0.8}.items():
        watch = Alarms()
        assert watch.check(healthy) == {}
        seen = [list(watch.check(healthy | {name: value})) for _ in range(3)]
        assert seen == [[], [], [name]]
    assert alarms({"session/prefix_hit_ratio": float("nan")}) == []


def test_sessions_that_ask_nothing_have_an_alarm() -> None:
    assert alarms({"session/unasked_ratio": 0.0}) == []
    (line,) = alarms({"session/unasked_ratio": 0.5})
    assert line.startswith("session/unasked_ratio = 0.5 is outside 0 to 0.05: the model takes no")


def test_sessions_that_failed_and_are_trained_need_a_reward() -> None:
    failed = {"session/agent_error_ratio": 0.5, "session/deadline_ratio": 0.25}
    unscored = {**failed, "reward/unscored_ratio": 0.8}
    for trained, reported in (((), False), (("done", "deadline"), True)):
        lines = alarms(unscored, trained_ends=trained)
        assert any(line.startswith("reward/unscored_ratio") for line in lines) == reported
        assert ("reward/unscored_ratio" in Alarms(trained_ends=trained).check(unscored)) == reported
    config = small_config(
        data={"train": "t", "max_length": 16},
        environment={"function": "m:f", "train_ends": ["done", "deadline"]},
    )
    assert observe_spec(config).train_ends == ["done", "deadline"]


def test_each_end_that_excuses_a_missing_reward_has_an_alarm() -> None:
    for end in FAILED_ENDS:
        metrics = {f"session/{end}_ratio": 0.5, "reward/unscored_ratio": 0.5}
        assert [line.split(" ")[0] for line in alarms(metrics)] == [f"session/{end}_ratio"]
