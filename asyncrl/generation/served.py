"""Models for which vLLM does not compute the same log-probs as transformers. A run with such a
model would fail at its first log-prob check, or earlier. A standing generator would answer wrongly.

docs/reference/models.md lists what was tried and how large the differences are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

COUNTS = (
    "hidden_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
"""Settings of config.json that must be whole numbers, if present."""
OTHER_TASKS = ("Classification", "QuestionAnswering", "MaskedLM", "RewardModel")
"""Parts of class names of models that do not predict the next token."""

NOT_SERVED_ON_CPU: Mapping[str, str] = {
    "bamba": "does not support its recurrent layers",
    "deepseek_v2": (
        "computes log-probs that differ from transformers (by 0.7 nats at published head sizes;"
        " the cause is unknown)"
    ),
    "deepseek_v3": (
        "computes log-probs that differ from transformers (by 0.7 nats at published head sizes;"
        " the cause is unknown)"
    ),
    "ernie4_5": "rotates different pairs of dimensions than transformers in its rotary embedding",
    "ernie4_5_moe": "ignores the correction bias when it chooses experts",
    "jamba": "has no selective scan",
    "lfm2": "rotates its queries by the positions of other tokens",
    "lfm2_moe": "rotates its queries by the positions of other tokens",
    "minimax_m2": "fails in its normalization of queries and keys",
    "qwen3_5_text": "cannot load its class",
}
"""`model_type` → what vLLM 0.32.0 does wrong on CPU, continuing "vLLM on CPU". None of these models
was tried on a GPU."""

SERVED_IN_PART: Mapping[str, str] = {
    "apertus": "keeps the parameters of its activation (xIELU) in bfloat16",
    "cohere2": "attends to one more token than transformers in its sliding window",
    "nemotron_h": "does not support experts without a gate",
    "phimoe": "ignores the bias of its head",
    "qwen3_next": "computes its linear attention only in bfloat16",
}
"""`model_type` → what vLLM 0.32.0 does wrong with some settings: `refusal` decides with which."""

WHY: Mapping[str, str] = {**NOT_SERVED_ON_CPU, **SERVED_IN_PART}
"""Both tables."""

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes that vLLM 0.32.0 supports on CPU. With any other size its engine dies at the
first token."""

OTHER = "use generator.device: cuda (not tried yet), or another model"


class Names(NamedTuple):
    """What messages call the settings."""

    model: str
    dtype: str
    longest: str


RUN = Names("model.path", "model.dtype", "data.max_length")
APPLICATION = Names("model", "dtype", "max_model_len")


def text_config(tree: Mapping[str, object]) -> Mapping[str, object]:
    """The settings of the text model in a config.json: a multimodal model nests them."""
    nested = tree.get("text_config")
    return nested if isinstance(nested, Mapping) else tree


def unusable(tree: object) -> str | None:
    """What makes this config.json unusable for every run, continuing "config.json"; None: no known
    problem."""
    if not isinstance(tree, dict):
        return f"contains {type(tree).__name__}, not an object of settings; download it again"
    if not isinstance(tree.get("model_type"), str):
        return "has no model_type, which transformers needs to load the model; add it"
    parts = [tree, *(part for part in [tree.get("text_config")] if isinstance(part, dict))]
    for name in COUNTS:
        if wrong := [
            part[name] for part in parts if part.get(name) is not None and not _is_count(part[name])
        ]:
            return f"has {name} = {wrong[0]!r}, not a whole number above 0; repair it"
    named = tree.get("architectures")
    if not isinstance(named, list) or not named or not all(isinstance(name, str) for name in named):
        return (
            "has no architectures, which vLLM needs to load the model; add them, such as"
            ' "architectures": ["LlamaForCausalLM"]'
        )
    if other := next((name for name in named if any(task in name for task in OTHER_TASKS)), None):
        return (
            f"has architecture {other!r}, which does not predict the next token; name a causal"
            " language model"
        )
    return None


def _is_count(value: object) -> bool:
    """Whether this is a positive whole number, or a list of them with one per layer."""
    return all(
        type(number) is int and number > 0
        for number in (value if isinstance(value, list) and value else [value])
    )


def not_served(
    tree: Mapping[str, object], device: str, dtype: str, longest: int | None, names: Names
) -> str | None:
    """Why generators would not agree with transformers, with a fix, in one sentence. None: no known
    problem.

    Args:
        tree: the model's config.json.
        longest: tokens of the longest sequence; None = the model's context.
        names: what the messages call the settings.
    """
    text = text_config(tree)
    kind, on_cpu = text.get("model_type"), device == "cpu"
    why = WHY.get(str(kind))
    if on_cpu and kind in NOT_SERVED_ON_CPU:
        return f"vLLM on CPU {why}; {OTHER}"
    if on_cpu and kind == "nemotron_h" and _has_experts(text):
        return f"vLLM on CPU {why}; {OTHER}"
    if on_cpu and kind == "qwen3_next" and dtype == "float32":
        return f"vLLM on CPU {why}; set {names.dtype}: bfloat16"
    if kind == "phimoe" and text.get("lm_head_bias"):
        return f"vLLM {why} (lm_head_bias); use another model"
    if kind == "apertus" and dtype == "float32":
        return f"vLLM {why}, 0.004 nats away from float32; set {names.dtype}: bfloat16"
    if on_cpu and (size := _head_size(text)) is not None and size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        return (
            f"vLLM on CPU supports attention heads of {sizes} elements, and this model's have"
            f" {size}; use generator.device: cuda, or another model"
        )
    window, longest = text.get("sliding_window"), longest or context_of(tree)
    if kind == "cohere2" and isinstance(window, int | float) and 0 < window < (longest or 0):
        return (
            f"vLLM {why} of {window} tokens, and a trajectory may have {longest};"
            f" set {names.longest}: {window} or less"
        )
    return None


def context_of(tree: Mapping[str, object]) -> int | None:
    """The model's context in tokens; None if its config.json does not say it."""
    text = text_config(tree)
    positions = text.get("max_position_embeddings", text.get("n_positions"))  # GPT-2's name
    return positions if isinstance(positions, int) else None


def _head_size(text: Mapping[str, object]) -> int | None:
    """Elements of one attention head; None if the settings do not determine it."""
    heads, hidden = (
        next((text[name] for name in names if name in text), None)
        for names in (("num_attention_heads", "n_head"), ("hidden_size", "n_embd"))
    )
    size = text.get("head_dim") or (
        hidden // heads
        if isinstance(hidden, int) and isinstance(heads, int) and "kv_lora_rank" not in text
        else None
    )
    return size if isinstance(size, int) else None


def _has_experts(text: Mapping[str, object]) -> bool:
    """Whether a Nemotron-H has mixture-of-experts layers, by transformers' list or by the pattern
    of published checkpoints. The default pattern has one."""
    layers, pattern = text.get("layers_block_type"), text.get("hybrid_override_pattern")
    if layers:
        return isinstance(layers, Collection) and "moe" in layers
    return not isinstance(pattern, Collection) or not pattern or "E" in pattern
