"""The files of an exported model: its stops, and the permissions of what others read."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from asyncrl.config import LoraConfig
from asyncrl.contracts.adapters import PREFIX
from asyncrl.learning.engine.adapter import write_adapter
from asyncrl.learning.engine.hf_directory import HfDirectory
from asyncrl.text.stops import load_stops
from asyncrl.text.tokenizer import load_tokenizer
from asyncrl.weights.published import version_table


@pytest.fixture
def base(llama_model: Path, tmp_path: Path) -> Path:
    """A base model with a chat template, whose files name EOS only and are private."""
    path = Path(shutil.copytree(llama_model, tmp_path / "base"))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1}))
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    for file in path.rglob("*.j*"):
        file.chmod(0o600)
    return path


@pytest.mark.parametrize("umask", [0o002, 0o027])
def test_an_export_names_its_stops_and_follows_the_umask(
    base: Path, tmp_path: Path, umask: int
) -> None:
    tokenizer = load_tokenizer(str(base))
    stops, lora = load_stops(base, tokenizer, ["<|user|>"]), LoraConfig(r=2)
    layer = f"{PREFIX}model.layers.0.self_attn.q_proj"
    matrices = {f"{layer}.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    before = os.umask(umask)
    try:
        target = tmp_path / "hf"
        target.mkdir()
        directory = HfDirectory(target, version_table(base), "float32", 1 << 16)
        for number, size in enumerate(directory.sizes):
            directory.write(number, np.zeros(size, np.uint8))
        directory.finish(base, str(base), stops)
        write_adapter(target / "adapter", lora, matrices, str(base), stops)
    finally:
        os.umask(before)
    AutoModelForCausalLM.from_pretrained(target)
    ends = sorted([2, *tokenizer.convert_tokens_to_ids(["<|end|>", "<|user|>"])])
    for folder in (target, target / "adapter"):
        written = GenerationConfig.from_pretrained(folder)
        assert written.eos_token_id == ends and written.bos_token_id == 1
    for path in [target, *target.rglob("*")]:
        wanted = (0o777 if path.is_dir() else 0o666) & ~umask
        assert (path.name, stat.S_IMODE(path.stat().st_mode)) == (path.name, wanted)
