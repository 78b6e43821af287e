"""Evaluation: greedy and sampled accuracy on held-out prompts, at one committed version."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from asyncrl.config import Config
from asyncrl.generation.protocol import Generate, GenerateRequest, WeightsId
from asyncrl.types import TRUNCATED, Completion, Prompt

__all__ = ["Evaluator"]

CONCURRENCY = 128
"""Requests under way at once."""


class Evaluator:
    """Completes every prompt once greedily and once sampled, and scores both by the isolated reward."""

    def __init__(self, config: Config, generate: Generate, score: Any, prompts: Sequence[Prompt], run_id: str, attempt: int) -> None:
        self.config, self.generate, self.score = config, generate, score
        self.prompts, self.run_id, self.attempt = prompts, run_id, attempt

    async def __call__(self, version: int) -> dict[str, float]:
        """Metrics `eval/greedy_*` and `eval/sampled_*`: accuracy, mean of every reward part, completion tokens, truncated ratio.

        Raises:
            RuntimeError: a completion was not made by `version` alone.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        metrics: dict[str, float] = {"eval/prompts": float(len(self.prompts))}
        for name, temperature in (("greedy", 0.0), ("sampled", self.config.rollout.temperature)):
            completions = await self._complete(temperature, version)
            metrics |= {f"eval/{name}_{key}": value for key, value in (await self._measure(completions)).items()}
        metrics["eval/seconds"] = clock() - started
        return metrics

    async def _complete(self, temperature: float, version: int) -> list[Completion]:
        room = asyncio.Semaphore(CONCURRENCY)

        async def one(index: int, prompt: Prompt) -> Completion:
            request = GenerateRequest(
                prompt.token_ids,
                n=1,
                max_tokens=self.config.completion_room(len(prompt.token_ids)),
                temperature=temperature,
                seed=self.config.seed + index,
                deadline_s=self.config.rollout.deadline_s,
                min_weights=WeightsId(self.run_id, self.attempt, version),
            )
            async with room:
                completion = (await self.generate.generate(request)).completions[0]
            if any(span.version != version for span in completion.versions):
                raise RuntimeError(f"evaluation at version {version} got a completion of versions {completion.versions}")
            return completion

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index, prompt)) for index, prompt in enumerate(self.prompts)]
        return [task.result() for task in tasks]

    async def _measure(self, completions: Sequence[Completion]) -> dict[str, float]:
        parts = await self.score(self.prompts, completions)
        count = len(completions)
        means = {name: sum(value or 0.0 for value in values) / count for name, values in parts.items()}
        return {
            "accuracy": means[self.config.accuracy],
            **means,
            "completion_tokens": sum(len(completion.token_ids) for completion in completions) / count,
            "truncated_ratio": sum(completion.finish_reason in TRUNCATED for completion in completions) / count,
        }
