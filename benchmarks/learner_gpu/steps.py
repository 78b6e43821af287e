"""Training steps of the learner, of asyncrl's policy, and of a plain loop."""

import argparse
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from asyncrl.algorithms import supervised_loss, token_weights
from asyncrl.config import LearnerConfig
from asyncrl.learning import pack
from asyncrl.models import (
    checkpoint_activations,
    head_settings,
    load_policy,
    micro_batch,
    token_example,
)
from asyncrl.weights import bucket_checksum, gather_buckets, weight_layout
from benchmarks.learner import PROMPT, SEED, token_table
from benchmarks.learner_gpu.device import allocated, peak, reset_peak, wait
from benchmarks.learner_gpu.models import (
    MODELS,
    Row,
    cap,
    flops_per_token,
    learner_rank,
    random_row,
    seeded_rows,
)

if TYPE_CHECKING:
    from asyncrl.learning import LearnerRank

STEPS = 3
"""Timed steps after a warm-up step. The fastest one counts."""

Step = Callable[[list[Row]], float]
"""Trains on these rows, and returns the loss."""
More = Callable[[], Mapping[str, float]]
"""What else is known after the steps."""


def step(options: argparse.Namespace, variant: str, path: str) -> dict[str, float]:
    """One variant's fastest step."""
    kind, _, checkpointed = variant.partition("/")
    rows = seeded_rows(options)
    train, more = KINDS[kind](options, path, bool(checkpointed))
    train(rows)
    wait(options.device)
    reset_peak(options.device)
    seconds, loss = [], 0.0
    for _ in range(STEPS):
        began = time.perf_counter()
        loss = train(rows)
        wait(options.device)
        seconds.append(time.perf_counter() - began)
    return {
        "tokens_per_s": options.rows * options.length / min(seconds),
        "step_s": min(seconds),
        "loss": loss,
        "peak": float(peak(options.device)),
        "flops_per_token": flops_per_token(options),
        "rows_per_pass": float(options.rows_per_pass),
        **more(),
    }


def plain(options: argparse.Namespace, path: str, checkpointed: bool) -> tuple[Step, More]:
    """transformers and torch alone: no padding, no mask, full logits, bfloat16 weights."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(options.device)
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = adamw(model)
    used = {"rows_per_pass": float(options.rows_per_pass)}

    def passes(rows: list[Row], each: int) -> float:
        targets = sum(len(following) for _, following in rows)
        losses = []
        for at in range(0, len(rows), each):
            loss = plain_loss(model, rows[at : at + each], options.device) / targets
            loss.backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())

    def train(rows: list[Row]) -> float:
        try:
            total = passes(rows, int(used["rows_per_pass"]))
        except torch.OutOfMemoryError:
            if used["rows_per_pass"] < 2:
                raise
            optimizer.zero_grad()
            torch.cuda.empty_cache()
            used["rows_per_pass"] //= 2
            return train(rows)
        update(model, optimizer)
        return total

    return train, lambda: used


def plain_loss(model: nn.Module, rows: list[Row], device: str) -> Tensor:
    """The summed loss of rows of one length."""
    ids = torch.tensor([[*prompt, *following] for prompt, following in rows]).to(device)
    labels = ids[:, 1:].clone()
    labels[:, : PROMPT - 1] = -100
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def packed(options: argparse.Namespace, path: str, checkpointed: bool) -> tuple[Step, More]:
    """asyncrl's policy and packing in a plain loop."""
    head = head_settings(LearnerConfig(device=options.device))
    policy = load_policy(path, torch.bfloat16, 1.0, head=head).to(options.device)
    if checkpointed:
        checkpoint_activations(policy)
    optimizer = adamw(policy)

    def train(rows: list[Row]) -> float:
        examples = [token_example(row) for row in rows]
        weights = token_weights([example.loss_tokens for example in examples], "token_mean", 1)
        packs = pack([len(example.tokens) for example in examples], cap(options))
        losses = []
        for indices in packs.micro_batches[0]:
            batch = micro_batch(examples, indices, options.device, weights)
            loss, _ = supervised_loss(policy(batch)[0], batch.weights)
            loss.backward()
            losses.append(loss.detach())
        update(policy, optimizer)
        return float(torch.stack(losses).sum())

    return train, dict


def learner(options: argparse.Namespace, path: str, checkpointed: bool) -> tuple[Step, More]:
    """The learner's rank; afterwards a gathered version, and a turn off the GPU and back."""
    rank = learner_rank(options, path, checkpointed)

    def train(rows: list[Row]) -> float:
        return rank.supervised_step(token_table(rows))["loss"]

    def more() -> dict[str, float]:
        return {} if checkpointed else turned(rank, options) | gathered(rank)

    return train, more


KINDS = {"plain": plain, "packed": packed, "learner": learner}


def gathered(rank: "LearnerRank") -> dict[str, float]:
    """Seconds and bytes of a gathered version."""
    state = rank.state
    entries, sizes = weight_layout(state.table, "bfloat16", state.spec.bucket_bytes)

    def gather(checked: bool) -> float:
        def sink(number: int, content: np.ndarray) -> None:
            if checked:
                bucket_checksum(content.data)

        began = time.perf_counter()
        gather_buckets(state.parameters, state.table, entries, sizes, 0, sink)
        return time.perf_counter() - began

    gather(False)
    return {
        "version_bytes": float(sum(sizes)),
        "gather_s": min(gather(False) for _ in range(2)),
        "gather_and_checksum_s": min(gather(True) for _ in range(2)),
    }


def turned(rank: "LearnerRank", options: argparse.Namespace) -> dict[str, float]:
    """Seconds and bytes of a turn, and what it changed."""
    from asyncrl.learning import DeviceShifts

    states = allocated(options.device)
    row = random_row(np.random.default_rng(SEED), options.length, MODELS[options.model][6])
    before = rank.logprobs([row])[0]
    turns = DeviceShifts(rank.state.engine, options.device, 1.0, 0.1)
    full = allocated(options.device)
    for _ in range(2):  # the first one allocates the memory of the host
        began = time.perf_counter()
        turns.leave()
        left, freed = time.perf_counter(), full - allocated(options.device)
        turns.take()
        wait(options.device)
        taken = time.perf_counter()
    after = rank.logprobs([row])[0]
    found = {
        "states": float(states),
        "turn_leave_s": left - began,
        "turn_take_s": taken - left,
        "turn_freed": float(freed),
        "turn_changed_nats": float(np.abs(after - before).max()),
    }
    assert np.isfinite(list(found.values())).all()
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=1e-9, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
