"""An adapter (LoRA) with each objective, in float32 and in bfloat16: the first loss is that of the
model, only the adapter and the value head change, and a checkpoint continues bit-equally."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from plain_ranks import on_ranks
from recorded import learner_config, recorded_group

from asyncrl.config import Config, LoraConfig, WarmStartConfig
from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.messages import StepResult
from asyncrl.contracts.offline_rows import token_table
from asyncrl.learning.steps.online_preference import pairs_table
from asyncrl.learning.warm_start import WarmStartReport, warm_start
from asyncrl.preflight import learner_spec

LORA = {"r": 4, "alpha": 16}
SIGMOID = {"name": "sigmoid", "beta": 0.3}
VALUES = "a value head"
ALGORITHMS: dict[str, dict[str, Any]] = {
    "supervised": {},
    "preferences": {"preference": {"loss": SIGMOID}},
    "online preferences": {"preference": {"loss": SIGMOID, "weight_cap": 2.0}},
    "teacher": {"distillation": {"teacher": "http://127.0.0.1:1/v1"}},
    VALUES: {"advantage": {"name": "gae", "value_coef": 10.0}},
}
FALLS = {"supervised": "loss", "preferences": "pref/loss", VALUES: "value_loss"}
"""Metric that a step on the same batch lowers."""
ROWS = [((5, 6, 7), (8, 9)), ((9, 3), (4, 10)), ((12,), (13, 14)), ((20, 21), (22, 23))]
Bits = dict[str, torch.Tensor]


class Steps:
    """What steps of one kind change."""

    begin: Bits
    metrics: list[dict[str, float]]
    trained: list[Bits]
    """After each of the first two steps."""
    continued: tuple[list[float], Bits]
    """Losses of two more steps, and what is trained after them."""
    resumed: tuple[list[float], Bits]
    """The same after a load."""
    after_load: Bits
    base: Bits
    applied: int


@dataclass(frozen=True)
class Warmed:
    """A warm start, and a step after it."""

    report: WarmStartReport
    after: Bits
    result: StepResult
    trained: Bits
    base: Bits


class Observed:
    """What learners with and without an adapter do."""

    base: Bits
    settings: LoraConfig
    warm_start: Warmed | None = None

    def __init__(self) -> None:
        self.first_loss: dict[str, float] = {}
        self.kinds: dict[str, Steps] = {}


def config_of(path: Path, kind: str, lora: bool, bf16: bool) -> Config:
    base = learner_config(path, 1, 1024, ALGORITHMS[kind], weight_decay=0.1, bf16=bf16)
    tree = base.model_dump() | {"lora": LORA if lora else None}
    tree["staleness"]["max_staleness"] = 9
    tree["model"]["dtype"] = "bfloat16" if bf16 else "float32"
    return Config.model_validate(tree)


def scored_tables(step: int) -> list[pa.Table]:
    """Groups with different rewards, and with the log-probs of a reference or a teacher."""
    tables = []
    for ordinal in range(4 * step, 4 * step + 4):
        group, drawn = recorded_group(ordinal), np.random.default_rng(ordinal)
        members = tuple(
            replace(
                member,
                reward=float(index),
                reference_logprobs=tuple(
                    float(value) - 0.5 * drawn.random() for value in member.completion.logprobs
                ),
            )
            for index, member in enumerate(group.trajectories)
        )
        tables.append(groups_to_table([replace(group, trajectories=members)]))
    return tables


def step_of(kind: str, learner: Any) -> Callable[[int], dict[str, float]]:
    """A step of this kind on the batch of a number. Returns its metrics."""
    if kind == "supervised":
        return lambda number: learner.supervised_step(token_table(ROWS[number % 2 :]))
    if kind == "preferences":
        spec = learner.state.spec
        pairs = [pairs_table(scored_tables(number), spec, 0)[0] for number in range(3)]
        return lambda number: learner.preference_step(pairs[number])
    return lambda number: learner.step(scored_tables(number)).metrics


def frozen(learner: Any) -> Bits:
    return {name: part.ds_tensor.clone() for name, part in learner.state.parameters.items()}


def trained(learner: Any) -> Bits:
    """The adapter's matrices, and the value head's parameters."""
    head = learner.state.engine.module.value_head
    values = {} if head is None else dict(head.named_parameters())
    return {name: part.ds_tensor.clone() for name, part in (learner.state.adapter | values).items()}


def same(one: Bits, other: Bits) -> list[str]:
    """Names of the tensors with the same bits."""
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if torch.equal(tensor, other[name])]


def started(rank: int, config: Config) -> Any:
    from asyncrl.learning.engine.state import load_state
    from asyncrl.learning.rank import LearnerRank

    return LearnerRank(load_state(rank, learner_spec(config)), "run", 1)


def observed(
    rank: int, world_size: int, path: Path, folder: Path, kinds: Sequence[str], bf16: bool
) -> Observed:
    """What learners with and without an adapter do. The kinds share a learner, whose adapter begins
    anew with each."""

    found = Observed()
    plain = started(rank, config_of(path, kinds[0], False, bf16))
    for kind in kinds:
        plain.state.spec = learner_spec(config_of(path, kind, False, bf16))
        plain.reset_optimizer(0.0)
        found.first_loss[kind] = step_of(kind, plain)(0)["loss"]
    plain.state.engine.destroy()
    del plain  # while it exists, transformers shards the next model

    learner = started(rank, config_of(path, kinds[0], True, bf16))
    learner.save(folder / "start")
    found.base = frozen(learner)
    for kind in kinds:
        learner.load(folder / "start")
        learner.reset_optimizer(1e-2)
        learner.state.spec = learner_spec(config_of(path, kind, True, bf16))
        found.kinds[kind] = steps(learner, step_of(kind, learner), folder / kind.replace(" ", "_"))
    found.settings = learner.state.spec.lora
    learner.export_hf(folder / "hf", str(path))
    if "supervised" in kinds:
        learner.load(folder / "start")
        found.warm_start = warmed(learner, path, bf16, folder / "snapshot")
    learner.state.engine.destroy()
    return found


def steps(learner: Any, step: Callable[[int], dict[str, float]], folder: Path) -> Steps:
    """Two steps on one batch, a checkpoint, and two more steps, once on and once after a load."""
    found = Steps()
    found.begin = trained(learner)
    found.metrics, found.trained = [step(0)], [trained(learner)]
    found.metrics.append(step(0))
    found.trained.append(trained(learner))
    learner.save(folder)
    ends = []
    for _ in range(2):
        metrics = [step(number) for number in (1, 2)]
        ends.append(([one["loss"] for one in metrics], trained(learner)))
        learner.load(folder)
    found.continued, found.resumed = ends
    found.after_load, found.base = trained(learner), frozen(learner)
    found.applied = learner.state.applied
    return found


def warmed(learner: Any, path: Path, bf16: bool, snapshot: Path) -> Warmed:
    """A warm start until half of the rows are exact, and a policy step after it."""

    class InProcess:
        async def supervised_step(self, table: pa.Table) -> dict[str, float]:
            metrics: dict[str, float] = learner.supervised_step(table)
            return metrics

        async def exact_match(self, rows: Any) -> float:
            return float(learner.exact_match(rows))

        async def snapshot(self) -> None:
            learner.save(snapshot)

        async def restore(self) -> None:
            learner.load(snapshot)

        async def reset_optimizer(self, learning_rate: float, warmup_steps: int = 0) -> None:
            learner.reset_optimizer(learning_rate, warmup_steps)

        async def set_learning_rate(self, learning_rate: float) -> None:
            learner.set_learning_rate(learning_rate)

    config = WarmStartConfig(
        data="unused.parquet",
        learning_rate=1e-2,
        batch_size=4,
        check_every_steps=4,
        max_steps=200,
        min_accuracy=0.5,
        max_accuracy=1.0,
    )
    report = asyncio.run(warm_start(InProcess(), ROWS, ROWS, config))
    learner.reset_optimizer(1e-2)
    after = trained(learner)
    learner.state.spec = learner_spec(config_of(path, "teacher", True, bf16))
    result = learner.step(scored_tables(0))
    return Warmed(report, after, result, trained(learner), frozen(learner))


def assert_trains(found: Steps, kind: str, first_loss: float) -> None:
    assert found.metrics[0]["loss"] == first_loss, "the adapter's product begins at 0"
    assert all(metrics["applied"] for metrics in found.metrics)
    # B is 0, so A has no gradient in the first step.
    assert all(".lora_A." in name for name in same(found.begin, found.trained[0]))
    assert not same(found.begin, found.trained[1])
    assert not same(found.trained[0], found.trained[1])
    assert found.continued[0] == found.resumed[0] and found.applied == 2
    assert len(same(found.continued[1], found.resumed[1])) == len(found.begin)
    assert len(same(found.trained[1], found.after_load)) == len(found.begin)
    assert not same(found.after_load, found.continued[1])
    extra = {name for name in found.begin if ".lora_" not in name}
    assert extra == ({"weight", "bias"} if kind == VALUES else set())
    if (name := FALLS.get(kind)) is not None:
        assert found.metrics[1][name] < found.metrics[0][name]


def assert_merged(path: Path, exported: Path, lora: LoraConfig, last: Bits) -> None:
    """The exported weights are the model's plus the adapter's product, in the model's dtype."""
    from safetensors.torch import load_file

    files = [load_file(one) for one in exported.glob("*.safetensors")]
    merged = {name: tensor for file in files for name, tensor in file.items()}
    base = load_file(path / "model.safetensors")
    assert merged.keys() == base.keys()
    prefix, changed = "base_model.model.", 0
    for name, tensor in merged.items():
        layer = f"{prefix}{name.removesuffix('.weight')}"
        wanted = base[name].to(tensor.dtype).float()
        if f"{layer}.lora_A.weight" in last:
            sides = [last[f"{layer}.lora_{side}.weight"].float() for side in "AB"]
            down, up = sides[0].view(lora.r, -1), sides[1].view(-1, lora.r)
            wanted = wanted + up @ down * lora.scale
            changed += not torch.equal(tensor, base[name].to(tensor.dtype))
        assert torch.allclose(tensor.float(), wanted, rtol=2**-8, atol=1e-6), name
        if tensor.dtype == torch.float32:
            assert torch.allclose(tensor, wanted, rtol=1e-5, atol=1e-6), name
    assert changed == 2 * 7
    assert json.loads((exported / "adapter" / "adapter_config.json").read_text())["r"] == lora.r


