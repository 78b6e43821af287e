"""The states of a rank leave their device between its shifts. On the CPU they leave host memory for
other host memory, by the same calls of torch and with the same DeepSpeed engine as on a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_ranks import on_ranks
from recorded import learner_config, state_without_model

from asyncrl.config import LoraConfig
from asyncrl.contracts.errors import GpuMemoryError
from asyncrl.contracts.offline_rows import token_table
from asyncrl.learning.engine import shifts
from asyncrl.learning.engine.shifts import DeviceShifts, device_shifts
from asyncrl.learning.engine.state import load_state
from asyncrl.learning.rank import LearnerRank
from asyncrl.preflight.specs import learner_spec

ROWS = [((5, 6, 7 + row), (8, 9, 10 + row, 3)) for row in range(8)]
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"bf16": True},
    "optimizer on the host": {"bf16": True, "offload_optimizer": "cpu"},
    "weights on the host": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    "adapter": {"bf16": True, "lora": {"r": 4, "alpha": 8}},
    "whole weights": {"bf16": True, "zero_stage": 2},
}


GIB = 2**30


class Gpu:
    """A GPU with as many free bytes as the test says, one after the other."""

    def __init__(self, patch: pytest.MonkeyPatch, *free: int) -> None:
        self.free, self.asked = [part * GIB for part in free], 0
        patch.setattr(shifts, "gpu_memory", self.memory)
        patch.setattr(shifts, "_empty_cache", lambda device: None)

    def memory(self) -> tuple[int, int]:
        self.asked += 1
        return self.free[min(self.asked, len(self.free)) - 1], 80 * GIB


class EmptyEngine:
    """A DeepSpeed engine without tensors. It is its own optimizer, and the one inside that."""

    fp16_partitioned_groups_flat = fp32_partitioned_groups_flat = ()

    def __init__(self) -> None:
        self.module, self.optimizer = torch.nn.Module(), self
        self.ipg_buckets = self.averaged_gradients = self.state = dict[Any, Any]()

    def zero_optimization_stage(self) -> int:
        return 3


def on_gpu() -> DeviceShifts:
    """A rank without tensors."""
    engine: Any = EmptyEngine()
    return DeviceShifts(engine, "cuda", 0.9, 0.85)


def test_a_rank_that_leaves_too_little_for_the_first_engine_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Gpu(monkeypatch, 20, 60)
    with pytest.raises(GpuMemoryError) as refused:
        on_gpu().leave()
    assert str(refused.value) == (
        "the generators cannot start: an engine needs 68.50 GiB of GPU memory, but 60.00 GiB of"
        " 80.00 GiB are free: what stays of the learner, and other processes, hold 20.00 GiB;"
        " lower generator.gpu_memory_utilization = 0.85"
    )


def test_a_rank_waits_for_what_it_released_before_a_shift(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shifts, "LOOK_EVERY_S", 0.0)
    before, after, first_check, starting, rested = 20, 76, 76, 10, 56
    gpu, rank = Gpu(monkeypatch, before, after, first_check, starting, starting, rested), on_gpu()
    rank.leave()
    rank.take()
    assert gpu.asked == 6
    rank._room_s = 0.0
    Gpu(monkeypatch, before, after, 55)
    rank.leave()
    with pytest.raises(GpuMemoryError) as refused:
        rank.take()
    assert str(refused.value) == (
        "the learner's shift cannot begin: a rank needs back 56.00 GiB of GPU memory, but 55.00 GiB"
        " of 80.00 GiB are free: the engine, and what stays of the rank, hold 25.00 GiB; lower"
        " learner.gpu_memory_utilization = 0.9, which limits what a rank keeps"
    )


def test_a_rank_answers_with_its_error_before_its_call_ends(model_path: Path) -> None:
    state = state_without_model(learner_config(model_path, call_timeout_s=100))
    state.spec = dataclasses.replace(state.spec, engine_share=0.85)
    made = device_shifts(state)
    assert made is not None and made._room_s == 50


def test_a_rank_with_devices_of_its_own_stays(model_path: Path) -> None:
    state = state_without_model(learner_config(model_path))
    rank = LearnerRank(state, "run", 1)
    rank.leave_device()
    rank.take_device()
    assert device_shifts(state) is None


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.faults), pytest.param(2, marks=pytest.mark.slow)],
)
def test_steps_after_a_return_are_those_of_a_rank_that_stayed(
    model_path: Path, tmp_path: Path, world_size: int
) -> None:
    for ranks in on_ranks(world_size, all_variants, model_path, tmp_path):
        for name, found in ranks.items():
            assert found.stayed == found.returned, name
            assert found.left >= 5 and found.emptied, name


def all_variants(rank: int, world_size: int, path: Path, folder: Path) -> dict[str, Any]:
    return {
        name: one_variant(rank, world_size, path, folder / f"{world_size} {name}", settings)
        for name, settings in VARIANTS.items()
    }


@dataclasses.dataclass(frozen=True)
class Compared:
    """Results of a rank that stayed and of one that left and returned, and its rests: the fewest
    tensors that left, and whether all shards were empty."""

    stayed: list[Any]
    returned: list[Any]
    left: int
    emptied: bool


def one_variant(
    rank: int, world_size: int, path: Path, folder: Path, settings: dict[str, Any]
) -> Compared:
    rests: list[tuple[int, bool]] = []
    stayed = trained(rank, world_size, path, folder / "stayed", settings, None)
    returned = trained(rank, world_size, path, folder / "returned", settings, rests)
    return Compared(
        stayed=stayed,
        returned=returned,
        left=min(count for count, _ in rests),
        emptied=all(empty for _, empty in rests),
    )


def trained(
    rank: int,
    world_size: int,
    path: Path,
    folder: Path,
    settings: dict[str, Any],
    rests: list[tuple[int, bool]] | None,
) -> list[Any]:
    others = {key: value for key, value in settings.items() if key != "lora"}
    config = learner_config(path, world_size, 64, learning_rate=1e-3, **others)
    if "lora" in settings:
        lora = LoraConfig.model_validate(settings["lora"])
        config = config.model_copy(update={"lora": lora})
    learner = LearnerRank(load_state(rank, learner_spec(config)), "run", 1)
    results = five_steps(learner, folder, rests)
    learner.state.engine.destroy()
    return results


def five_steps(
    learner: LearnerRank, folder: Path, rests: list[tuple[int, bool]] | None
) -> list[Any]:
    """Three steps, a checkpoint, log-probs and two more steps. With `rests`, the states leave and
    return before each of them. Returns losses, log-probs and the final weights' squares."""
    engine, results = learner.state.engine, list[Any]()
    moved = DeviceShifts(engine, "cpu", 1.0, 0.85)

    def rest() -> None:
        if rests is None:
            return
        moved.take()
        moved.leave()
        moved.leave()
        shards = [
            getattr(parameter, "ds_tensor", parameter.data).untyped_storage()
            for parameter in engine.module.parameters()
        ]
        rests.append((len(moved._left or ()), not any(shard.nbytes() for shard in shards)))
        moved.take()
        moved.take()

    for step in range(5):
        rest()
        if step == 3:
            learner.save(folder)
            rest()
            scored = learner.logprobs(ROWS)
            results.append({row: values.tolist() for row, values in scored.items()})
            rest()
        metrics = learner.supervised_step(token_table(ROWS))
        results.append((metrics["loss"], metrics["grad_norm"]))
    rest()
    shards = [parameter.ds_tensor for parameter in learner.state.parameters.values()]
    return [*results, [float(shard.double().square().sum()) for shard in shards]]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_deepspeeds_own_offload_does_not_serve(model_path: Path) -> None:
    """Why `DeviceShifts` exists. A DeepSpeed that passes this can replace it."""
    (answers,) = on_ranks(1, deepspeeds_offload, model_path)
    assert answers == ["Offloading is supported only for DeepSpeed FusedAdam.", "changed"]


def deepspeeds_offload(rank: int, world_size: int, path: Path) -> list[str]:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    config = learner_config(path, world_size, 64, bf16=True)
    config = config.model_copy(update={"lora": LoraConfig(r=4)})
    engine = load_state(rank, learner_spec(config)).engine
    answers = []
    try:
        engine.offload_states(include=[OffloadStateTypeEnum.optim_states], pin_memory=False)
    except AssertionError as error:
        answers.append(str(error))
    before = [parameter.ds_tensor.clone() for parameter in engine.module.parameters()]
    try:
        engine.offload_states(include=[OffloadStateTypeEnum.lp_params], pin_memory=False)
        engine.reload_states()
        same = all(
            torch.equal(old, parameter.ds_tensor)
            for old, parameter in zip(before, engine.module.parameters(), strict=True)
        )
    except RuntimeError:
        same = False
    return [*answers, "same" if same else "changed"]
