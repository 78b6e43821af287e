"""metrics.jsonl and TensorBoard's files: written without torch, and read back unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncrl.observe.sinks import TensorBoardSink, numbered
from asyncrl.rundir.metrics import METRICS_FILE, SCHEMA, MetricsWriter, read_metrics


def test_a_record_has_the_stable_fields_and_plain_numbers(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(
            "step",
            3,
            2,
            {
                "reward/mean": np.float32(0.5),
                "loss": float("nan"),
                "tokens": np.int64(7),
                "worst": float("inf"),
            },
        )
    (record,) = read_metrics(tmp_path)
    assert record.pop("time") > 0
    assert record == {
        "schema": SCHEMA,
        "event": "step",
        "attempt": 0,
        "step": 3,
        "version": 2,
        "reward/mean": 0.5,
        "loss": None,
        "tokens": 7,
        "worst": None,
    }


def test_a_metric_cannot_replace_a_reserved_field(tmp_path: Path) -> None:
    with (
        MetricsWriter(tmp_path) as writer,
        pytest.raises(ValueError, match=r"\['version'\].*rename"),
    ):
        writer.write("step", 1, 1, {"version": 3})


def test_a_reader_skips_an_unfinished_line_and_a_new_attempt_removes_it(
    tmp_path: Path,
) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write("step", 1, 1, {"loss": 1.0})
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"schema": 1, "ev')
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]
    with MetricsWriter(tmp_path) as writer:
        writer.write("step", 2, 2, {"loss": 0.5})
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"schema": 1, "event": "step"}\nnonsense\n')
    with pytest.raises(ValueError, match="line 2"):
        list(read_metrics(tmp_path))


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert list(read_metrics(tmp_path)) == []


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, sinks=[TensorBoardSink(tmp_path / "tensorboard")]) as writer:
        for step in range(1, 4):
            writer.write(
                "step",
                step,
                step,
                {
                    "reward/mean": step / 4,
                    "loss": step / 2,
                    "applied": 1,
                    "note": "text is left out",
                    "staleness/histogram": [1, step],
                },
            )
        writer.write("evaluation", 3, 0, {"eval/greedy_accuracy": 0.75})
        writer.write("startup", 0, 0, {"engine_s": 1.0})
        writer.write("memory", 3, 3, {"total_bytes": 1})
        for step in (1, 2):
            writer.write("checkpoint", step, step, {"checkpoint/save_s": step})
    registry = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert registry.Tags()["scalars"] == [
        "01 reward/mean",
        "03 train/loss",
        "07 staleness/histogram/1",
        "02 eval/greedy_accuracy",
        "16 checkpoint/save_s",
    ]
    assert [
        (event.step, event.value) for event in registry.Scalars(numbered("eval/greedy_accuracy"))
    ] == [(0, 0.75)], "at the step that made the version"
    assert [(event.step, event.value) for event in registry.Scalars(numbered("reward/mean"))] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]
    described = registry.SummaryMetadata("01 reward/mean").summary_description
    assert described.startswith("mean reward; mean of each reward function")
    assert [event.value for event in registry.Scalars(numbered("staleness/histogram/1"))] == [
        1,
        2,
        3,
    ]


def test_tensorboard_plots_a_constant_from_its_start_once_it_changes(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step, failed in enumerate([0.0, 0.0, 0.0, 2.0, 2.0], start=1):
        sink.add(
            step,
            float(step),
            {"control/failed_groups": failed, "reward/mean": 0.0, "train/applied": 1.0},
        )
    sink.close()
    registry = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(registry.Tags()["scalars"]) == ["01 reward/mean", "13 control/failed_groups"]
    assert [
        (event.step, event.value) for event in registry.Scalars(numbered("control/failed_groups"))
    ] == [
        (1, 0),
        (3, 0),
        (4, 2),
        (5, 2),
    ]
    assert len(registry.Scalars(numbered("reward/mean"))) == 5, (
        "constant rewards are always plotted"
    )


def test_neither_writer_nor_package_imports_torch_or_ray(tmp_path: Path) -> None:
    script = f"""
import sys, pathlib, asyncrl
from asyncrl.rundir.metrics import MetricsWriter
from asyncrl.observe.progress import ProgressView
from asyncrl.observe.sinks import TensorBoardSink
folder = pathlib.Path({str(tmp_path)!r})
with MetricsWriter(folder, sinks=[TensorBoardSink(folder / "tensorboard")]) as writer:
    writer.write("step", 1, 1, {{"loss": 1.0}})
