"""What a model can process: its longest sequence, and the tokens in a generator's KV cache."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from asyncrl.config import Config, ConfigError, RunSettings
from asyncrl.models.adapter_files import adapter_base
from asyncrl.models.supported import NO_SHARES, chosen_packing, keeps_state, uniform_rope_tokens
from asyncrl.preflight.served import refusal, text_config, unusable
from asyncrl.runtime.files import NotAFileError, open_regular
from asyncrl.runtime.paths import meant
from asyncrl.weights.stored import CheckpointFilesError, stored_files

__all__ = ["check_kv_cache", "kv_bytes_per_token", "kv_tokens", "model_context", "model_vocabulary"]

KV_BLOCK = 128
"""Tokens in one block of vLLM's KV cache on CPU."""
READ = (".json", ".safetensors", ".model", ".txt", ".jinja")
"""Suffixes of a model's files that a run reads."""
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
    _refuse_unreadable(path, field)
    tree = _read_config_json(path, field)
    try:
        stored_files(path)
    except CheckpointFilesError as error:
        raise ConfigError(f"{field} = {error}") from None
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
    text = text_config(tree)
    positions = text.get("max_position_embeddings", text.get("n_positions"))  # GPT-2's name
    context = positions if isinstance(positions, int) else UNBOUNDED_CONTEXT
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


def _refuse_unreadable(path: Path, field: str) -> None:
    """Raise ConfigError for a file that exists and may not be read. Libraries call it missing."""
    try:
        for file in sorted(path.iterdir()):
            if file.suffix in READ:
                with suppress(FileNotFoundError, NotAFileError):
                    open_regular(file).close()
    except PermissionError as error:
        raise ConfigError(
            f"{field} = {str(path)!r}: {error.filename} cannot be read ({error.strerror}); give"
            " this user permission to read it"
        ) from None
    except OSError:
        return  # no such directory, which the next check says


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
    size = text_config(_read_config_json(path, field)).get("vocab_size")
    return size if isinstance(size, int) else None


def _read_config_json(path: Path, field: str) -> dict[str, object]:
    try:
        tree: dict[str, object] = json.loads((path / "config.json").read_text())
    except OSError as error:
        if (base := adapter_base(path)) is not None:
            way_out = (
                "set model.path to that model, and lora.load to this folder"
                if field == "model.path"
                else "merge it into that model first"
            )
            raise ConfigError(
                f"{field} = {str(path)!r} is an adapter of {base or 'an unnamed model'!r} and no"
                f" whole model; {way_out}"
            ) from None
        raise ConfigError(
            f"{field} = {str(path)!r}: {error.strerror} (config.json); give a Hugging Face"
            f" checkpoint directory{'' if path.is_dir() else meant(path)}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{field} = {str(path)!r}: config.json is not JSON ({error})") from None
    if why := unusable(tree):
        raise ConfigError(f"{field} = {str(path)!r}: config.json {why}")
    return tree


def kv_bytes_per_token(config: Config) -> int | None:
    """Bytes of one token's keys and values in all layers and all of an engine's workers, in the
    published type. None if the sizes are missing or the model caches something else, such as latent
    attention."""
    tree = json.loads((Path(config.model.path) / "config.json").read_text())
    tree = tree.get("text_config", tree)
    heads, layers, hidden = (
        tree.get(name) for name in ("num_attention_heads", "num_hidden_layers", "hidden_size")
    )
    every_layer = (
        set(tree.get("layer_types") or ["full_attention"]) == {"full_attention"}
        and not tree.get("num_kv_shared_layers")
        and not keeps_state(tree)
    )
    if tree.get("kv_lora_rank") or not (heads and layers and hidden and every_layer):
        return None
    width = tree.get("head_dim") or hidden // heads
    return (
        2
        * int(layers)
        # A worker has at least one head.
        * max(int(tree.get("num_key_value_heads") or heads), config.generator.tensor_parallel_size)
        * int(width)
        * (4 if config.model.dtype == "float32" else 2)
    )


def check_kv_cache(config: Config, context: int) -> None:
    """Refuse a KV cache that is too small for the longest request, because the engine would not
    start.

    On a GPU, the engine itself checks the cache, which is what `gpu_memory_utilization` leaves.
    """
    width, generator = kv_bytes_per_token(config), config.generator
    if width is None or generator.device != "cpu" or not generator.own:
        return
    held, wanted = (
        kv_tokens(generator.kv_cache_memory_bytes, width),
        min(config.longest_request + 1, context),
    )
    if held < wanted:
        enough = (-(-wanted // KV_BLOCK) + 1) * KV_BLOCK * width
        raise ConfigError(
            f"generator.kv_cache_memory_bytes = {generator.kv_cache_memory_bytes} has room for"
            f" {held} tokens of {width} bytes, and the longest request has {wanted}; raise it to"
            f" {enough} or more"
        )


def kv_tokens(cache_bytes: int, width: int) -> int:
    """Tokens of `width` bytes that fit in vLLM's cache on CPU: whole blocks, minus one that vLLM
    reserves."""
    return max(0, cache_bytes // (KV_BLOCK * width) - 1) * KV_BLOCK
