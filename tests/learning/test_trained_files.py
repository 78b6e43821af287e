"""What a policy step computed at each token is in `trained/*.parquet`: on two ranks, for
completions with masks and for sessions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from plain_ranks import on_ranks
from recorded import learner_config, recorded_group
from test_session_examples import CHAIN, TREE, table
from test_session_reference import ORPHANED, wanted
from transformers import AutoModelForCausalLM

from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.outcomes import Outcome
from asyncrl.learning.engine.state import load_state
from asyncrl.learning.rank import LearnerRank
from asyncrl.learning.trained_files import TrainedFiles
from asyncrl.preflight.specs import learner_spec
from asyncrl.rundir.outcomes import OutcomesWriter
from asyncrl.rundir.reader import Run
from asyncrl.rundir.tokens import at_tokens, of_trajectories, token_table
from asyncrl.runtime.files import parquet

RANKS = 2
GROUPS = [recorded_group(ordinal) for ordinal in range(6)]
SESSIONS = [CHAIN, TREE, ORPHANED]
ALGORITHM = {
    "loss": {"name": "ppo", "eps_clip": 0.05, "eps_clip_high": 0.05},
    "correction": {"band": {"below": 0.7, "above": 1.3}},
}


def spec_of(model: Path, run: Path) -> Any:
    config = learner_config(model, RANKS, max_tokens=64, algorithm=ALGORITHM)
    return replace(learner_spec(config), run_directory=run)


def steps(rank: int, world_size: int, model: Path, run: Path) -> list[dict[str, float]]:
    """A step on completions, one on sessions, and a third one; then a checkpoint."""
    learner = LearnerRank(load_state(rank, spec_of(model, run)), "run", 2)
    learner.set_learning_rate(0.0)  # so that all steps have the same weights
    batches = [
        [groups_to_table([group]) for group in GROUPS],
        [table(SESSIONS, [1.0, -0.5, 2.0])],
        [groups_to_table([recorded_group(50)])],
    ]
    found = [dict(learner.step(batch).metrics) for batch in batches]
    learner.save(run / "saved")
    return found


@pytest.fixture(scope="module")
def recorded(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, list[dict[str, float]]]:
    run = tmp_path_factory.mktemp("run")
    metrics = on_ranks(RANKS, steps, tiny_model, run)[0]
    trained = [(1, group.ordinal, 0) for group in GROUPS] + [(0, 7, 1), (1, 50, 2)]
    outcomes = OutcomesWriter(run / "outcomes", attempt=2)
    outcomes.write(
        [
            Outcome(made_in, ordinal, "trained", "", version + 1, version, 0)
            for made_in, ordinal, version in trained
        ]
    )
    outcomes.flush()
    return Run(run), metrics


def test_each_trained_token_is_recorded_once_with_its_terms(
    recorded: tuple[Run, list[dict[str, float]]], tiny_model: Path
) -> None:
    run, (metrics, *_) = recorded
    ranks = {path.name.split("-")[1] for path in (run.directory / "trained").iterdir()}
    assert ranks == {"rank_0000", "rank_0001"}
    rows = run.trained()
    step = rows.filter(pa.compute.equal(rows["version"], 0)).to_pylist()
    assert {row["trained_in"] for row in step} == {2} and {row["attempt"] for row in step} == {1}
    assert sorted((row["ordinal"], row["index"]) for row in step) == [
        (group.ordinal, index)
        for group in GROUPS
        for index, one in enumerate(group.trajectories)
        if one.status == "ok" and any(one.loss_mask)
    ]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    ratios = []
    for row in step:
        group = GROUPS[row["ordinal"]]
        one = group.trajectories[row["index"]]
        positions = row["positions"] or [*range(len(one.loss_mask))]
        assert positions == [*np.flatnonzero(one.loss_mask)]
        ids = [*group.prompt.token_ids, *one.completion.token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        begin = len(group.prompt.token_ids)
        theirs = [float(logits[begin + at - 1, ids[begin + at]]) for at in positions]
        np.testing.assert_allclose(row["logprobs"], theirs, rtol=0, atol=1e-4)
        assert row["advantages"] == pytest.approx([one.advantage] * len(positions))
        old = np.array(one.completion.logprobs)[positions]
        ratio = np.exp(np.array(row["logprobs"]) - old)
        ratios += ratio.tolist()
        for at, value in enumerate(ratio):
            if min(abs(value - edge) for edge in (0.7, 0.95, 1.05, 1.3)) > 1e-4:
                up = one.advantage > 0
                assert row["clipped"][at] == (value > 1.05 if up else value < 0.95)
                assert row["masked"][at] == (not 0.7 <= value <= 1.3)
    count = metrics["tokens"]
    assert len(ratios) == count and sum(ratios) / count == pytest.approx(metrics["ratio_mean"])
    for name, metric in (("clipped", "clip"), ("masked", "mask")):
        share = sum(sum(row[name]) for row in step) / count
        assert 0 < share == pytest.approx(metrics[f"{metric}_fraction"])
    weights = [weight for row in step for weight in row["weights"]]
    assert sum(weights) / count == pytest.approx(metrics["weight_mean"])


def test_the_tokens_of_sessions_are_where_the_model_sampled_them(
    recorded: tuple[Run, list[dict[str, float]]], tiny_model: Path
) -> None:
    run, (_, metrics, _) = recorded
    rows = of_trajectories(run.trained(ordinals=[7]))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    (group,) = table(SESSIONS, [1.0, -0.5, 2.0]).to_pylist()
    trained = 0
    for index, nodes in enumerate(SESSIONS):
        theirs = wanted(model, nodes)  # 0 at tokens that are not trained
        mine = at_tokens(rows[0, 7, index], len(theirs))
        known = np.array([np.nan if one is None else one for one in mine["logprobs"]])
        np.testing.assert_array_equal(np.isnan(known), theirs == 0)
        np.testing.assert_allclose(known[theirs != 0], theirs[theirs != 0], rtol=0, atol=1e-4)
        shown = token_table(group, index, rows[0, 7, index])
        assert shown["id"].to_pylist() == group["completion_ids"][index]
        assert shown["trained"].to_pylist() == [*(theirs != 0)]
        trained += int((theirs != 0).sum())
    assert trained == metrics["tokens"]


def test_only_the_step_that_gave_a_group_its_outcome_counts(
    recorded: tuple[Run, list[dict[str, float]]],
) -> None:
    """An attempt that was undone, and a copy that a crash in the middle of a merge left."""
    run, _ = recorded
    before = run.trained()
    (path,) = (run.directory / "trained").glob("*rank_0000-00000000.parquet")
    copied = path.with_name("attempt_0002-rank_0000-00000099.parquet")
    copied.write_bytes(path.read_bytes())
    undone = TrainedFiles(run.directory, 1, 0)
    undone.write(parquet.read_table(path).drop_columns(["trained_in"]))
    undone.flush()
    try:
        assert run.trained().equals(before) and {*before["trained_in"].to_pylist()} == {2}
        assert run.trained(ordinals=[7])["ordinal"].unique().to_pylist() == [7]
    finally:
        copied.unlink()
        for path in (run.directory / "trained").glob("attempt_0001*"):
            path.unlink()


def test_what_a_skipped_step_computed_is_there_on_request(tmp_path: Path) -> None:
    files = TrainedFiles(tmp_path, 0, 0)
    files.write(a_row(3))
    files.flush()
    outcomes = OutcomesWriter(tmp_path / "outcomes", attempt=0)
    outcomes.write([Outcome(0, 3, "skipped", "not_finite", 4)])
    outcomes.flush()
    run = Run(tmp_path)
    assert len(run.trained()) == 0 and len(run.trained(skipped=True)) == 1


def test_merging_keeps_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.runtime.files.merging.MERGE_EVERY", 4)
    files = TrainedFiles(tmp_path, 0, 0)
    for number in range(9):
        files.write(a_row(number))
    files.flush()
    assert len([*(tmp_path / "trained").iterdir()]) == 3
    rows = [parquet.read_table(path) for path in sorted((tmp_path / "trained").iterdir())]
    assert pa.concat_tables(rows)["ordinal"].to_pylist() == [*range(9)]


def test_a_full_disk_ends_the_run_and_nothing_half_written_is_left(tmp_path: Path) -> None:
    (tmp_path / "trained").write_text("in the way")
    files = TrainedFiles(tmp_path, 0, 0)
    files.write(a_row(0))
    with pytest.raises(OSError, match="trained"):
        files.flush()
    with pytest.raises(OSError, match="trained"):
        files.write(a_row(1))


def a_row(ordinal: int) -> pa.Table:
    return pa.table(
        {
            "attempt": pa.array([0], pa.int32()),
            "ordinal": pa.array([ordinal], pa.int64()),
            "index": pa.array([0], pa.int32()),
            "version": pa.array([ordinal], pa.int32()),
            "positions": pa.array([None], pa.list_(pa.int32())),
            "logprobs": pa.array([[-1.0]], pa.list_(pa.float32())),
            "weights": pa.array([[1.0]], pa.list_(pa.float32())),
            "advantages": pa.array([[0.5]], pa.list_(pa.float32())),
            "clipped": pa.array([[False]], pa.list_(pa.bool_())),
            "masked": pa.array([[False]], pa.list_(pa.bool_())),
        }
    )


@pytest.mark.parametrize("how", ["columns", "null", "short", "positions", "type"])
def test_a_damaged_file_is_named_and_the_others_are_read(tmp_path: Path, how: str) -> None:
    files = TrainedFiles(tmp_path, 0, 0)
    for ordinal in (1, 2):
        files.write(a_row(ordinal))
    files.flush()
    outcomes = OutcomesWriter(tmp_path / "outcomes", attempt=0)
    outcomes.write([Outcome(0, one, "trained", "", one + 1, one, 0) for one in (1, 2)])
    outcomes.flush()
    path = sorted((tmp_path / "trained").iterdir())[0]
    table = parquet.read_table(path)
    (row,) = table.to_pylist()
    schema = table.schema
    if how == "columns":
        parquet.write_table(table.drop_columns(["weights"]), path)
    else:
        if how == "null":
            row["trained_in"] = None
        elif how == "short":
            row["clipped"] = []
        elif how == "positions":
            row["positions"] = [0, 1]
        else:
            schema = schema.set(1, pa.field("ordinal", pa.int32()))
        parquet.write_table(pa.Table.from_pylist([row], schema), path)
    damaged: list[str] = []
    assert Run(tmp_path).trained(damaged)["ordinal"].to_pylist() == [2]
    assert len(damaged) == 1 and f"trained/{path.name}" in damaged[0]
    with pytest.raises(pa.ArrowInvalid):
        Run(tmp_path).trained()


def test_positions_outside_a_trajectory_are_no_tokens() -> None:
    row = {
        "positions": [-1, 1, 7],
        **{name: [1.0, 2.0, 3.0] for name in ("logprobs", "weights", "advantages")},
        **{name: [True] * 3 for name in ("clipped", "masked")},
    }
    assert at_tokens([row], 3)["logprobs"] == [None, 2.0, None]
