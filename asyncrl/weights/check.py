"""Generator against learner: log-probs of the same tokens at the same version, on probe prompts (F1)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from asyncrl.generation.protocol import Generate, GenerateRequest, WeightsId

__all__ = ["ProbeCheck", "compare"]

Row = tuple[Sequence[int], Sequence[int]]
"""Prompt ids and completion ids."""


class LearnerLogprobs(Protocol):
    """The learner's log-probs of each row's completion ids, one array for each row."""

    async def logprobs(self, rows: Sequence[Row]) -> list[Any]: ...


class ProbeCheck:
    """At the first version the generators sample the probes, and both sides compare what each gives them. Later the learner and every replica
    score the same tokens.

    A probe is a prompt and `tokens` sampled tokens, past EOS if need be: what is compared is arithmetic, not manners.
    """

    def __init__(self, generate: Generate, learner: LearnerLogprobs, prompts: Sequence[Sequence[int]], tokens: int, tolerance: float, first: WeightsId):
        self.generate, self.learner = generate, learner
        self.prompts, self.tokens, self.tolerance = prompts, tokens, tolerance
        self.first = first
        self.probes: list[Row] = []
        self._learner_side: list[Any] = []

    async def at_gather(self, version: int) -> None:
        """Learner's side of a later check. At the first version it waits until the generators have sampled the probes."""
        if self.probes:
            self._learner_side = await self.learner.logprobs(self.probes)

    async def after_commit(self, version: int) -> Mapping[str, float]:
        """Generators' side, and the comparison.

        Raises:
            RuntimeError: the largest difference is above the tolerance.
        """
        weights = WeightsId(self.first.run_id, self.first.attempt, version)
        if self.probes:
            generators_side: list[Sequence[Any]] = list((await self.generate.logprobs(self.probes, weights)).values())
        else:
            generators_side = [await self._sample(weights)]
            self._learner_side = await self.learner.logprobs(self.probes)
        metrics = compare(list(self._learner_side) * len(generators_side), [row for rows in generators_side for row in rows])
        largest = metrics["check/logprob_max_diff"]
        if not largest <= self.tolerance:
            raise RuntimeError(
                f"generator and learner log-probs differ by up to {largest:.2e} at version {version}, above logprob_tolerance = {self.tolerance:g} "
                f"({metrics['check/tokens']:.0f} tokens compared): the two sides do not hold the same weights or do not compute the same model"
            )
        return metrics

    async def _sample(self, weights: WeightsId) -> list[tuple[float, ...]]:
        requests = [
            GenerateRequest(tuple(prompt), 1, self.tokens, 1.0, seed=seed, min_weights=weights, ignore_eos=True) for seed, prompt in enumerate(self.prompts)
        ]
        generated = await asyncio.gather(*(self.generate.generate(request) for request in requests))
        completions = [one.completions[0] for one in generated]
        self.probes = [(request.prompt_ids, completion.token_ids) for request, completion in zip(requests, completions, strict=True)]
        return [completion.logprobs for completion in completions]


def compare(learner: Sequence[Any], generators: Sequence[Any]) -> dict[str, float]:
    """Largest and mean absolute difference in nats, and the number of tokens compared. NaN on either side counts as infinitely far."""
    ours = np.concatenate([np.asarray(row, dtype=np.float64) for row in learner])
    theirs = np.concatenate([np.asarray(row, dtype=np.float64) for row in generators])
    difference = np.nan_to_num(np.abs(ours - theirs), nan=np.inf)
    return {
        "check/logprob_max_diff": float(difference.max()),
        "check/logprob_mean_diff": float(difference.mean()),
        "check/tokens": float(len(difference)),
    }
