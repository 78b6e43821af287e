"""The learner group on real Ray actors with real DeepSpeed ZeRO-3: one rank with one micro-batch in
a step, and two ranks with several."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest
import ray
import torch
from recorded import learner_config, recorded_batch, recorded_group, scored
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.algorithms.preference_losses import Sigmoid
from asyncrl.config import DpoConfig
from asyncrl.contracts.errors import PlacementError
from asyncrl.contracts.offline_rows import (
    PREFERENCE_SCHEMA,
    REFERENCE,
    REFERENCE_COLUMNS,
    SFT_SCHEMA,
    token_table,
)
from asyncrl.learning.driver import LearnerDiedError, LearnerError, RayLearner, stacks_path
from asyncrl.learning.engine.checkpoint import load_rank
from asyncrl.learning.engine.universal import _convert
from asyncrl.preflight.specs import learner_spec
from asyncrl.runtime.processes.stacks import GONE, stack_of
from asyncrl.weights.layout import bucket_checksum
from asyncrl.weights.manifest import expected_tensors

ROWS = [((5, 6, 7), (8, 9)), ((10,), (11, 12, 13)), ((20, 21), (22,))]

ALGORITHM = {
    "advantage": "reinforce_plus_plus",
    "loss_aggregation": "sequence_mean_token_mean",
    "entropy_coef": 0.01,
    "loss": {"name": "gspo", "old_policy": "log_linear"},
    "correction": {"truncation": {"level": "sequence", "normalize": True}},
}
"""Options that need statistics over the whole step or over whole trajectories of all ranks."""

Run = Callable[[Any], Any]


@pytest.fixture(scope="module")
def one_rank(ray_cluster: Any, run: Run, model_path: Path) -> Iterator[RayLearner]:
    spec = learner_spec(learner_config(model_path, max_tokens=1024, algorithm=ALGORITHM))
    group = run(RayLearner.create(spec, "run", 1))
    yield group
    run(group.close())


@pytest.fixture(scope="module")
def two_ranks(ray_cluster: Any, run: Run, model_path: Path) -> Iterator[RayLearner]:
    group = run(
        RayLearner.create(
            learner_spec(
                learner_config(
                    model_path,
                    world_size=2,
                    max_tokens=128,
                    algorithm=ALGORITHM,
                    find_nonfinite=True,
                )
            ),
            "run",
            1,
        )
    )
    yield group
    run(group.close())


def test_parameters_are_partitioned_over_two_ranks(two_ranks: RayLearner, run: Run) -> None:
    shards = run(two_ranks._all("shards"))
    assert shards[0].keys() == shards[1].keys() and "lm_head.weight" not in shards[0]
    for name, (own, whole) in shards[0].items():
        assert own == shards[1][name][0] == -(-whole // 2), name


def test_one_and_two_ranks_agree_over_three_steps(
    one_rank: RayLearner, two_ranks: RayLearner, run: Run
) -> None:
    for step in range(3):
        alone, together = (run(group.step(recorded_batch(step))) for group in (one_rank, two_ranks))
        assert alone.applied and together.applied
        assert alone.metrics["micro_batches"] == 1 and together.metrics["micro_batches"] >= 4
        assert together.metrics["grad_norm"] == pytest.approx(alone.metrics["grad_norm"], rel=1e-4)
        for name in (
            "loss",
            "tokens",
            "trajectories",
            "ratio_mean",
            "ratio_max",
            "clip_fraction",
            "kl_k1",
            "kl_k3",
            "entropy",
        ):
            assert together.metrics[name] == pytest.approx(
                alone.metrics[name], rel=1e-4, abs=1e-5
            ), name
    assert alone.metrics["trajectories"] == 24, (
        "one trajectory of each group is masked by its status"
    )
    for left, right in zip(
        run(one_rank.logprobs(ROWS)), run(two_ranks.logprobs(ROWS)), strict=True
    ):
        np.testing.assert_allclose(left, right, atol=1e-4)


@pytest.mark.slow
def test_two_ranks_that_share_rows_agree_with_one_over_three_steps(
    one_rank: RayLearner, run: Run, tmp_path: Path
) -> None:
    """Each rank has at most 32 tokens of a row, and a row has up to 64."""
    rows = [*ROWS, (tuple(range(3, 20)), tuple(range(3, 33)))]
    run(one_rank.export_hf(tmp_path))
    run(one_rank.reset_optimizer(1e-2))
    shared = run(
        RayLearner.create(
            learner_spec(
                learner_config(
                    tmp_path, 2, max_tokens=32, algorithm=ALGORITHM, sequence_parallel_size=2
                )
            ),
            "run",
            1,
        )
    )
    try:
        for step in range(3):
            alone, together = (
                run(group.step(recorded_batch(30 + step))) for group in (one_rank, shared)
            )
            assert alone.applied and together.applied and together.metrics["micro_batches"] >= 4
            for name in (
                "grad_norm",
                "loss",
                "tokens",
                "trajectories",
                "ratio_mean",
                "ratio_max",
                "clip_fraction",
                "kl_k1",
                "kl_k3",
                "entropy",
            ):
                assert together.metrics[name] == pytest.approx(
                    alone.metrics[name], rel=1e-4, abs=1e-5
                ), name
        for left, right in zip(
            run(one_rank.logprobs(rows)), run(shared.logprobs(rows)), strict=True
        ):
            np.testing.assert_allclose(left, right, atol=1e-4)
        alone, together = (
            run(group.supervised_step(token_table(rows))) for group in (one_rank, shared)
        )
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-4) and together[
            "grad_norm"
        ] == pytest.approx(alone["grad_norm"], rel=1e-4)
        assert {entry.name for entry in run(shared.gather(1)).tensors} == set(
            expected_tensors(tmp_path, "float32")
        )
    finally:
        run(shared.close())


def test_a_batch_with_nan_is_skipped_by_both_ranks(two_ranks: RayLearner, run: Run) -> None:
    before = run(two_ranks.logprobs(ROWS))
    batch = recorded_batch(7)
    batch[5] = scored(recorded_group(61, poison=True))
    result = run(two_ranks.step(batch))
    assert not result.applied and result.metrics["nonfinite_loss"] > 0
    assert (
        "NaN or Inf in loss or gradient from group 61, trajectory 0; its batch is " in result.note
    )
    kept = pyarrow.parquet.read_table(result.note.rpartition(" ")[2])
    assert kept["ordinal"].to_pylist() == [group.ordinal for group in batch] and math.isnan(
        kept["logprobs"][5].as_py()[0][0]
    )
    for left, right in zip(before, run(two_ranks.logprobs(ROWS)), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_spike_of_the_gradient_norm_keeps_its_batch(one_rank: RayLearner, run: Run) -> None:
    run(one_rank.reset_optimizer(0.0))
    # With equal rewards, only the entropy bonus has a gradient.
    groups = [recorded_group(240 + number) for number in range(8)]
    dull = [
        scored(
            replace(
                group,
                trajectories=tuple(
                    replace(member, advantage=member.advantage and 1.0)
                    for member in group.trajectories
                ),
            )
        )
        for group in groups
    ]
    for _ in range(8):
        result = run(one_rank.step(dull))
        assert result.applied and not result.note
        assert result.metrics["grad_norm_ratio"] == pytest.approx(1, rel=1e-3)
    result = run(one_rank.step(recorded_batch(30)))
    assert result.applied and result.metrics["grad_norm_ratio"] > 10
    assert (
        result.note.startswith("gradient norm ")
        and Path(result.note.rpartition(" ")[2]).name == "version_000008_spike.parquet"
    )


def test_a_skipped_step_leaves_no_state(two_ranks: RayLearner, run: Run) -> None:
    run(two_ranks.snapshot())
    run(two_ranks.step(recorded_batch(7, poison=True)))
    skipped = run(two_ranks.step(recorded_batch(8))).metrics["grad_norm"]
    run(two_ranks.restore())
    assert run(two_ranks.step(recorded_batch(8))).metrics["grad_norm"] == pytest.approx(
        skipped, rel=1e-6
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_save_load_continue_equals_uninterrupted(
    one_rank: RayLearner, two_ranks: RayLearner, run: Run, tmp_path: Path, world_size: int
) -> None:
    group = one_rank if world_size == 1 else two_ranks
    run(group.save(tmp_path))
    losses = [run(group.step(recorded_batch(20 + step))).metrics["loss"] for step in range(3)]
    after = run(group.logprobs(ROWS))
    run(group.load(tmp_path))
    assert [
        run(group.step(recorded_batch(20 + step))).metrics["loss"] for step in range(3)
    ] == pytest.approx(losses, rel=1e-6)
    for left, right in zip(after, run(group.logprobs(ROWS)), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_number_of_ranks_continues_as_the_one_that_saved(
    one_rank: RayLearner, two_ranks: RayLearner, run: Run, tmp_path: Path, ranks: int
) -> None:
    saved, other = (one_rank, two_ranks) if ranks == 1 else (two_ranks, one_rank)
    for group in (saved, other):
        run(group.reset_optimizer(1e-3))
    for step in range(2):
        run(saved.step(recorded_batch(40 + step)))
    run(saved.save(tmp_path))

    def continued(group: RayLearner) -> list[float]:
        return [run(group.step(recorded_batch(50 + step))).metrics["loss"] for step in range(3)]

    losses = continued(saved)
    run(other.load(tmp_path))
    back = tmp_path / "back"
    run(other.save(back))
    # Ranks round differently, and AdamW amplifies that from step to step.
    first, second, _ = continued(other)
    assert first == pytest.approx(losses[0], rel=1e-5)
    assert second == pytest.approx(losses[1], rel=1e-3)
    run(saved.load(back))
    assert continued(saved) == pytest.approx(losses, rel=1e-6), "nothing was lost on the way"
    assert not (other.spec.run_directory / "converted").exists()


def test_shards_that_cannot_be_converted_are_named(tmp_path: Path) -> None:
    (tmp_path / "zero3").mkdir()
    place = tmp_path / "run" / "converted"
    reason = _convert(tmp_path / "zero3", place)
    assert reason is not None and "can't find *_optim_states.pt files in directory" in reason
    assert not place.exists() and not list(place.parent.iterdir())


def test_an_unusable_checkpoint_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no counters\.json; name a complete checkpoint"):
        load_rank(None, tmp_path, 0, 1, 3, tmp_path)
    (tmp_path / "counters.json").write_text('{"world_size": 2}')
    with pytest.raises(ValueError, match=r"has no rank_0\.pt; name a complete checkpoint"):
        load_rank(None, tmp_path, 0, 1, 3, tmp_path)


def test_export_loads_in_plain_transformers(
    two_ranks: RayLearner, run: Run, tmp_path: Path
) -> None:
    run(two_ranks.export_hf(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (
        model.config._attn_implementation == "sdpa"
        and AutoTokenizer.from_pretrained(tmp_path).eos_token == "#"
    )
    for (prompt, following), logprobs in zip(ROWS, run(two_ranks.logprobs(ROWS)), strict=True):
        tokens = torch.tensor([[*prompt, *following]])
        expected = (
            model(input_ids=tokens)
            .logits[0]
            .log_softmax(-1)[len(prompt) - 1 : -1]
            .gather(-1, torch.tensor(following)[:, None])[:, 0]
        )
        np.testing.assert_allclose(logprobs, expected.detach(), atol=1e-5)


def test_a_gathered_version_has_every_parameter_once(
    two_ranks: RayLearner, run: Run, tmp_path: Path
) -> None:
    run(two_ranks.export_hf(tmp_path))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    manifest = run(two_ranks.gather(3))
    assert (manifest.run_id, manifest.attempt, manifest.version) == ("run", 1, 3)
    assert {entry.name for entry in manifest.tensors} == set(
        json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    )
    assert len(manifest.buckets) == len(manifest.sizes) > 4
    contents = ray.get(list(manifest.buckets))
    assert [bucket_checksum(content) for content in contents] == list(manifest.checksums)
    for entry in manifest.tensors:
        values = (
            contents[entry.bucket][entry.offset : entry.offset + entry.nbytes]
            .view(np.float32)
            .reshape(entry.shape)
        )
        np.testing.assert_array_equal(values, exported[entry.name].numpy(), err_msg=entry.name)


def test_supervised_steps_reach_exact_match(one_rank: RayLearner, run: Run) -> None:
    run(one_rank.reset_optimizer(1e-2))
    first = run(one_rank.supervised_step(token_table(ROWS)))["loss"]
    for _ in range(20):
        last = run(one_rank.supervised_step(token_table(ROWS)))["loss"]
    assert last < first / 10 and run(one_rank.exact_match(ROWS)) == 1.0
    assert run(one_rank.exact_match([*ROWS, ((5, 6, 7), (8, 10))])) == 0.75


@pytest.mark.slow  # by default, the run of DPO in tests/run/test_offline_run.py trains over Ray
def test_preference_steps_separate_pairs_over_ray(
    ray_cluster: Any, run: Run, model_path: Path
) -> None:
    """The table is a slice: only its rows travel to the ranks."""
    spec = replace(
        learner_spec(learner_config(model_path, max_tokens=1024)),
        objective=DpoConfig(loss=Sigmoid(beta=0.2)),
    )
    learner = run(RayLearner.create(spec, "run", 1))
    chosen = token_table([((1, 2), (3,)), *ROWS])
    rejected = token_table([((1, 2), (3,)), *[(prompt, (30, 31)) for prompt, _ in ROWS]])
    pairs = pa.table([*chosen.columns, *rejected.columns], schema=PREFERENCE_SCHEMA)
    for name, side in zip(REFERENCE_COLUMNS, (chosen, rejected), strict=True):
        targets = [sum(mask) for mask in side["loss_mask"].to_pylist()]
        pairs = pairs.append_column(name, pa.array([[-4.0] * one for one in targets], REFERENCE))
    run(learner.reset_optimizer(1e-2))
    before = run(learner.held_out_preferences(pairs.slice(1)))
    first = run(learner.preference_step(pairs.slice(1)))
    assert first["applied"] and first["pairs"] == before["pairs"] == 3
    assert first["pref/loss"] == pytest.approx(before["pref/loss"])
    for _ in range(10):
        run(learner.preference_step(pairs.slice(1)))
    after = run(learner.held_out_preferences(pairs.slice(1)))
    assert after["pref/accuracy"] == 1.0 and after["pref/margin"] > before["pref/margin"] + 1
    run(learner.close())


def test_log_probs_and_loss_of_a_table_are_those_of_its_rows(
    one_rank: RayLearner, run: Run
) -> None:
    table = token_table([*ROWS, ((5,), (6,))])
    nothing = pa.table({"input_ids": [[1, 2]], "loss_mask": [[False, False]]}, schema=SFT_SCHEMA)
    found = run(one_rank.target_logprobs(pa.concat_tables([table, nothing])))
    expected = run(one_rank.logprobs([*ROWS, ((5,), (6,))]))
    for values, wanted in zip(found, [*expected, []], strict=True):
        np.testing.assert_allclose(values, wanted, atol=1e-6)
    held_out = run(one_rank.held_out_loss(table))
    assert held_out.tokens == sum(map(len, expected))
    assert held_out.nll == pytest.approx(-sum(map(float, map(np.sum, expected))), rel=1e-6)
    assert held_out.exact == run(one_rank.exact_match([*ROWS, ((5,), (6,))]))


def test_learning_rate_warms_up(one_rank: RayLearner, run: Run) -> None:
    run(one_rank.reset_optimizer(1e-3, 4))
    # A supervised step follows the schedule only if asked to: the warm start does not.
    assert run(one_rank.supervised_step(token_table(ROWS)))["learning_rate"] == 1e-3
    scheduled = run(one_rank.supervised_step(token_table(ROWS), scheduled=True))["learning_rate"]
    assert scheduled == pytest.approx(0.5e-3), "the second of four steps"
    run(one_rank.reset_optimizer(1e-3, 4))
    rates = [run(one_rank.step(recorded_batch(step))).metrics["learning_rate"] for step in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_missing_resources_raise_with_a_table(ray_cluster: Any, run: Run, model_path: Path) -> None:
    config = learner_config(model_path, num_cpus=64).model_copy(update={"placement_timeout_s": 0.5})
    with pytest.raises(PlacementError, match=r"placement_timeout_s = 0.5(.|\n)*CPU +64 +2 "):
        run(RayLearner.create(learner_spec(config), "run", 1))


def test_a_rank_that_dies_in_a_collective_is_named_and_ends_the_group(
    two_ranks: RayLearner, run: Run
) -> None:
    """Rank 0 waits for rank 1 in the forward pass, and also fails when its peer dies."""
    rank_0, rank_1 = (psutil.Process(process) for _, process in two_ranks._processes)
    rank_1.suspend()

    async def kill_during_the_call() -> None:
        step = asyncio.ensure_future(two_ranks.exact_match(ROWS))
        stacks = stacks_path(two_ranks.spec, 1, 0)
        while "in wait" not in (stack := await stack_of(*two_ranks._processes[0], stacks)):
            assert not step.done() and not stack.endswith(GONE), stack
        rank_1.kill()
        await step

    with pytest.raises(
        LearnerDiedError, match="learner rank 1 failed in exact_match: its process died"
    ):
        run(kill_during_the_call())
    assert psutil.wait_procs([rank_0, rank_1], 30)[1] == []
    with pytest.raises(LearnerError, match="rank 1 failed"):
        run(two_ranks.step(recorded_batch(0)))
    run(two_ranks.close())


@pytest.mark.slow
def test_a_rank_that_hangs_counts_as_died(model_path: Path, run: Run, ray_cluster: Any) -> None:
    """Its peer waits for it in a collective. The group ends with a death, not an error of the
    code."""
    config = learner_config(model_path, world_size=2, call_timeout_s=60)
    group = run(RayLearner.create(learner_spec(config), "run", 7))
    processes = [psutil.Process(process) for _, process in group._processes]
    group.spec = replace(
        group.spec, learner=config.learner.model_copy(update={"call_timeout_s": 5.0})
    )
    processes[1].suspend()
    with pytest.raises(
        LearnerDiedError,
        match=(
            r"learner ranks 0, 1 did not answer exact_match within .*call_timeout_s = 5 s, .* rank"
            r" 1: process \d+ does not answer"
        ),
    ):
        run(group.exact_match(ROWS))
    assert psutil.wait_procs(processes, 30)[1] == []
    with pytest.raises(LearnerError, match="did not answer exact_match"):
        run(group.exact_match(ROWS))
    run(group.close())


def test_weights_that_a_finite_step_made_infinite_are_never_published(
    one_rank: RayLearner, run: Run
) -> None:
    run(one_rank.reset_optimizer(1e30))
    with pytest.raises(
        LearnerError,
        match=(
            r"rank 0 failed in step: .*the weights contain NaN or Inf, or .* after a step with"
            r" finite loss and gradient"
        ),
    ):
        run(one_rank.step(recorded_batch(0)))
    with pytest.raises(LearnerError):
        run(one_rank.gather(1))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_value_head_learns_equally_on_one_and_two_ranks_and_is_not_published(
    ray_cluster: Any, run: Run, model_path: Path
) -> None:
    """A new head returns 0 everywhere. With λ = 1, the first step then equals REINFORCE++: every
    token has the reward as its advantage, normalized over the step."""
    plain = {"advantage": "reinforce_plus_plus"}
    critic = {"advantage": {"name": "gae", "gae_lambda": 1.0, "value_coef": 1e-6}}
    fitting = {"advantage": {"name": "gae", "value_coef": 10.0}}
    first: dict[str, tuple[float, float]] = {}
    steps: dict[int, list[float]] = {}
    for name, algorithm, world_size, max_tokens in (
        ("plain", plain, 1, 1024),
        ("critic", critic, 1, 1024),
        ("one", fitting, 1, 1024),
        ("two", fitting, 2, 128),
    ):
        group = run(
            RayLearner.create(
                learner_spec(
                    learner_config(
                        model_path,
                        world_size=world_size,
                        max_tokens=max_tokens,
                        algorithm=algorithm,
                    )
                ),
                "run",
                1,
            )
        )
        try:
            metrics = [run(group.step(recorded_batch(0))).metrics for _ in range(4)]
            first[name] = metrics[0]["loss"] - metrics[0]["value_loss"], metrics[0]["grad_norm"]
            steps[world_size] = [
                value for step in metrics for value in (step["value_loss"], step["grad_norm"])
            ]
            assert {entry.name for entry in run(group.gather(1)).tensors} == set(
                expected_tensors(model_path, "float32")
            ), "the head is not published"
        finally:
            run(group.close())
    assert (
        first["critic"] == pytest.approx(first["plain"], rel=1e-4, abs=1e-6)
        and first["plain"][0] != 0
    )
    assert steps[1] == pytest.approx(steps[2], rel=1e-3)
    assert steps[1][6] < 0.9 * steps[1][0], "the values approach the returns of the repeated batch"
