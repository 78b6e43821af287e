"""What `benchmarks.objectives` measures: one pass over its rows by asyncrl or by a bare loop. Each
runs in a process of its own, which takes a pass whenever a line of its input names one.

    python -m benchmarks.objective_passes {learner|bare} TASK

- learner: the step loop of a run on a dataset. Rows come from an Arrow file and go over Ray to the
  learner's rank, which uses DeepSpeed ZeRO-3 at world size 1. The pass `forward` is the reference
  pass of DPO.
- bare: plain torch on the same packed rows, made ahead. It has the same model, clipping and fused
  AdamW, but no Ray, DeepSpeed, metrics or checks. The pass `forward` scores the rows without
  gradient.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from asyncrl.config import OfflineConfig
    from asyncrl.data import TokenFile
    from asyncrl.models import Example, MicroBatch

BETA = 0.1
"""Of DPO. TRL's default is the same."""
STEPS = 1_000_000
"""Of the learning-rate schedule. The learning rate is 0."""


@dataclass(frozen=True, slots=True)
class Task:
    """What all contestants train."""

    objective: str
    """sft or dpo."""
    folder: str
    """Contains the folders `model` and `reference`, and the rows as `OBJECTIVE.arrow`."""
    batch: int
    """Rows or pairs of a step."""
    longest: int
    """Most tokens of a row, or of one side of a pair."""
    cap: int
    """Most tokens of a micro-batch."""
    threads: int
    device: str

    @property
    def rows(self) -> Path:
        """The token rows."""
        return Path(self.folder) / f"{self.objective}.arrow"

    def text(self) -> str:
        """The task as an argument of a command."""
        return json.dumps(asdict(self))


Pass = Callable[[], Awaitable[dict[str, float]]]
"""Takes a pass. Returns its `seconds`, and the `loss` if it trains."""


