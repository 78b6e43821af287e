"""What a model can process: its longest sequence, and the tokens in a generator's KV cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from asyncrl.config import Config, ConfigError, RunSettings
from asyncrl.generation.model_checks import check_cache, check_files, kv_width, read_config_json
from asyncrl.generation.served import RUN, context_of, not_served, text_config
from asyncrl.models.supported import NO_SHARES, chosen_packing, uniform_rope_tokens

UNBOUNDED_CONTEXT = 1 << 30
"""Context of a model whose config.json has neither max_position_embeddings nor n_positions, in
tokens."""


def model_context(config: RunSettings, at: str | None = None, field: str = "model.path") -> int:
    """Longest sequence that the model accepts, in tokens. With LongRoPE, the range of its short
    frequencies.

    Args:
        at: checkpoint directory. Default: model.path.
        field: setting that names it, for messages.

    Raises:
        ConfigError: the checkpoint cannot be read, the learner or the generators do not support it,
            or a trajectory could be longer than its context.
    """
    path = Path(at or config.model.path)
    tree = check_files(path, field)
    try:
        packing = chosen_packing(tree, config.learner.packing)
    except ValueError as error:
        raise ConfigError(f"{field} = {str(path)!r}: {error}") from None
    if at is None and isinstance(config, Config) and (reason := refusal(tree, config)):
        raise ConfigError(
            f"{field} = {str(path)!r} (model_type {tree.get('model_type')!r}): {reason}"
        )
    if packing == "none" and at is None and config.learner.sequence_parallel_size > 1:
        raise ConfigError(
            f"{field} = {str(path)!r}:"
            f" {NO_SHARES.format(size=config.learner.sequence_parallel_size)}"
        )
    context = context_of(tree) or UNBOUNDED_CONTEXT
    if config.longest_trajectory > context:
        raise ConfigError(
            f"{config.longest_text} tokens is above the model's context of {context}; lower it, or"
            " set a lower data.max_length"
        )
    uniform = uniform_rope_tokens(tree) or context
    if config.longest_trajectory > uniform:
        raise ConfigError(
            f"{config.longest_text} tokens is above original_max_position_embeddings = {uniform} of"
            f" {field} = {str(path)!r}. Above that, its LongRoPE changes the frequencies of every"
            " trajectory in the packed row; lower it, or set a lower data.max_length"
        )
    return min(context, uniform)


def refusal(tree: Mapping[str, object], config: Config) -> str | None:
    """Why the generators of a run would not agree with its learner, with a fix, in one sentence.
    None: no known problem.

    Args:
        tree: the model's config.json.
    """
    learner = config.learner
    if text_config(tree).get("model_type") == "mamba2" and learner.bf16 and learner.device == "cpu":
        return (
            "transformers mixes float32 and bfloat16 in its recurrent layers on CPU; set"
            " learner.bf16: false"
        )
    return not_served(
        tree, config.engines.device, config.model.dtype, config.longest_trajectory, RUN
    )


def model_vocabulary(config: RunSettings) -> int | None:
    """Token ids of the model, which may be more than its tokenizer's. None if config.json has no
    vocab_size.

    Raises:
        ConfigError: config.json cannot be read.
    """
    return vocabulary_at(Path(config.model.path), "model.path")


def vocabulary_at(path: Path, field: str) -> int | None:
    """`model_vocabulary` of the checkpoint that the setting `field` names.

    Raises:
        ConfigError: config.json cannot be read.
    """
    size = text_config(read_config_json(path, field)).get("vocab_size")
    return size if isinstance(size, int) else None


def kv_bytes_per_token(config: Config) -> int | None:
    """`asyncrl.generation.model_checks.kv_width` of the run's model in its generators."""
    tree = json.loads((Path(config.model.path) / "config.json").read_text())
    return kv_width(tree, config.model.dtype, config.engines.tensor_parallel_size)


def check_kv_cache(config: Config, context: int) -> None:
    """Refuse a KV cache of the run's own generators that is too small for the longest request."""
    if config.owns_generators:
        tree = json.loads((Path(config.model.path) / "config.json").read_text())
        longest = min(config.longest_request + 1, context)
        check_cache(tree, config.engines, config.model.dtype, longest)
