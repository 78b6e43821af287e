"""Models that vLLM does not serve as transformers computes them: a run with one would end at its
first log-prob check, or before.

What was tried, and how far each differs, is in docs/models.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config import Config

__all__ = ["NOT_SERVED_ON_CPU", "SERVED_IN_PART", "WHY", "refusal", "unusable"]

COUNTS = (
    "hidden_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
"""Settings of config.json that are whole numbers wherever they are."""
OTHER_TASKS = ("Classification", "QuestionAnswering", "MaskedLM", "RewardModel")
"""In the names of classes that predict something else than the next token."""

NOT_SERVED_ON_CPU: Mapping[str, str] = {
    "bamba": "has no code for its recurrent layers",
    "deepseek_v2": (
        "gives other log-probs for it than transformers (0.7 nats apart at published head sizes;"
        " why is not known)"
    ),
    "deepseek_v3": (
        "gives other log-probs for it than transformers (0.7 nats apart at published head sizes;"
        " why is not known)"
    ),
    "ernie4_5": "turns other pairs of dimensions in its rotary embedding than transformers",
    "ernie4_5_moe": "leaves the correction bias out of its choice of experts",
    "jamba": "has no selective scan",
    "lfm2": "turns its queries by the positions of other tokens",
    "lfm2_moe": "turns its queries by the positions of other tokens",
    "minimax_m2": "fails in its normalization of queries and keys",
    "qwen3_5_text": "cannot load its class",
}
"""`model_type` → what vLLM 0.32.0 does on CPU, after "vLLM on CPU". On a GPU none of them has been
tried."""

SERVED_IN_PART: Mapping[str, str] = {
    "apertus": "keeps the parameters of its activation (xIELU) in bfloat16",
    "cohere2": "attends to one token more than transformers in its sliding window",
    "nemotron_h": "has no experts without a gate",
    "phimoe": "leaves out the bias of its head",
    "qwen3_next": "computes its linear attention in bfloat16 alone",
}
"""The same for models that some settings of theirs or of the run let through: `refusal` knows
which."""

WHY: Mapping[str, str] = {**NOT_SERVED_ON_CPU, **SERVED_IN_PART}
"""All of them."""

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Elements of an attention head for which vLLM 0.32.0 has code on CPU. With another number its
engine dies at the first token."""

OTHER = "use generator.device: cuda, where nobody has tried it yet, or another model"


def unusable(tree: Any) -> str | None:
    """What is wrong with a config.json whatever the run, after "config.json"; None: nothing that
    shows."""
    if not isinstance(tree, dict):
        return f"holds {type(tree).__name__}, not an object of settings; download it again"
    if not isinstance(tree.get("model_type"), str):
        return "has no model_type, by which transformers knows the model; add it"
    parts = [tree, *(part for part in [tree.get("text_config")] if isinstance(part, dict))]
    for name in COUNTS:
        if wrong := [
            part[name] for part in parts if part.get(name) is not None and not _is_count(part[name])
        ]:
            return f"has {name} = {wrong[0]!r}, not a whole number above 0; repair it"
    named = tree.get("architectures")
    if not isinstance(named, list) or not named or not all(isinstance(one, str) for one in named):
        return (
            "names no architectures, by which vLLM knows the model; add them, such as"
            ' "architectures": ["LlamaForCausalLM"]'
        )
    if other := next((one for one in named if any(task in one for task in OTHER_TASKS)), None):
        return (
            f"has architecture {other!r}, which does not predict the next token; name a causal"
            " language model"
        )
    return None


def _is_count(value: Any) -> bool:
    """A number, or one for each layer."""
    return all(
        type(one) is int and one > 0
        for one in (value if isinstance(value, list) and value else [value])
    )


def refusal(tree: Mapping[str, Any], config: Config) -> str | None:
    """Why the generators of a run would not agree with its learner, and the way out, in a sentence;
    None: nothing is known against it.

    Args:
        tree: the model's config.json.
    """
    text = tree.get("text_config", tree)
    kind, on_cpu = text.get("model_type"), config.generator.device == "cpu"
    why = WHY.get(str(kind))
    if on_cpu and kind in NOT_SERVED_ON_CPU:
        return f"vLLM on CPU {why}; {OTHER}"
    if on_cpu and kind == "nemotron_h" and _has_experts(text):
        return f"vLLM on CPU {why}; {OTHER}"
    if on_cpu and kind == "qwen3_next" and config.model.dtype == "float32":
        return f"vLLM on CPU {why}; set model.dtype: bfloat16"
    if kind == "phimoe" and text.get("lm_head_bias"):
        return f"vLLM {why} (lm_head_bias); use another model"
    if kind == "apertus" and config.model.dtype == "float32":
        return f"vLLM {why}, 0.004 nats away from float32; set model.dtype: bfloat16"
    if kind == "mamba2" and config.learner.bf16 and config.learner.device == "cpu":
        return (
            "transformers mixes float32 and bfloat16 in its recurrent layers on CPU; set"
            " learner.bf16: false"
        )
    if on_cpu and (size := _head_size(text)) is not None and size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        return (
            f"vLLM on CPU has attention for heads of {sizes} elements, and this model's have"
            f" {size}; use generator.device: cuda, or another model"
        )
    window = text.get("sliding_window")
    if kind == "cohere2" and window and config.longest_trajectory > window:
        return (
            f"vLLM {why} of {window} tokens, and a trajectory may have {config.longest_trajectory};"
            f" set data.max_length: {window} or less"
        )
    return None


def _head_size(text: Mapping[str, Any]) -> int | None:
    """Elements of one attention head; None where the settings do not tell."""
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


def _has_experts(text: Mapping[str, Any]) -> bool:
    """Whether a Nemotron-H has mixtures among its layers: by transformers' list, or by the pattern
    of published checkpoints. Its default has one."""
    layers, pattern = text.get("layers_block_type"), text.get("hybrid_override_pattern")
    return "moe" in layers if layers else "E" in (pattern or "E")
