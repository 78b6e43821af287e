"""Runs on a dataset with a real learner: SFT, DPO and reward models, resumed and audited.

The learner of SFT and of reward models is the process of the run, so an attempt needs no start of
Ray's processes. That of DPO, and its reference policy, are actors.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from plain_ranks import on_ranks
from safetensors.numpy import load_file

from asyncrl.config import ConfigError, OfflineConfig
from asyncrl.contracts.errors import RunStoppedError
from asyncrl.contracts.messages import HeldOutLoss
from asyncrl.contracts.offline_rows import PREFERENCE_SCHEMA, UNPAIRED_SCHEMA
from asyncrl.data.token_file import open_token_file
from asyncrl.learning.driver import RayLearner
from asyncrl.learning.spec import LearnerSpec
from asyncrl.observe.metric_catalog import known_names
from asyncrl.observe.progress import ProgressView
from asyncrl.preflight.plan.offline import make_offline_plan
from asyncrl.run.across_attempts import AcrossAttempts
from asyncrl.run.audit import audit, audit_text
from asyncrl.run.export import export_checkpoint, find_checkpoint
from asyncrl.run.offline.reference_pass import reference_key, scored_before
from asyncrl.run.offline.run import OfflineJob, TooManySkippedStepsError
from asyncrl.run.supervise import open_writer
from asyncrl.rundir.directory import RunDirectory
from asyncrl.rundir.metrics import RESERVED
from asyncrl.rundir.reader import Run, open_run
from asyncrl.runtime.files.arrow_files import write_batches

SUMS = [(f"{a}+{b}=", str(a + b)) for a in range(6) for b in range(6)]


def tree(folder: Path, model: Path, objective: str, **changes: Any) -> dict[str, Any]:
    """Settings of a small run on the sums, as pairs for DPO."""
    path = folder / f"{objective}.parquet"
    if not path.exists():
        columns = {"prompt": [prompt for prompt, _ in SUMS]}
        answers = [answer for _, answer in SUMS]
        wrong = [str(int(answer) + 1) for answer in answers]
        columns |= (
            {"completion": answers}
            if objective == "sft"
            else {"chosen": answers, "rejected": wrong}
        )
        pq.write_table(pa.table(columns), path)
    return {
        "name": objective,
        "runs_root": str(folder / "runs"),
        "objective": objective,
        "max_steps": 6,
        "batch_size": 10,
        "model": {"path": str(model)},
        "data": {"train": str(path), "max_length": 12},
        "eval": {"data": str(path), "max_rows": 20, "every_steps": 3},
        "learner": {"learning_rate": 1e-3},
        "checkpoint": {"every_steps": 3},
        **changes,
    }


def run(settings: dict[str, Any]) -> Run:
    """One attempt on the session's cluster."""
    plan = make_offline_plan(OfflineConfig.model_validate(settings))
    with RunDirectory(plan.config) as directory, open_writer(plan.config, directory) as writer:
        attempt = OfflineJob(plan.config, plan).attempt(directory, AcrossAttempts(), writer)
        asyncio.run(attempt.run(ProgressView(stream=io.StringIO(), live=False)))
    return open_run(plan.config.run_directory)


class InProcess(RayLearner):
    """A learner whose only rank is this process, which has joined a process group."""

    rank: Any

    @classmethod
    async def create(cls, spec: LearnerSpec, run_id: str, attempt: int) -> InProcess:
        from asyncrl.learning.engine.state import load_state
        from asyncrl.learning.rank import LearnerRank

        nowhere: Any = None
        group = cls(spec, nowhere, [], attempt)
        group.rank = LearnerRank(load_state(0, spec), run_id, attempt)
        return group

    async def _all(self, method: Any, *arguments: Any, **named: Any) -> list[Any]:
        self.answered += 1
        return [getattr(self.rank, method)(*arguments, **named)]

    async def close(self) -> None:
        self.rank.state.engine.destroy()


def take_attempts(rank: int, world_size: int, settings: Sequence[dict[str, Any]]) -> None:
    """One attempt after the other in this process."""

    async def one_node(config: OfflineConfig) -> None:
        """There is no other node whose models could differ."""

    with (
        patch("asyncrl.run.offline.run.RayLearner", InProcess),
        patch("asyncrl.run.offline.run.check_models", one_node),
    ):
        for one in settings:
            run(one)