def main(arguments: Sequence[str]) -> None:
    kind, task = arguments[0], Task(**json.loads(arguments[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    asyncio.run({"learner": serve_learner, "bare": serve_bare}[kind](task, answers.write))


async def serve(passes: dict[str, Pass], answer: Callable[[str], object]) -> None:
    """Take the passes that stdin names, one a line, until it ends."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        answer(json.dumps(await passes[line.strip()]()) + "\n")
        answer.__self__.flush()  # type: ignore[attr-defined]


# --- asyncrl ---


async def serve_learner(task: Task, answer: Callable[[str], object]) -> None:
    """Start Ray, the learner and with DPO the reference policy, and take passes."""
    from asyncrl.data import open_token_file
    from asyncrl.learning import RayLearner, start_reference
    from asyncrl.preflight import offline_learner_spec, offline_reference_spec
    from asyncrl.run import score_rows, shut_down_ray, start_local_ray

    start_local_ray(4, configure_logging=False)
    config, file = offline_config(task), open_token_file(task.rows)
    assert file is not None
    learner = await RayLearner.create(offline_learner_spec(config, STEPS), "bench", 0)
    await learner.set_learning_rate(0.0)
    train_on = file
    scored = task.rows.with_name("scored.arrow")
    if task.objective == "dpo":
        reference = start_reference(offline_reference_spec(config))

    async def forward() -> dict[str, float]:
        began = time.perf_counter()
        await score_rows(
            reference, file, scored, config.objective.reference_batch, config.data.max_length
        )
        return {"seconds": time.perf_counter() - began}

    if task.objective == "dpo":
        await forward()
        train_on = open_token_file(scored)

    async def train() -> dict[str, float]:
        return await learner_pass(learner, train_on, task)

    try:
        await serve({"train": train, "forward": forward}, answer)
    finally:
        await learner.close()
        shut_down_ray()


async def learner_pass(learner, file: TokenFile, task: Task) -> dict[str, float]:
    """One step on every `task.batch` rows, as a run on a dataset takes it."""
    losses, began = [], time.perf_counter()
    for start in range(0, file.rows, task.batch):
        table = file.take(range(start, start + task.batch))
        if task.objective == "dpo":
            metrics = await learner.preference_step(table)
        else:
            metrics = await learner.supervised_step(table, scheduled=True)
        losses.append((metrics["loss"], metrics["tokens"] if task.objective == "sft" else 1.0))
    return {"seconds": time.perf_counter() - began, "loss": weighted_mean(losses)}


def offline_config(task: Task) -> OfflineConfig:
    """The config of a run on the task's rows."""
    from asyncrl.config import OfflineConfig

    folder = Path(task.folder)
    tree: dict[str, object] = {
        "name": "bench",
        "runs_root": str(folder / "runs"),
        "objective": task.objective,
        "batch_size": task.batch,
        "model": {"path": str(folder / "model")},
        "data": {"train": str(task.rows), "max_length": task.longest},
        "learner": {
            "device": task.device,
            "num_threads": task.threads,
            "max_tokens_per_gpu": task.cap,
        },
    }
    if task.objective == "dpo":
        tree["objective"] = {
            "name": "dpo",
            "loss": {"name": "sigmoid", "beta": BETA},
            "ref_load": str(folder / "reference"),
        }
    return OfflineConfig.model_validate(tree)


def weighted_mean(pairs: Sequence[tuple[float, float]]) -> float:
    """The mean of (value, weight)."""
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


# --- the bare loop ---


async def serve_bare(task: Task, answer: Callable[[str], object]) -> None:
    """Prepare the micro-batches of every step, and take passes."""
    loop = BareLoop(task)

    async def train() -> dict[str, float]:
        return loop.train()

    async def forward() -> dict[str, float]:
        return loop.forward()

    await serve({"train": train, "forward": forward}, answer)


class BareLoop:
    """The ceiling of a step loop."""

    def __init__(self, task: Task) -> None:
        import torch

        from asyncrl.data import open_token_file

        torch.set_num_threads(task.threads)
        self.task, folder = task, Path(task.folder)
        file = open_token_file(task.rows)
        assert file is not None
        self.model, self.reference = (
            load_backbone(folder / name, task.device) for name in ("model", "reference")
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        self.steps = [
            packed_rows(file.take(range(start, start + task.batch)), task)
            for start in range(0, file.rows, task.batch)
        ]
        self.all = packed_rows(file.take(range(file.rows)), task)
        self.sums = [self._reference_sums(step) for step in self.steps]

    def train(self) -> dict[str, float]:
        """One step on every `task.batch` rows."""
        import torch

        losses, began = [], time.perf_counter()
        for step, sums in zip(self.steps, self.sums, strict=True):
            total, units = torch.zeros((), device=self.task.device), self._units(step)
            for batch, reference in zip(step, sums, strict=True):
                loss = self._loss(batch, reference) / units
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append((total.item(), units if self.task.objective == "sft" else 1.0))
        return {"seconds": time.perf_counter() - began, "loss": weighted_mean(losses)}

    def forward(self) -> dict[str, float]:
        """The reference's log-probs of all targets."""
        import torch

        began = time.perf_counter()
        with torch.no_grad():
            found = [(-token_losses(self.reference, batch, "none")).cpu() for batch in self.all]
        return {"seconds": time.perf_counter() - began, "targets": float(sum(map(len, found)))}

    def _units(self, step: Sequence[MicroBatch]) -> float:
        """What the loss of a step is a mean over: targets, or pairs."""
        sft = self.task.objective == "sft"
        return float(sum(len(batch.targets if sft else batch.pairs) for batch in step))

    def _loss(self, batch: MicroBatch, reference: Tensor | None) -> Tensor:
        """The sum over the targets, or over the pairs, of a micro-batch."""
        import torch

        if reference is None:
            return token_losses(self.model, batch, "sum")
        sums = sums_of(batch, -token_losses(self.model, batch, "none")) - reference
        chosen, rejected = torch.tensor(batch.pairs, device=sums.device).T
        return -torch.nn.functional.logsigmoid(BETA * (sums[chosen] - sums[rejected])).sum()

    def _reference_sums(self, step: Sequence[MicroBatch]) -> list[Tensor | None]:
        """The reference's summed log-probs [segments] of each micro-batch; None for SFT."""
        import torch

        if self.task.objective == "sft":
            return [None] * len(step)
        with torch.no_grad():
            return [sums_of(batch, -token_losses(self.reference, batch, "none")) for batch in step]


def load_backbone(path: Path, device: str):
    """The model with the attention that keeps the segments of a packed row apart."""
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl.models import register_attention

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=register_attention()
    ).to(device)


def token_losses(model, batch: MicroBatch, reduction: str) -> Tensor:
    """The negative log-likelihood of the targets: [N], or their sum."""
    from torch.nn.functional import cross_entropy

    hidden = model.model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        segments=batch.segments,
    ).last_hidden_state
    batch.segments.attended.clear()
    logits = model.lm_head(hidden[0, batch.select])
    return cross_entropy(logits, batch.targets, reduction=reduction)


def sums_of(batch: MicroBatch, values: Tensor) -> Tensor:
    """The sums [segments] of the values [N] of each segment's targets."""
    return values.new_zeros(len(batch.order)).index_add(0, batch.sequence, values)


def packed_rows(table: pa.Table, task: Task) -> list[MicroBatch]:
    """The micro-batches of a step, packed as the learner packs them."""
    from asyncrl.learning import pack
    from asyncrl.models import micro_batch, packing_units

    examples = examples_of(table, task.objective)
    lengths = [len(example.tokens) for example in examples]
    plan = pack(lengths, task.cap, units=packing_units(examples))
    return [micro_batch(examples, indices, task.device) for indices in plan.micro_batches[0]]


def examples_of(table: pa.Table, objective: str) -> list[Example]:
    """Each row, or each side of each pair, as an example."""
    from dataclasses import replace

    from asyncrl.learning import examples_with, pairs_of

    if objective == "sft":
        return examples_with(table, "input_ids", "loss_mask")
    return [
        replace(side, unit=unit)
        for unit, pair in enumerate(pairs_of(table, reference=False, behavior=False))
        for side in pair
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
