"""Evaluation asks for what the config allows each prompt."""

import asyncio

from asyncrl.config import Config
from asyncrl.evaluation import Evaluator
from asyncrl.testing import FakeGenerate
from asyncrl.types import Prompt


class Recording(FakeGenerate):
    def __init__(self):
        super().__init__()
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        return await super().generate(request)


async def score(prompts, completions):
    return {"exact": [1.0] * len(prompts)}


def test_a_completion_ends_at_max_length_with_its_prompt():
    config = Config.model_validate(
        {
            "name": "evaluation",
            "max_steps": 1,
            "model": {"path": "unused"},
            "data": {"train": "unused", "max_prompt_length": 6, "max_length": 9},
            "rollout": {"max_completion_length": 5},
            "reward": {"functions": {"exact": {"function": "asyncrl.rewards.builtin:exact_match"}}},
        }
    )
    generate = Recording()
    prompts = [Prompt(0, 0, "p", (1,) * 2), Prompt(1, 0, "p", (1,) * 6)]
    metrics = asyncio.run(Evaluator(config, generate, score, prompts, "run", 1)(0))
    assert sorted((len(request.prompt_ids), request.max_tokens, request.temperature) for request in generate.requests) == [
        (2, 5, 0.0),
        (2, 5, 1.0),
        (6, 3, 0.0),
        (6, 3, 1.0),
    ]
    assert (metrics["eval/prompts"], metrics["eval/greedy_accuracy"], metrics["eval/sampled_accuracy"]) == (2.0, 1.0, 1.0)