def whole_and_parts(folder: Path, model: Path, objective: str) -> tuple[Run, Run]:
    """A run without a stop, and one that is resumed after half of its steps."""
    halves: tuple[dict[str, Any], ...] = ({"max_steps": 3}, {"resume": "must"})
    whole = tree(folder, model, objective, name="whole")
    parts = [tree(folder, model, objective, name="parts", **changes) for changes in halves]
    on_ranks(1, take_attempts, [whole, *parts])
    runs = folder / "runs"
    return open_run(runs / "whole"), open_run(runs / "parts")


@pytest.fixture(scope="module")
def sft_runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """SFT without a stop, and resumed."""
    return whole_and_parts(tmp_path_factory.mktemp("sft"), tiny_model, "sft")


def weights(found: Run) -> dict[str, np.ndarray]:
    return load_all(found.directory / "hf")


def load_all(directory: Path) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def check_audit(found: Run) -> None:
    """The audit passes, and the catalog explains every metric of the run."""
    checks = audit(found)
    assert all(check.passed for check in checks), audit_text(checks)
    written = {name for record in found.records() for name in record} - set(RESERVED)
    plain = {re.sub(r"truncation/[\w.]+/", "truncation/<file>/", name) for name in written}
    assert plain <= known_names()


def test_a_resumed_sft_run_equals_one_without_a_stop(sft_runs: tuple[Run, Run]) -> None:
    """36 rows in batches of 10: the fourth step continues into the second epoch, after the
    resume."""
    whole, parts = sft_runs
    losses = [[step["loss"] for step in found.records("step")] for found in (whole, parts)]
    assert len(losses[0]) == 6 and losses[0] == losses[1]
    first, second = weights(whole), weights(parts)
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)
    evaluations = [record["eval/loss"] for record in whole.records("evaluation")]
    assert len(evaluations) == 3 and evaluations[-1] < evaluations[0]
    assert [record["version"] for record in parts.records("evaluation")] == [0, 3, 6]
    assert whole.status().max_steps == 6
    for found in (whole, parts):
        check_audit(found)