asyncrl.open_run
print([name for name in ("torch", "ray", "vllm", "tensorflow", "pandas") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_pandas_reads_the_records_as_numbers(tmp_path: Path) -> None:
    import pandas as pd

    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 5):
            writer.write(
                "step",
                step,
                step,
                {
                    "reward/mean": step / 4,
                    "kl_k3": float("nan") if step == 2 else 0.01,
                    "staleness/max": 2,
                },
            )
        writer.write("push", 4, 4, {"replica": "one", "weights/pause_s": 0.1})
    records = pd.read_json(tmp_path / METRICS_FILE, lines=True)
    steps = records[records["event"] == "step"].set_index("step")
    assert steps["reward/mean"].tolist() == [0.25, 0.5, 0.75, 1.0] and steps[
        "kl_k3"
    ].isna().tolist() == [False, True, False, False]
    assert all(
        pd.api.types.is_numeric_dtype(steps[name])
        for name in ("version", "reward/mean", "kl_k3", "staleness/max")
    )
    assert records.loc[records["event"] == "push", "weights/pause_s"].item() == 0.1


def test_an_evaluation_is_plotted_at_the_step_that_made_its_version(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, sinks=[TensorBoardSink(tmp_path / "tensorboard")]) as writer:
        for step, version in ((1, 1), (2, 1), (3, 2)):
            writer.write("step", step, version, {"applied": float(step != 2)})
        for version in (0, 1, 2):
            writer.write("evaluation", 3, version, {"eval/accuracy": version})
    registry = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in registry.Scalars(numbered("eval/accuracy"))] == [
        (0, 0),
        (1, 1),
        (3, 2),
    ]


def test_after_a_resume_an_evaluation_of_the_initial_version_is_plotted_at_its_step(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(
        tmp_path, 1, [TensorBoardSink(tmp_path / "tensorboard")], {40: 44}
    ) as writer:
        writer.write("step", 45, 41, {"applied": 1.0})
        for version in (40, 41):
            writer.write("evaluation", 45, version, {"eval/greedy_accuracy": version})
    registry = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [
        (event.step, event.value) for event in registry.Scalars(numbered("eval/greedy_accuracy"))
    ] == [
        (44, 40),
        (45, 41),
    ]


def test_sinks_get_each_metric_once_and_in_one_group(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, sinks=[TensorBoardSink(tmp_path / "tensorboard")]) as writer:
        for step in (1, 2):
            writer.write(
                "step", step, step, {"loss": step, "reward/mean": 0.5, "reward/unscored_ratio": 0.0}
            )
            writer.write("push", step, step, {"weights/pause_s": step, "replica": "a"})
            writer.write("gather", step, step, {"weights/gather_s": step, "gather_s": step})
            writer.write("logprob_check", step, step, {"check/logprob_max_diff": step})
            writer.write("checkpoint", step, step, {"checkpoint/save_s": step})
            writer.write(
                "evaluation",
                step,
                step,
                {
                    "eval/accuracy": 0.5,
                    "eval/prompts": 9,
                    "eval/greedy_accuracy": 0.5,
                    "eval/greedy_prompts": 9,
                    "seconds": step,
                },
            )
            writer.write("startup", step, step, {"startup/generators_s": step})
    tags = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]
    expected = [
        "train/loss",
        "reward/mean",
        "weights/pause_s",
        "weights/gather_s",
        "gather/gather_s",
        "check/logprob_max_diff",
        "checkpoint/save_s",
    ]
    assert sorted(tags) == sorted(
        map(numbered, [*expected, "eval/greedy_accuracy", "eval/seconds"])
    )


def test_tensorboard_escapes_completions(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html
    from tensorboard.util.tensor_util import make_ndarray

    hostile = (
        "<img src=http://x>\n\n[a](http://x) ![b](http://x)\n# head\n</code></pre><a"
        " href='http://x'>\nreward: 1"
    )
    with MetricsWriter(tmp_path, sinks=[TensorBoardSink(tmp_path / "tensorboard")]) as writer:
        writer.show_batch(
            4,
            {"rewards": [0.0, 0.5, 1.0], "staleness": [1]},
            [{"prompt": hostile, "completion": hostile, "reward": 0.25, "reward/f": None}] * 2,
        )
        writer.show_batch(5, {"rewards": []}, [])
    registry = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (text,) = registry.Tensors("completions")
    (rewards,) = registry.Tensors("rewards")
    page = markdown_to_safe_html(make_ndarray(text.tensor_proto).item())
    assert (
        text.step == 4
        and page.count("<") == 4
        and page.startswith("<pre><code>step: 4\nprompt: &lt;img")
    ), page
    assert "\n  | reward: 1" in page and "\nreward: 0.25\nreward/f: none\n" in page
    assert make_ndarray(rewards.tensor_proto)[:, 2].sum() == 3
    assert [one.step for one in registry.Tensors("staleness")] == [4]
