"""The states of a rank leave their device between its turns. On the CPU they leave host memory for
other host memory, by the same calls of torch and with the same DeepSpeed engine as on a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from plain_ranks import on_ranks
from recorded import learner_config

from asyncrl.config import LoraConfig
from asyncrl.contracts.offline_rows import token_table
from asyncrl.learning.rank import LearnerRank
from asyncrl.learning.state import load_state
from asyncrl.learning.turns import DeviceTurns
from asyncrl.preflight.specs import learner_spec

ROWS = [((5, 6, 7 + row), (8, 9, 10 + row, 3)) for row in range(8)]
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"bf16": True},
    "optimizer on the host": {"bf16": True, "offload_optimizer": "cpu"},
    "weights on the host": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    "adapter": {"bf16": True, "lora": {"r": 4, "alpha": 8}},
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_after_a_return_are_those_of_a_rank_that_stayed(
    model_path: Path, tmp_path: Path, world_size: int
) -> None:
    for ranks in on_ranks(world_size, all_variants, model_path, tmp_path):
        for name, found in ranks.items():
            assert found.stayed == found.returned, name
            assert found.left > 10 and found.emptied, name


def all_variants(rank: int, world_size: int, path: Path, folder: Path) -> dict[str, Any]:
    return {
        name: one_variant(rank, world_size, path, folder / f"{world_size} {name}", settings)
        for name, settings in VARIANTS.items()
    }


def one_variant(
    rank: int, world_size: int, path: Path, folder: Path, settings: dict[str, Any]
) -> SimpleNamespace:
    found = SimpleNamespace()
    for leaves in (False, True):
        lora = settings.get("lora")
        others = {key: value for key, value in settings.items() if key != "lora"}
        config = learner_config(path, world_size, 64, learning_rate=1e-3, **others)
        if lora is not None:
            config = config.model_copy(update={"lora": LoraConfig.model_validate(lora)})
        learner = LearnerRank(load_state(rank, learner_spec(config)), "run", 1)
        rests: list[tuple[int, bool]] = []
        results = five_steps(learner, folder / str(leaves), rests if leaves else None)
        setattr(found, "returned" if leaves else "stayed", results)
        learner.state.engine.destroy()
    found.left, found.emptied = min(count for count, _ in rests), all(empty for _, empty in rests)
    return found


def five_steps(
    learner: LearnerRank, folder: Path, rests: list[tuple[int, bool]] | None
) -> list[Any]:
    """Three steps, a checkpoint, log-probs and two more steps. With `rests`, the states leave and
    return before each of them. Returns losses, log-probs and the final weights' squares."""
    engine, results = learner.state.engine, list[Any]()
    moved = DeviceTurns(engine, "cpu", 1.0, 0.85)

    def rest() -> None:
        if rests is None:
            return
        moved.take()
        moved.leave()
        moved.leave()
        shards = [parameter.ds_tensor.untyped_storage() for parameter in engine.module.parameters()]
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
    """Why `DeviceTurns` exists. A DeepSpeed that passes this can replace it."""
    (answers,) = on_ranks(1, deepspeeds_offload, model_path)
    assert answers == ["Offloading is supported only for DeepSpeed FusedAdam.", "changed"]


def deepspeeds_offload(rank: int, world_size: int, path: Path) -> list[str]:
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