@pytest.mark.slow
def test_kto_scores_labels_once_and_learns_them(
    ray_cluster: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """From pairs, each of which gives a completion of both labels. 72 rows are scored 10 at a
    time, so the last call has two."""
    settings = tree(tmp_path, tiny_model, "dpo", name="kto", batch_size=12)
    settings["objective"] = {
        "name": "dpo",
        "loss": {"name": "kto", "beta": 0.5, "desirable_weight": 1.2},
        "reference_batch": 10,
    }
    found = run(settings)
    steps, evaluations = found.records("step"), found.records("evaluation")
    assert [step["completions"] for step in steps] == [12.0] * 6
    assert steps[0]["pref/loss"] == pytest.approx(0.5 * 1.1, abs=0.05), "rewards begin at 0"
    assert evaluations[-1]["eval/margin"] > evaluations[0]["eval/margin"]
    assert [one["eval/completions"] for one in evaluations] == [20.0] * 3
    scored = open_token_file(found.directory / "rows" / "train_reference.arrow")
    assert scored is not None and scored.rows == 72
    rows = scored.take(range(72)).to_pylist()
    # Each pair gives two rows. Their prompt gets the second completion of the pair before.
    others = [rows[(place - place % 2 - 1) % 72] for place in range(72)]
    for row, before in zip(rows, others, strict=True):
        prompt = row["loss_mask"].index(True)
        following = before["input_ids"][before["loss_mask"].index(True) :]
        assert row["mismatched_ids"] == [*row["input_ids"][:prompt], *following][:12]
        assert len(row["mismatched_reference"]) == sum(row["mismatched_mask"]) > 0
    check_audit(found)


@pytest.mark.slow
def test_a_resumed_reward_model_equals_one_without_a_stop(tiny_model: Path, tmp_path: Path) -> None:
    """Its checkpoint exports the same sequence classifier as the run."""
    whole, parts = whole_and_parts(tmp_path, tiny_model, "reward_model")
    losses = [[step["loss"] for step in found.records("step")] for found in (whole, parts)]
    assert len(losses[0]) == 6 and losses[0] == losses[1]
    evaluations = [record["eval/pair_accuracy"] for record in whole.records("evaluation")]
    assert evaluations[0] == 0.0 and evaluations[-1] > 0.5
    for found in (whole, parts):
        check_audit(found)
    checkpoint = find_checkpoint(parts.checkpoints_directory, None)
    export_checkpoint(checkpoint, parts.directory / "exported")
    first, second = weights(whole), weights(parts)
    third = load_all(parts.directory / "exported")
    assert "score.weight" in first and not any("lm_head" in name for name in first)
    assert first.keys() == second.keys() == third.keys()
    for name, values in first.items():
        assert np.array_equal(values, second[name]) and np.array_equal(values, third[name])
    for name in ("config.json", "tokenizer_config.json"):
        texts = [path / name for path in (whole.directory / "hf", parts.directory / "exported")]
        assert texts[0].read_text() == texts[1].read_text()


def test_a_changed_metric_or_missing_rows_fail_the_audit(
    sft_runs: tuple[Run, Run], tmp_path: Path
) -> None:
    found = open_run(shutil.copytree(sft_runs[0].directory, tmp_path / "whole"))
    metrics = found.directory / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    place = next(at for at, line in enumerate(lines) if '"event": "step"' in line)
    record = json.loads(lines[place])
    lines[place] = json.dumps({**record, "tokens": record["tokens"] + 1})
    metrics.write_text("\n".join(lines) + "\n")
    failed = {check.name for check in audit(open_run(found.directory)) if not check.passed}
    assert failed == {
        "tokens match the rows of each step",
        "the learner's counters match the steps",
    }
    del record["tokens"], record["rows_taken"]
    lines[place] = json.dumps({**record, "loss": "NaN"})
    metrics.write_text("\n".join(lines) + "\n")
    failed = {check.name for check in audit(open_run(found.directory)) if not check.passed}
    assert {"every step took its rows", "metrics are finite"} < failed
    rows, order = (found.directory / "rows" / name for name in ("train.arrow", "order.json"))
    whole, fields = rows.read_bytes(), json.loads(order.read_text())

    def check_rows_fail() -> None:
        failed = {check.name for check in audit(open_run(found.directory)) if not check.passed}
        assert "tokens match the rows of each step" in failed

    for place in (0, 9, len(whole) // 3, len(whole) // 2, len(whole) - 9):
        rows.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        check_rows_fail()
    rows.write_bytes(whole)
    for damage in ({"rows": [0]}, {"rows": 3}, {"weights": ["x"]}, {"seed": None}, {"rows": [7]}):
        order.write_text(json.dumps(fields | damage))
        check_rows_fail()
    rows.unlink()
    check_rows_fail()


def test_dpo_scores_the_pairs_once_and_learns_them(
    ray_cluster: Any, tiny_model: Path, tmp_path: Path
) -> None:
    settings = tree(tmp_path, tiny_model, "dpo", learner={"learning_rate": 1e-3})
    found = run(settings)
    steps = found.records("step")
    assert steps[0]["pref/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert steps[0]["pref/margin"] == pytest.approx(0.0, abs=1e-5)
    before, *_, after = found.records("evaluation")
    assert before["eval/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert after["eval/margin"] > 0.01 and after["eval/pair_accuracy"] > 0.6
    check_audit(found)
    path = found.directory / "rows" / "train_reference.arrow"
    scored = open_token_file(path)
    assert scored is not None and scored.rows == len(SUMS)
    made = path.stat().st_mtime_ns
    # Without Ray, no reference policy can start.
    on_ranks(1, take_attempts, [{**settings, "max_steps": 7, "batch_size": 12, "resume": "must"}])
    again = open_run(found.directory)
    assert path.stat().st_mtime_ns == made and len(again.records("step")) == 7
    check_audit(again)
    trained = found.directory / "hf"  # the same config and tokenizer with other weights
    with pytest.raises(ConfigError, match=r"^objective\.ref_load .* has other weights than when"):
        run({**settings, "model": {"path": str(trained)}, "max_steps": 8, "resume": "must"})


async def test_a_stop_finishes_the_step_and_writes_a_checkpoint(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The stop comes in the second step, and later in the evaluation after the third one."""
    settings = tree(tmp_path, tiny_model, "sft", checkpoint={"every_steps": 0})
    stops_in = {"supervised_step": 2, "held_out_loss": 1}

    class Stopping:
        async def supervised_step(self, table: pa.Table, scheduled: bool) -> dict[str, float]:
            self.stop_in("supervised_step")
            return {"applied": 1.0, "loss": 1.0, "grad_norm": 1.0}

        async def held_out_loss(self, table: pa.Table) -> HeldOutLoss:
            if attempt.state.version:
                self.stop_in("held_out_loss")
            return HeldOutLoss(1.0, 4, 0.0)

        def stop_in(self, method: str) -> None:
            stops_in[method] -= 1
            if not stops_in[method]:
                assert attempt.stop()

        async def save(self, directory: Path) -> dict[str, Any]:
            return {}

    fake: Any = Stopping()
    for version in (2, 3):
        plan = make_offline_plan(OfflineConfig.model_validate(settings))
        with RunDirectory(plan.config) as directory, open_writer(plan.config, directory) as writer:
            attempt = OfflineJob(plan.config, plan).attempt(directory, AcrossAttempts(), writer)
            assert not attempt.stop(), "there is nothing to save yet"
            train, held_out = plan.write_rows(directory.path / "rows")
            with pytest.raises(RunStoppedError):
                await attempt._train(fake, train, held_out)
            path, state, _ = directory.checkpoints.find()
        assert (path.name, state.version, state.frontier) == (
            f"step_00000{version}",
            version,
            10 * version,
        )
        settings = {**settings, "resume": "must"}


def test_scored_pairs_are_used_again_only_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "train_reference.arrow"
    assert scored_before(path, "key") is None
    write_batches(path, pa.schema([("x", pa.int64())]), [pa.record_batch({"x": [1, 2]})])
    file = open_token_file(path)
    assert file is not None and scored_before(path, "key") is None, "without its seal"
    seal = path.with_suffix(".json")
    seal.write_text(json.dumps({"key": "key", "sha256": file.content_hash}))
    assert scored_before(path, "key") is not None and scored_before(path, "other") is None
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert scored_before(path, "key") is None


def test_scored_completions_depend_on_the_length_of_mismatched_rows(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A longer max_length may leave the rows as they are, and cut fewer mismatched ones."""

    def keys(schema: pa.Schema) -> list[str]:
        path = tmp_path / "rows.arrow"
        write_batches(path, schema, [pa.RecordBatch.from_pylist([], schema)])
        file = open_token_file(path)
        assert file is not None
        settings = tree(tmp_path, tiny_model, "dpo")
        made = [
            OfflineConfig.model_validate({**settings, "data": {**settings["data"], **changes}})
            for changes in ({}, {"max_length": 13}, {"max_length": 12})
        ]
        return [reference_key(config, file) for config in made]

    first, longer, again = keys(UNPAIRED_SCHEMA)
    assert first == again != longer
    assert len(set(keys(PREFERENCE_SCHEMA))) == 1, "pairs have no mismatched rows"


async def test_a_run_whose_steps_are_skipped_again_and_again_ends(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A learner that skips every step: two are allowed, and each takes the next rows."""
    learner = {"learning_rate": 1e-3, "max_skipped_steps": 2}
    settings = tree(tmp_path, tiny_model, "sft", eval={}, learner=learner)
    plan = make_offline_plan(OfflineConfig.model_validate(settings))
    taken: list[pa.Table] = []

    class Skipping:
        async def supervised_step(self, table: pa.Table, scheduled: bool) -> dict[str, float]:
            taken.append(table)
            return {"applied": 0.0, "loss": float("nan")}

    fake: Any = Skipping()
    with RunDirectory(plan.config) as directory, open_writer(plan.config, directory) as writer:
        attempt = OfflineJob(plan.config, plan).attempt(directory, AcrossAttempts(), writer)
        train, _ = plan.write_rows(directory.path / "rows")
        with pytest.raises(TooManySkippedStepsError, match="2 steps in a row were skipped"):
            await attempt._train(fake, train, None)
    assert len(taken) == 2 and not taken[0].equals(taken[1])
    assert (attempt.state.version, attempt.state.frontier) == (0, 20)


def test_a_plan_refuses_what_cannot_run(tiny_model: Path, tmp_path: Path) -> None:
    settings = tree(tmp_path, tiny_model, "sft")
    for changes, message in (
        ({"model": {"path": "nowhere"}}, "No such file or directory"),
        ({"data": {**settings["data"], "train": "nowhere.parquet"}}, "nowhere.parquet"),
        ({"data": {**settings["data"], "max_length": 4000}}, "above the model's context"),
        ({"data": {**settings["data"], "max_length": 4}}, "max_length"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            make_offline_plan(OfflineConfig.model_validate({**settings, **changes}))
        assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()
