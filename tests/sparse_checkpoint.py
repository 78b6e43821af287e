"""Checkpoints with the shapes of large models. Their weights are holes in sparse files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

QWEN3_SHAPES: dict[str, dict[str, Any]] = {
    "2 B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "heads": 16},
    "4 B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "heads": 32},
    "8 B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "heads": 32},
    "14 B": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "heads": 40},
}
"""Sizes of Qwen3-1.7B, 4B, 8B and 14B, as their config.json files publish them."""


def save_sparse(directory: Path, shape: str, tokenizer: Path) -> Path:
    """Write a Qwen3 checkpoint of this shape in bfloat16, with the tokenizer of another one."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    sizes = dict(QWEN3_SHAPES[shape])
    config = Qwen3Config(
        vocab_size=151_936,
        num_attention_heads=sizes.pop("heads"),
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=shape in ("2 B", "4 B"),
        architectures=["Qwen3ForCausalLM"],
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
        **sizes,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        if name not in tied:
            begin, end = end, end + 2 * tensor.numel()
            offsets = [begin, end]
            shape_of = list(tensor.shape)
            header[name] = {"dtype": "BF16", "shape": shape_of, "data_offsets": offsets}
    text = json.dumps(header).encode()
    directory.mkdir(parents=True)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config.save_pretrained(directory)
    GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0).save_pretrained(directory)
    for file_name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / file_name, directory)
    return directory