@pytest.mark.parametrize(
    ("kinds", "bf16"),
    [
        (("supervised", "preferences", "online preferences", "teacher"), False),
        pytest.param((VALUES,), False),
        pytest.param(("supervised", "preferences", "teacher"), True, marks=pytest.mark.slow),
        pytest.param((VALUES,), True, marks=pytest.mark.slow),
    ],
    ids=["objectives", "values", "objectives in bf16", "values in bf16"],
)
def test_every_objective_trains_only_the_adapter(
    kinds: Sequence[str], bf16: bool, model_path: Path, tmp_path: Path
) -> None:
    (found,) = on_ranks(1, observed, model_path, tmp_path, kinds, bf16)
    for kind in kinds:
        assert_trains(found.kinds[kind], kind, found.first_loss[kind])
        assert len(same(found.base, found.kinds[kind].base)) == len(found.base)
    dtypes = {tensor.dtype for tensor in found.base.values()}
    assert dtypes == {torch.bfloat16 if bf16 else torch.float32}
    assert_merged(model_path, tmp_path / "hf", found.settings, found.kinds[kinds[-1]].after_load)
    if (warm := found.warm_start) is not None:
        assert warm.report.accuracy >= 0.5 and warm.report.steps > 0
        assert warm.result.applied and not same(warm.after, warm.trained)
        assert len(same(found.base, warm.base)) == len(found.base)
