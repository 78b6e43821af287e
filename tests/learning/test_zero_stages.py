"""ZeRO-1 and ZeRO-2 compute what ZeRO-3 computes, publish the same bytes, and continue each other's
checkpoints, on real ranks that are plain processes."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_ranks import on_ranks
from recorded import learner_config
from transformers import AutoModelForCausalLM

from asyncrl.config import LearnerConfig, LoraConfig
from asyncrl.contracts.offline_rows import token_table
from asyncrl.learning.engine import zero
from asyncrl.preflight.specs import learner_spec

ROWS = [(tuple(range(3, 6 + index)), tuple(range(8, 11 + 6 * index))) for index in range(6)]
STAGES = (3, 1, 2)
DIRECT = ((1, 2),)
"""(Stage that saves, stage that loads), where DeepSpeed loads the shards as they are."""
CONVERTED = ((3, 1), (2, 3), (3, 2), (1, 3))
"""The same, where the shards are converted first."""
STEPS = 3


class Observed:
    """What a rank sees of a stage."""

    first: bytes
    """The published weights before the first step; empty on other ranks than rank 0."""
    losses: list[float]
    norms: list[float]
    last: bytes
    shards: dict[str, tuple[int, int]]
    skipped: tuple[float, bool]
    """(Applied, whether the weights stayed) of a step with a NaN."""
    next_losses: list[float]
    """After the checkpoint."""


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def found(
    request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[Any, Observed]]]:
    """The folder of the checkpoints, and for each rank: stage, or pair of stages → observations."""
    folder = tmp_path_factory.mktemp("stages")
    return folder, on_ranks(request.param, all_stages, model_path, folder)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_stages_compute_and_publish_the_same(found: Any, stage: int) -> None:
    for rank, seen in enumerate(found[1]):
        expected, observed = seen[3], seen[stage]
        assert observed.first == expected.first and bool(observed.first) == (rank == 0)
        assert observed.losses == pytest.approx(expected.losses, rel=1e-6)
        assert observed.norms == pytest.approx(expected.norms, rel=1e-5)
        # After a step that was skipped, which must leave nothing to the next one.
        assert observed.next_losses == pytest.approx(expected.next_losses, rel=1e-5)
        np.testing.assert_allclose(
            np.frombuffer(observed.last, np.float32),
            np.frombuffer(expected.last, np.float32),
            atol=1e-5,
        )
        assert {name: whole for name, (_, whole) in observed.shards.items()} == {
            name: whole for name, (_, whole) in expected.shards.items()
        }
        assert all(own == whole for own, whole in observed.shards.values())


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_with_nan_is_skipped_and_leaves_no_state(found: Any, stage: int) -> None:
    assert all(seen[stage].skipped == (0.0, True) for seen in found[1])


def test_another_stage_continues_a_checkpoint_without_conversion(found: Any) -> None:
    for seen in found[1]:
        assert seen[1, 2].first == seen[1].last
        assert seen[1, 2].next_losses == pytest.approx(seen[1].next_losses, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_stage_continues_a_converted_checkpoint(
    found: Any, model_path: Path, ranks: int
) -> None:
    folder, before = found
    same = ranks == len(before)
    for pair in CONVERTED if same else CONVERTED + DIRECT:
        resumed = on_ranks(ranks, some_resumed, model_path, folder, (pair,))[0][pair]
        saved = before[0][pair[0]]
        assert resumed.first == saved.last
        # Ranks round differently, and AdamW amplifies that from step to step.
        exact = (1e-6, 1e-6) if same else (1e-5, 1e-3)
        for loss, expected, rel in zip(resumed.next_losses, saved.next_losses, exact, strict=False):
            assert loss == pytest.approx(expected, rel=rel)


VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True, "cast_lm_head_to_fp32": True},
    "dora": {"lora": {"r": 4, "use_dora": True}},
    "checkpointed": {"gradient_checkpointing": True},
    "sgd": {"optimizer": "sgd"},
    "values": {"values": True},
    "shared rows": {"sequence_parallel_size": 2},
}


def test_bfloat16_weights_leave_the_frequencies_of_positions_exact(model_path: Path) -> None:
    """They would be wrong by up to 0.4%, and so would be the positions."""
    found = on_ranks(1, buffers_in_bfloat16, model_path)[0]
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    expected = dict(plain.named_buffers())
    assert found.keys() == expected.keys() and any("inv_freq" in name for name in found)
    for name, (dtype, values) in found.items():
        assert dtype == "torch.float32"
        np.testing.assert_array_equal(values, expected[name].numpy())


def buffers_in_bfloat16(
    rank: int, world_size: int, path: Path
) -> dict[str, tuple[str, np.ndarray]]:
    learner = started(rank, world_size, path, 3, **VARIANTS["bf16"])
    buffers = zero.policy_of(learner.state.engine).model.named_buffers()
    return {name: (str(buffer.dtype), buffer.float().numpy()) for name, buffer in buffers}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "names"),
    [(1, tuple(VARIANTS)[:-1]), (2, ("bf16", "dora", "values", "shared rows"))],
)
def test_other_settings_give_the_same_at_each_stage(
    model_path: Path, ranks: int, names: tuple[str, ...]
) -> None:
    for seen in on_ranks(ranks, all_variants, model_path, names):
        for name, by_stage in seen.items():
            for stage, losses in by_stage.items():
                rel = 1e-3 if name == "bf16" else 1e-5
                assert losses == pytest.approx(by_stage[3], rel=rel), (name, stage)


def all_variants(
    rank: int, world_size: int, path: Path, names: tuple[str, ...]
) -> dict[str, dict[int, list[float]]]:
    return {
        name: {
            stage: losses_of(rank, world_size, path, stage, VARIANTS[name])
            for stage in (STAGES if name != "bf16" else (3, 2))
        }
        for name in names
    }


def losses_of(
    rank: int, world_size: int, path: Path, stage: int, settings: dict[str, Any]
) -> list[float]:
    learner = started(rank, world_size, path, stage, **settings)
    taken = [learner.supervised_step(token_table(ROWS)) for _ in range(STEPS)]
    assert not poisoned_step(learner)
    taken.append(learner.supervised_step(token_table(ROWS)))
    assert all(step["applied"] for step in taken)
    return [step[name] for step in taken for name in ("loss", "grad_norm")]


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        ({"zero_stage": 1, "bf16": True}, "zero_stage = 1 keeps float32 weights only"),
        (
            {"zero_stage": 2, "offload_optimizer": "cpu"},
            "learner.offload_optimizer = 'cpu' only has an effect with learner.zero_stage: 3",
        ),
        (
            {"zero_stage": 1, "world_size": 4, "zero_hpz_partition_size": 2},
            "learner.zero_hpz_partition_size = 2 only has an effect with learner.zero_stage: 3",
        ),
        ({"zero_stage": 0}, "zero_stage"),
    ],
)
def test_what_a_stage_cannot_do_is_refused_by_name(
    learner: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        learner_config(tmp_path, **learner)


@pytest.mark.parametrize(("stage", "hooks"), [(1, False), (2, True)])
def test_only_zero_2_copies_gradients_into_buckets(stage: int, hooks: bool) -> None:
    chosen = zero.settings(LearnerConfig(zero_stage=stage))["zero_optimization"]
    assert isinstance(chosen, dict) and chosen["stage"] == stage
    assert (chosen["contiguous_gradients"], chosen["overlap_comm"]) == (hooks, False)
    assert not [name for name in chosen if "stage3" in name or "hpz" in name or "offload" in name]


def all_stages(rank: int, world_size: int, path: Path, folder: Path) -> dict[Any, Observed]:
    seen: dict[Any, Observed] = {}
    for stage in STAGES:
        seen[stage] = one_stage(rank, world_size, path, folder / str(stage), stage)
    return seen | some_resumed(rank, world_size, path, folder, DIRECT)


def some_resumed(
    rank: int, world_size: int, path: Path, folder: Path, pairs: tuple[tuple[int, int], ...]
) -> dict[Any, Observed]:
    return {
        (saved, loads): resumed(rank, world_size, path, folder / str(saved), loads)
        for saved, loads in pairs
    }


def one_stage(rank: int, world_size: int, path: Path, folder: Path, stage: int) -> Observed:
    learner = started(rank, world_size, path, stage)
    observed = Observed()
    observed.first = published(learner)
    taken = [learner.supervised_step(token_table(ROWS)) for _ in range(STEPS)]
    assert all(step["applied"] for step in taken)
    assert min(step["micro_batches"] / world_size for step in taken) >= 2
    observed.losses = [step["loss"] for step in taken]
    observed.norms = [step["grad_norm"] for step in taken]
    observed.last, observed.shards = published(learner), learner.shards()
    applied = poisoned_step(learner)
    observed.skipped = (applied, published(learner) == observed.last)
    learner.save(folder)
    observed.next_losses = [learner.supervised_step(token_table(ROWS))["loss"] for _ in range(3)]
    return observed


def resumed(rank: int, world_size: int, path: Path, folder: Path, stage: int) -> Observed:
    learner = started(rank, world_size, path, stage)
    learner.supervised_step(token_table(ROWS[:2]))
    learner.load(folder)
    observed = Observed()
    observed.first = published(learner)
    assert learner.state.applied == STEPS
    assert learner.state.engine.optimizer.clip_grad == learner.state.spec.learner.max_grad_norm
    observed.next_losses = [learner.supervised_step(token_table(ROWS))["loss"] for _ in range(3)]
    return observed


def started(rank: int, world_size: int, path: Path, stage: int, **learner: Any) -> Any:
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from asyncrl.learning.engine.state import load_state
    from asyncrl.learning.rank import LearnerRank

    gc.collect()
    unset_hf_deepspeed_config()  # that of the engine before
    lora, values = learner.pop("lora", None), learner.pop("values", False)
    algorithm = {"advantage": "gae"} if values else None
    config = learner_config(path, world_size, 64, algorithm, zero_stage=stage, **learner)
    spec = learner_spec(config)
    if lora is not None:  # DoRA is refused in a run with generators
        spec = replace(spec, lora=LoraConfig.model_validate(lora))
    return LearnerRank(load_state(rank, spec), "run", 1)


def poisoned_step(learner: Any) -> float:
    """Take a step whose loss is NaN on rank 0. Returns whether it was applied."""
    from asyncrl.learning.steps import supervised_step

    loss = supervised_step.supervised_loss
    supervised_step.supervised_loss = partial(with_nan, loss, learner.state.rank == 0)
    try:
        return float(learner.supervised_step(token_table(ROWS))["applied"])
    finally:
        supervised_step.supervised_loss = loss


def with_nan(loss: Any, poison: bool, *arguments: Any) -> Any:
    value, sums = loss(*arguments)
    return value * (float("nan") if poison else 1.0), sums


def published(learner: Any) -> bytes:
    """The bytes of all published buckets on rank 0."""
    from asyncrl.weights.gather import gather_buckets, weight_layout

    state, contents = learner.state, []
    entries, sizes = weight_layout(state.table, state.spec.model.dtype, state.spec.bucket_bytes)
    gather_buckets(
        state.parameters,
        state.table,
        entries,
        sizes,
        state.rank,
        lambda _, content: contents.append(content.tobytes()),
    )
    return b"".join(contents)
