"""Exports a checkpoint as a Hugging Face directory, in one process without Ray or an engine."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from asyncrl.config import Config, ConfigError, OfflineConfig, RunSettings, load_any
from asyncrl.contracts.errors import NoCheckpointError, UnreadableCheckpointError
from asyncrl.learning.engine.adapter import DIRECTORY, write_adapter
from asyncrl.learning.engine.checkpoint import TAG
from asyncrl.learning.engine.hf_directory import HfDirectory
from asyncrl.models.adapters import (
    add_squares,
    low_rank,
    merged,
    published_name,
    with_factors,
)
from asyncrl.rundir.checkpoint import CheckpointStore
from asyncrl.rundir.resume import frozen_hashes
from asyncrl.runtime.redact import print_shown
from asyncrl.text.stops import Stops, load_stops
from asyncrl.text.tokenizer import load_tokenizer
from asyncrl.weights.classifier import SCORE, classifier_table
from asyncrl.weights.gather import fill_buckets
from asyncrl.weights.pieces import Piece
from asyncrl.weights.published import PublishedTensor, version_table

PREFIX = "model."
"""Prefix of the model's parameters in the learner's module, which may also have a value head."""
HEAD = "value_head.weight"
"""The score of a reward model in the learner's module."""


def find_checkpoint(checkpoints: Path, step: int | None) -> Path:
    """Find a committed checkpoint whose files all match its manifest. Prints which checkpoints were
    passed over.

    Args:
        checkpoints: directory of a run's checkpoints.
        step: policy version of the checkpoint; None for the newest.

    Raises:
        ConfigError: there is no such checkpoint, or it is damaged.
    """
    try:
        path, _, passed_over = CheckpointStore(checkpoints, keep=1).find(step)
    except (NoCheckpointError, UnreadableCheckpointError) as error:
        raise ConfigError(str(error).replace("; start with --resume never or auto", "")) from None
    for reason in passed_over:
        print_shown(f"passed over: {reason}")
    return path


def export_checkpoint(path: Path, target: Path) -> None:
    """Write the weights of a checkpoint from `find_checkpoint` as a Hugging Face directory, under
    the names of the model that the run began from. An adapter is merged into that model's weights,
    and written to the folder `adapter` too.

    The whole model is in memory once, in float32. The learner's shards are pickles, so only export
    checkpoints whose author you trust.

    Raises:
        ConfigError: the model's config is missing or does not fit, or `target` exists.
    """
    if target.exists():
        raise ConfigError(f"{target} exists; name another directory with --out")
    target.parent.mkdir(parents=True, exist_ok=True)
    config = load_any(path / "config.yaml")
    try:
        table = version_table(config.model.path)
        if config.trains_reward_model:
            table = classifier_table(config.model.path, table)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"model.path = {config.model.path!r}, which the run began from, cannot be read"
            f" ({reason}); restore it"
        ) from None
    stops = _stops(config)
    lora = config.lora
    weights, matrices = _trained(path, config)
    adapters = {} if lora is None else low_rank(lora, matrices)
    parameters = {name: weights[name].reshape(-1) for name in table.parameters if name in weights}
    unmatched = next(
        (
            name
            for name, shape in table.parameters.items()
            if name not in parameters or parameters[name].numel() != math.prod(shape)
        ),
        None,
    )
    if unmatched:
        raise ConfigError(
            f"{path} does not fit model.path = {config.model.path!r}: {unmatched} is missing or has"
            " another size; restore the model that the run began from"
        )
    squares: dict[str, torch.Tensor] = {}
    for name, values in parameters.items():
        add_squares(adapters, squares, name, 0, values)
    adapters = with_factors(adapters, squares)
    temporary = target.with_name(f".{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    directory = HfDirectory(temporary, table, config.model.dtype, config.bucket_bytes)

    def parts_of(tensor: PublishedTensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        for piece in tensor.pieces:
            values = parameters[piece.parameter][piece.start : piece.start + piece.span]
            yield piece, merged(adapters, piece.parameter, piece.start, values)

    fill_buckets(table, directory.entries, directory.sizes, parts_of, directory.write)
    directory.finish(config.model.path, config.model.path, stops)
    if lora is not None and not config.trains_reward_model:
        write_adapter(temporary / DIRECTORY, lora, matrices, config.model.path, stops)
    os.replace(temporary, target)


def _stops(config: Config | OfflineConfig) -> Stops:
    """What ended the completions of the run, or those that its rows have. Raises ConfigError."""
    own: tuple[Sequence[str], Sequence[int]] = ((), ())
    if isinstance(config, Config):
        own = config.rollout.rollout_stop, config.rollout.rollout_stop_token_ids
    model, variables = config.model.path, config.data.chat_template_kwargs
    try:
        return load_stops(model, load_tokenizer(model), *own, variables)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _trained(
    path: Path, config: RunSettings
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The model's weights in float32 by their names in transformers, and the adapter's matrices in
    model.dtype by their published names. With an adapter, the weights are those of model.path.

    Raises:
        ConfigError: the weights of model.path have changed since the checkpoint.
    """
    if config.lora is not None:
        _refuse_another_base(path, config)
    trained = get_fp32_state_dict_from_zero_checkpoint(
        str(path / "learner"), tag=TAG, exclude_frozen_parameters=config.lora is not None
    )
    weights = {
        name.removeprefix(PREFIX): tensor.contiguous()
        for name, tensor in trained.items()
        if name.startswith(PREFIX)
    }
    score = {SCORE: trained[HEAD].contiguous()} if config.trains_reward_model else {}
    if config.lora is None:
        return weights | score, {}
    matrices = {
        published: tensor.to(getattr(torch, config.model.dtype))
        for name, tensor in weights.items()
        if (published := published_name(name))
    }
    return _own_weights(config.model.path) | score, matrices


def _refuse_another_base(path: Path, config: RunSettings) -> None:
    """Raise ConfigError if the weights of model.path have changed since the checkpoint."""
    _, state, _ = CheckpointStore(path.parent, keep=1).find(int(path.name.rpartition("_")[2]))
    name = "model.path"
    if state.frozen_hashes.get(name) != frozen_hashes(config).get(name):
        raise ConfigError(
            f"model.path = {config.model.path!r} has other weights than when {path} was written,"
            " and the adapter belongs to those; restore it"
        )


def _own_weights(model_path: str) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint in float32, by their names in transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
