"""Whether an engine can serve a checkpoint with these settings. `asyncrl plan` and the builder of a
standing application share these checks. They read JSON files and the headers of weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from asyncrl.config import ConfigError, GeneratorConfig
from asyncrl.generation.served import (
    APPLICATION,
    context_of,
    not_served,
    text_config,
    unusable,
)
from asyncrl.generation.settings import GeneratorApp
from asyncrl.models.adapter_files import adapter_base
from asyncrl.models.supported import keeps_state
from asyncrl.runtime.files.opening import NotAFileError, open_regular
from asyncrl.runtime.paths import meant
from asyncrl.text.stops import load_stops
from asyncrl.text.tokenizer import load_tokenizer
from asyncrl.weights.outline import outline
from asyncrl.weights.stored import CheckpointFilesError, stored_files

READ = (".json", ".safetensors", ".model", ".txt", ".jinja")
"""Suffixes of a model's files that a run reads."""
KV_BLOCK = 128
"""Tokens in one block of vLLM's KV cache on CPU."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in models' configs."""
LARGEST_CACHE = 4 << 30
"""Bytes of the largest KV cache that a standing generator on CPU takes without being told to."""


def check_files(path: Path, field: str) -> dict[str, object]:
    """The checkpoint's config.json.

    Args:
        field: setting that names the checkpoint, for messages.

    Raises:
        ConfigError: a file is missing, cannot be read, or is not that of a causal language model.
    """
    _refuse_unreadable(path, field)
    tree = read_config_json(path, field)
    check_weight_files(path, field)
    return tree


def check_weight_files(path: Path, field: str) -> None:
    """Raise ConfigError unless the checkpoint has its weight files."""
    try:
        stored_files(path)
    except CheckpointFilesError as error:
        raise ConfigError(f"{field} = {error}") from None


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


def read_config_json(path: Path, field: str) -> dict[str, object]:
    """The checkpoint's config.json. Raises as `check_files` does."""
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


def kv_width(tree: Mapping[str, object], dtype: str, tensor_parallel_size: int) -> int | None:
    """Bytes of one token's keys and values in all layers and all of an engine's workers, in the
    published type. None if the sizes are missing or the model caches something else, such as latent
    attention.

    Args:
        tree: the model's config.json.
    """
    text = text_config(tree)
    kinds = text.get("layer_types") or ["full_attention"]
    every_layer = (
        isinstance(kinds, list)
        and set(kinds) == {"full_attention"}
        and not text.get("num_kv_shared_layers")
        and not keeps_state(text)
    )
    if text.get("kv_lora_rank") or not every_layer:
        return None
    return most_kv_width(text, dtype, tensor_parallel_size)


