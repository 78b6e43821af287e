"""A small model, recorded groups, and one event loop for all tests of the learner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import Nodes
from recorded import VOCABULARY


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[[Awaitable[Any]], Any]]:
    """Run a coroutine on one event loop for all tests, because the group's lock belongs to it."""
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


@pytest.fixture
def make_nodes(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    """`make_nodes(cable=False)`: a Ray cluster of nodes that the test starts. They end with the
    test."""
    made: list[Nodes] = []

    def make(cable: bool = False) -> Nodes:
        made.append(Nodes(tmp_path, cable))
        return made[-1]

    yield make
    for nodes in made:
        nodes.end()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen3 with 2 layers and a tokenizer of single characters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("tiny_qwen3")
    vocabulary = {chr(33 + index): index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="#", pad_token="!"
    ).save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path
