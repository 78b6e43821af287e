"""A Ray cluster of two logical CPUs, a small model, recorded groups, and learner groups of one and two ranks shared by the tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from asyncrl.config import Config
from asyncrl.control.protocols import Scored
from asyncrl.types import Completion, Group, Prompt, Trajectory, VersionSpan, groups_to_table

VOCABULARY = 50


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local Ray of two logical CPUs, unless the session already has one."""
    started = not ray.is_initialized()
    if started:
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    if started:
        ray.shutdown()


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[[Awaitable[Any]], Any]]:
    """Run a coroutine on one event loop for all tests: the group's lock belongs to it."""
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen3 of 2 layers with a tokenizer of single characters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("tiny_qwen3")
    vocabulary = {chr(33 + index): index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="#", pad_token="!").save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def learner_config(model_path: Path, world_size: int = 1, max_tokens: int = 128, **learner: Any) -> Config:
    """A config for `model_path`; everything but the learner's part is filler."""
    tree: dict[str, Any] = {
        "name": "learner-test",
        "max_steps": 10,
        "placement_timeout_s": 60,
        "model": {"path": str(model_path)},
        "data": {"train": "none.parquet", "max_prompt_length": 32},
        "rollout": {"max_completion_length": 32},
        "reward": {"functions": {"none": {"function": "none:none"}}},
        "weights": {"bucket_bytes": 20_000},
        "learner": {"world_size": world_size, "max_tokens_per_gpu": max_tokens, "learning_rate": 1e-2, "num_cpus": 0.25, **learner},
    }
    return Config.model_validate(tree)


def recorded_group(ordinal: int, trajectories: int = 4, poison: bool = False) -> Group:
    """A scored group of random tokens and log-probs near those of a wide-open policy; one trajectory is masked by status."""
    generator = np.random.default_rng(ordinal)
    prompt = Prompt(ordinal, 0, "p", tuple(int(token) for token in generator.integers(3, VOCABULARY, 2 + ordinal % 5)))
    members = []
    for index in range(trajectories):
        length = int(generator.integers(1, 20))
        ids = tuple(int(token) for token in generator.integers(3, VOCABULARY, length))
        logprobs = tuple(float(value) for value in -4 + 0.3 * generator.standard_normal(length))
        if poison and index == 0:
            logprobs = (float("nan"), *logprobs[1:])
        mask = tuple(int(at % 7 != 3) for at in range(length))
        completion = Completion(ids, logprobs, (VersionSpan(0, 0, length),), "stop")
        usable = index != 3
        members.append(Trajectory(completion, mask, 1.0, {}, float(generator.standard_normal()) if usable else None, "ok" if usable else "over_long"))
    return Group(1, prompt, tuple(members), "replica", 0.0, 1.0, 2.0)


def scored(group: Group) -> Scored:
    """The group as the learner gets it: its row in the object store."""
    return Scored(group.ordinal, 0, ray.put(groups_to_table([group])), 10, (1.0,), {}, 3, 0)


def recorded_batch(step: int, groups: int = 8, poison: bool = False) -> list[Scored]:
    return [scored(recorded_group(step * groups + number, poison=poison and number == 0)) for number in range(groups)]