def most_kv_width(text: Mapping[str, object], dtype: str, tensor_parallel_size: int) -> int | None:
    """`kv_width` as if each layer kept the keys and values of all tokens, which is the most that it
    can keep. None if the sizes are missing."""
    heads, layers, hidden, keys, width = (
        size if isinstance(size := text.get(name), int) else 0
        for name in (
            "num_attention_heads",
            "num_hidden_layers",
            "hidden_size",
            "num_key_value_heads",
            "head_dim",
        )
    )
    if not (heads and layers and hidden):
        return None
    # A worker has at least one head.
    held = max(keys or heads, tensor_parallel_size)
    return 2 * layers * held * (width or hidden // heads) * (4 if dtype == "float32" else 2)


def check_cache(
    tree: Mapping[str, object], generator: GeneratorConfig, dtype: str, longest: int
) -> None:
    """Refuse a KV cache that is too small for the longest request, because the engine would not
    start.

    On a GPU, the engine itself checks the cache, which is what `gpu_memory_utilization` leaves.

    Raises:
        ConfigError: with the bytes that are enough.
    """
    width = kv_width(tree, dtype, generator.tensor_parallel_size)
    if width is None or generator.device != "cpu":
        return
    held = kv_tokens(generator.kv_cache_memory_bytes, width)
    if held < longest:
        raise ConfigError(
            f"generator.kv_cache_memory_bytes = {generator.kv_cache_memory_bytes} has room for"
            f" {held} tokens of {width} bytes, and the longest request has {longest}; raise it to"
            f" {enough_cache(longest, width)} or more"
        )


def enough_cache(tokens: int, width: int) -> int:
    """Bytes of a cache with room for a request of so many tokens."""
    return (-(-tokens // KV_BLOCK) + 1) * KV_BLOCK * width


def kv_tokens(cache_bytes: int, width: int) -> int:
    """Tokens of `width` bytes that fit in vLLM's cache on CPU: whole blocks, minus one that vLLM
    reserves."""
    return max(0, cache_bytes // (KV_BLOCK * width) - 1) * KV_BLOCK


def check_workers(text: Mapping[str, object], generator: GeneratorConfig, model: str) -> None:
    """Check that an engine's workers can split the model evenly. The engine checks models whose
    config uses other names for its sizes.

    Args:
        model: the setting and its value, for messages.

    Raises:
        ConfigError: a size does not fit.
    """
    # Some models have lists, with a size for each layer.
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    heads, keys, width = (size if isinstance(size := text.get(name), int) else 0 for name in names)
    if not heads:
        return
    keys = keys or heads
    fitting = [
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and not (keys % size and size % keys) and not width % size
    ]
    sizes = f"{heads} attention heads, {keys} key-value heads and intermediate size {width}"
    check_share(
        "generator.tensor_parallel_size", generator.tensor_parallel_size, fitting, sizes, model
    )
    layers = text.get("num_hidden_layers")
    if isinstance(layers, int) and generator.pipeline_parallel_size > layers:
        raise ConfigError(
            f"generator.pipeline_parallel_size = {generator.pipeline_parallel_size} is above the"
            f" {layers} layers of {model}; lower it"
        )
    if generator.expert_parallel and not any(text.get(name) for name in EXPERTS):
        raise ConfigError(
            f"generator.expert_parallel: true needs a model with experts, and the config of"
            f" {model} names none; leave it out"
        )


def check_share(setting: str, size: int, fitting: Sequence[int], sizes: str, model: str) -> None:
    """Raise ConfigError unless the setting is one of these numbers."""
    if size not in fitting:
        raise ConfigError(
            f"{setting} = {size} does not fit the {sizes} of {model};"
            f" use one of {', '.join(map(str, fitting))}"
        )


def check_app(app: GeneratorApp) -> GeneratorApp:
    """Check a standing application's model as `asyncrl plan` checks that of a run's generators.

    Returns:
        The settings. A KV cache on CPU whose size nobody set has room for the longest request.

    Raises:
        ConfigError: one line with the setting, its value and the fix.
    """
    tree = check_files(Path(app.model), APPLICATION.model)
    model, context = f"{APPLICATION.model} = {app.model!r}", context_of(tree)
    reason = not_served(tree, app.generator.device, app.dtype, app.max_model_len, APPLICATION)
    if reason is not None:
        raise ConfigError(f"{model} (model_type {tree.get('model_type')!r}): {reason}")
    if context is not None and (app.max_model_len or 0) > context:
        raise ConfigError(
            f"max_model_len = {app.max_model_len} is above the context of {context} tokens of"
            f" {model}; lower it"
        )
    check_workers(text_config(tree), app.generator, model)
    if longest := app.max_model_len or context:
        app = _with_cache(app, tree, longest)
        check_cache(tree, app.generator, app.dtype, longest)
    return app


def check_tokens_and_tensors(app: GeneratorApp) -> None:
    """Check the tokenizer, the stops and the types of the tensors. The start of a replica checks
    them too, after a longer time.

    Raises:
        ConfigError: one line with the setting, its value and the fix.
    """
    try:
        tokenizer = load_tokenizer(app.model)
        load_stops(
            app.model,
            tokenizer,
            app.rollout_stop,
            app.rollout_stop_token_ids,
            app.chat_template_kwargs,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if refusal := outline(app.model).refusal:
        raise ConfigError(f"model = {app.model!r}: {refusal}")


def _with_cache(app: GeneratorApp, tree: Mapping[str, object], longest: int) -> GeneratorApp:
    """The settings with a KV cache for the longest request, if nobody set its size."""
    generator = app.generator
    width = most_kv_width(text_config(tree), app.dtype, generator.tensor_parallel_size)
    if width is None or "kv_cache_memory_bytes" in generator.model_fields_set:
        return app
    size = min(LARGEST_CACHE, max(generator.kv_cache_memory_bytes, enough_cache(longest, width)))
    sized = generator.model_copy(update={"kv_cache_memory_bytes": size})
    return app.model_copy(update={"generator": sized})
