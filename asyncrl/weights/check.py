"""Compares generator and learner: log-probs of the same tokens at the same version, on probe
prompts (F1)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol, TypeAlias

import numpy as np

from asyncrl.contracts.messages import GenerateRequest, WeightsId
from asyncrl.contracts.offline_rows import TokenRow
from asyncrl.contracts.protocols import Generate

RowLogprobs: TypeAlias = "Sequence[float] | np.ndarray"
"""Log-probs [C] of a row's completion ids."""


class LearnerLogprobs(Protocol):
    """What the check needs from the learner: log-probs of each row's completion ids, one array for
    each row."""

    async def logprobs(
        self, rows: Sequence[TokenRow], temperature: float = 1.0
    ) -> list[np.ndarray]: ...


class ProbeCheck:
    """Checks that learner and generators compute the same log-probs.

    At the first version, the generators sample the probes, and the learner scores the sampled
    tokens. At later versions, the learner and every replica score the same tokens.

    A probe is a prompt and `tokens` sampled tokens. Sampling ignores EOS: the check compares
    arithmetic, and the text does not matter.
    """

    def __init__(
        self,
        generate: Generate,
        learner: LearnerLogprobs,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        tolerance: float,
        statistic: Literal["max", "mean"],
        first: WeightsId,
        temperature: float = 1.0,
        explain: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        """
        Args:
            tolerance: largest allowed value of the statistic of the absolute differences, in nats,
                on every replica.
            first: the first version that `after_commit` is called with.
            temperature: sampling temperature of the rollouts. The probes are sampled and first
                compared at this temperature, and scored later at 1.
            explain: called when a replica exceeds the tolerance. Returns a clause that names the
                published tensor that differs most from the replica's.
        """
        self.generate, self.learner = generate, learner
        self.prompts, self.tokens, self.tolerance, self.statistic = (
            prompts,
            tokens,
            tolerance,
            statistic,
        )
        self.first, self.temperature, self.explain = first, temperature, explain
        self.probes: list[TokenRow] = []
        self._learner_side: Sequence[RowLogprobs] = []

    async def at_gather(self, version: int) -> None:
        """Score the probes with the learner. Does nothing at the first version: the probes do not
        exist until the generators have sampled them."""
        if self.probes:
            self._learner_side = await self.learner.logprobs(self.probes)

    async def after_commit(
        self, version: int, learner_shift: Callable[[], AbstractAsyncContextManager[None]]
    ) -> Mapping[str, float]:
        """Score the probes with the generators and compare. Returns the metrics of `compare`.

        At the first version the learner scores the probes here, within `learner_shift`.

        Raises:
            RuntimeError: a replica differs by more than the tolerance.
        """
        weights = WeightsId(self.first.run_id, self.first.attempt, version)
        if self.probes:
            generators_side: list[Sequence[RowLogprobs]] = list(
                (await self.generate.logprobs(self.probes, weights)).values()
            )
        else:
            generators_side = [await self._sample(weights)]
            async with learner_shift():
                self._learner_side = await self.learner.logprobs(self.probes, self.temperature)
        metrics = compare(self._learner_side, generators_side)
        difference = metrics[f"check/logprob_{self.statistic}_diff"]
        if not difference <= self.tolerance:
            how = {"max": "by up to", "mean": "on average by"}[self.statistic]
            raise RuntimeError(
                f"generator and learner log-probs differ {how} {difference:.2e} at version"
                f" {version}, above weights.logprob_tolerance = {self.tolerance:g}"
                f" ({metrics['check/tokens']:.0f} tokens compared): the two sides do not have the"
                f" same weights or do not compute the same model{await self._explanation()}"
            )
        return metrics

    async def _explanation(self) -> str:
        if self.explain is None:
            return ""
        try:
            return f"; {await self.explain()}"
        except Exception as error:
            # A failed explanation must not replace the failed check.
            return (
                f"; the tensors could not be compared ({type(error).__name__}:"
                f" {str(error).splitlines()[0] if str(error) else 'no message'})"
            )

    async def _sample(self, weights: WeightsId) -> list[tuple[float, ...]]:
        requests = [
            GenerateRequest(
                tuple(prompt),
                1,
                self.tokens,
                self.temperature,
                seed=seed,
                min_weights=weights,
                ignore_eos=True,
            )
            for seed, prompt in enumerate(self.prompts)
        ]
        generated = await asyncio.gather(*(self.generate.generate(request) for request in requests))
        completions = [group.completions[0] for group in generated]
        self.probes = [
            (request.prompt_ids, completion.token_ids)
            for request, completion in zip(requests, completions, strict=True)
        ]
        return [completion.logprobs for completion in completions]


def compare(
    learner: Sequence[RowLogprobs], generators: Sequence[Sequence[RowLogprobs]]
) -> dict[str, float]:
    """Largest and mean absolute difference in nats, each of the replica that differs most, and the
    number of tokens compared. NaN on either side counts as an infinite difference.

    Args:
        learner: log-probs of each row.
        generators: for each replica, log-probs of each row.
    """
    ours = np.concatenate([np.asarray(row, dtype=np.float64) for row in learner])
    theirs = np.stack(
        [np.concatenate([np.asarray(row, dtype=np.float64) for row in rows]) for rows in generators]
    )
    difference = np.nan_to_num(np.abs(ours - theirs), nan=np.inf)
    return {
        "check/logprob_max_diff": float(difference.max()),
        "check/logprob_mean_diff": float(difference.mean(axis=1).max()),
        "check/tokens": float(difference.size),
    }
