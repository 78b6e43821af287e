"""A Hugging Face directory from a checkpoint, without the run: no Ray, no engine, one process."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config import ConfigError, load_config
from asyncrl.control.checkpoint import Checkpoints, NoCheckpoint, UnreadableCheckpoint
from asyncrl.learning.checkpoint import TAG
from asyncrl.redact import print_shown
from asyncrl.text.tokenizer import save_tokenizer
from asyncrl.weights.gather import TORCH_DTYPES

__all__ = ["export_checkpoint", "find_checkpoint"]

PREFIX = "model."
"""Of the model's parameters in the learner's module, which may have a value head beside the model."""


def find_checkpoint(checkpoints: Path, step: int | None) -> Path:
    """A committed checkpoint, every file of it checked against the manifest; prints what was passed over.

    Args:
        checkpoints: directory of a run's checkpoints.
        step: which one; None = the newest.

    Raises:
        ConfigError: there is no such checkpoint, or it is damaged.
    """
    try:
        path, _, passed_over = Checkpoints(checkpoints, keep=1).find(step)
    except (NoCheckpoint, UnreadableCheckpoint) as error:
        raise ConfigError(str(error).replace("; start with --resume never or auto", "")) from None
    for reason in passed_over:
        print_shown(f"passed over: {reason}")
    return path


def export_checkpoint(path: Path, target: Path) -> None:
    """Write the weights of a checkpoint that `find_checkpoint` found as a Hugging Face directory. The whole model is in memory once, in float32. The
    learner's shards are pickles: whoever exports a checkpoint trusts whoever wrote it.

    Raises:
        ConfigError: the model's config is gone or does not fit, or something is at `target` already.
    """
    if target.exists():
        raise ConfigError(f"{target} exists; name another directory with --out")
    target.parent.mkdir(parents=True, exist_ok=True)
    config = load_config(path / "config.yaml")
    try:
        shape = AutoConfig.from_pretrained(config.model.path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {config.model.path!r}, which the run began from, cannot be read ({str(error).splitlines()[0]}); put it back") from None
    weights = get_fp32_state_dict_from_zero_checkpoint(str(path / "learner"), tag=TAG)
    dtype = TORCH_DTYPES[config.model.dtype]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, trust_remote_code=False)
    own = {name.removeprefix(PREFIX): value.to(dtype) for name, value in weights.items() if name.startswith(PREFIX)}
    missing, unknown = model.load_state_dict(own, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name in missing if name not in model.all_tied_weights_keys]
    if missing or unknown:
        raise ConfigError(f"{path} does not fit model.path = {config.model.path!r}: {(missing or unknown)[0]} has no counterpart; put the model back as it was")
    temporary = target.with_name(f".{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    save_tokenizer(config.model.path, temporary)
    os.replace(temporary, target)
