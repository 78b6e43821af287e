"""What all parts measure: seeded random models and rows, and the learner's rank."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.config import Config
from asyncrl.preflight import learner_spec
from benchmarks.learner import PROMPT, SEED

if TYPE_CHECKING:
    from asyncrl.learning import LearnerRank

MODELS = {
    "tiny": (64, 128, 2, 4, 2, 16, 512),
    "qwen3_0.6b": (1024, 3072, 28, 16, 8, 128, 151_936),
    "qwen3_1.7b": (2048, 6144, 28, 16, 8, 128, 151_936),
}
"""Width, width of the MLP, layers, heads, heads of keys, width of a head, vocabulary."""

Row = tuple[list[int], list[int]]
"""Prompt ids, following ids."""


def save_model(name: str, folder: str, **changes: float) -> str:
    """Save a seeded random Qwen3 in bfloat16, and return its path."""
    path = Path(folder) / name
    if path.exists():
        return str(path)
    hidden, mlp, layers, heads, kv_heads, width, vocabulary = MODELS[name]
    config = Qwen3Config(
        **{
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": width,
            "vocab_size": vocabulary,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }
        | changes
    )
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.cpu().save_pretrained(path)
    return str(path)


def flops_per_token(options: argparse.Namespace) -> float:
    """Forward and backward FLOP of a token: 6 for each weight of a matrix, and causal attention."""
    hidden, mlp, layers, heads, kv_heads, width, vocabulary = MODELS[options.model]
    weights = layers * (2 * hidden * width * (heads + kv_heads) + 3 * hidden * mlp)
    attended = options.length / 2
    return 6 * (weights + hidden * vocabulary) + 12 * layers * heads * width * attended


def seeded_rows(options: argparse.Namespace) -> list[Row]:
    """The rows of a step."""
    generator = np.random.default_rng(SEED)
    vocabulary = MODELS[options.model][6]
    return [random_row(generator, options.length + 1, vocabulary) for _ in range(options.rows)]


def random_row(generator: np.random.Generator, length: int, vocabulary: int) -> Row:
    row = generator.integers(0, vocabulary, length).tolist()
    return row[:PROMPT], row[PROMPT:]


def cap(options: argparse.Namespace) -> int:
    """Most tokens of a pass."""
    return options.rows_per_pass * (options.length + 1)


def config(options: argparse.Namespace, path: str, checkpointed: bool) -> Config:
    """The settings of a run whose learner trains this model."""
    tree = {
        "name": "bench",
        "max_steps": 1000,
        "model": {"path": path, "dtype": "bfloat16"},
        "data": {"train": "none", "max_prompt_length": PROMPT},
        "rollout": {"max_completion_length": options.length + 1 - PROMPT},
        "reward": {"functions": {"none": {"function": "none:none"}}},
        "learner": {
            "device": options.device,
            "bf16": True,
            "gradient_checkpointing": checkpointed,
            "learning_rate": 1e-9,
            "max_tokens_per_gpu": cap(options),
        },
    }
    return Config.model_validate(tree)


def learner_rank(options: argparse.Namespace, path: str, checkpointed: bool) -> "LearnerRank":
    """The only rank of that learner."""
    # DeepSpeed is imported here, because the estimate makes it choose the CPU.
    from asyncrl.learning import Meeting, start_rank

    spec = learner_spec(config(options, path, checkpointed))
    return start_rank(0, spec, "bench", 0, Meeting.at("127.0.0.1"), "127.0.0.1")[0]
