"""The turns of recorded sessions, read without asyncrl's own code, and checks of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class SampledTurn(NamedTuple):
    trajectory: int
    before: list[int]
    """All tokens before it."""
    ids: list[int]
    logprobs: list[float]
    versions: set[int]


def sampled_turns(row: dict[str, Any]) -> list[SampledTurn]:
    """The turns of a group's row, in order."""
    begins = [0] * len(row["completion_ids"])
    whole: list[list[int]] = []
    found = []
    for number, trajectory in enumerate(row["turn_trajectory"]):
        begin, count = begins[trajectory], row["turn_tokens"][number]
        own = slice(begin, begin + count)
        begins[trajectory] += count
        parent = row["turn_parent"][number]
        before = [*(whole[parent] if parent >= 0 else []), *row["turn_context"][number]]
        ids = row["completion_ids"][trajectory][own]
        versions = {
            span["version"]
            for span in row["versions"][trajectory]
            if span["start"] < own.stop and span["end"] > own.start
        }
        logprobs = row["logprobs"][trajectory][own]
        found.append(SampledTurn(trajectory, before, ids, logprobs, versions))
        whole.append([*before, *ids])
    return found


def worst_difference(model_path: Path, turns: Sequence[SampledTurn]) -> float:
    """Largest difference between a token's log-prob and that of transformers, in nats."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    worst = 0.0
    for turn in turns:
        with torch.no_grad():
            logits = model(torch.tensor([[*turn.before, *turn.ids]])).logits[0]
        known = logits[len(turn.before) - 1 : -1].log_softmax(-1)
        known = known.gather(-1, torch.tensor(turn.ids)[:, None])[:, 0]
        worst = max(worst, float((known - torch.tensor(turn.logprobs)).abs().max()))
    return worst
