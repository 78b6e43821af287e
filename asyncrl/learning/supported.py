"""Which models can be trained on packed rows, told from config.json alone: no torch, so that `asyncrl plan` says it before anything is allocated.

Packed rows need every layer to be causal attention that transformers' attention interface computes. Whatever else passes something along the row
(a recurrent state, a convolution, an attention of its own) would carry one trajectory into the next, silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["WAY_OUT", "refusal", "uniform_rope_tokens"]

WAY_OUT = "use a model with full or sliding-window attention in every layer, such as Llama, Mistral, Qwen3 or OLMo 3"

LAYER_TYPES = frozenset({"attention", "full_attention", "sliding_attention"})
"""Layers that packed attention computes; `attention` is the older name of `full_attention`."""

REASONS = {
    "has recurrent or convolutional layers, whose state would run from one packed trajectory into the next": """
        bamba falcon_h1 falcon_mamba granitemoehybrid hrm_text inkling_text jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h olmo_hybrid
        qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2 zaya""",
    "has chunked or indexed attention, which packed attention does not compute": """
        axk2 deepseek_v32 deepseek_v4 glm_moe_dsa hy_v4 llama4 llama4_text minimax_m3_vl_text""",
    "has attention sinks, which packed attention does not compute": "gpt_oss granite_swa granitemoe_swa mimo_v2_flash",
    "soft-caps its attention scores, which packed attention does not compute": "gemma2 vaultgemma",
    "does not use transformers' attention interface, so packed trajectories cannot be kept apart in it": """
        bart big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom blt codegen cpmant falcon git gpt-sw3 gpt_neo gpt_neox_japanese gptj marian
        mbart megatron-bert mpt musicgen musicgen_melody mvp openai-gpt pegasus plbart prophetnet reformer rembert roformer stablelm trocr whisper xglm xlm
        xlnet""",
}
"""Why not, and the `model_type`s of transformers that it holds for."""

STATE_KEYS = ("mamba_", "ssm_", "linear_attn", "linear_conv", "linear_num", "conv_L", "lru_", "layers_block_type", "hybrid_override")
"""Beginnings of settings that only models with such layers have, for models newer than the lists."""

LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings with which a model changes its logits after the head; the learner's log-probs would miss that."""


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a model with this config.json cannot be trained, and the way out; None if nothing speaks against it."""
    parts = [config, *([config["text_config"]] if isinstance(config.get("text_config"), Mapping) else [])]
    reason = next((found for part in parts for found in [_reason(part)] if found), None)
    return f"model_type {config.get('model_type')!r} {reason}; {WAY_OUT}" if reason else None


LONG_ROPE = ("longrope", "su")
"""Rotary frequencies of two kinds: short ones, and long ones for a row that reaches past `original_max_position_embeddings`. `su` is the older name."""
PHI3_ORIGINAL = 4096
"""transformers' default where a Phi-3 config does not say it."""


def uniform_rope_tokens(config: Mapping[str, Any]) -> int | None:
    """Longest trajectory, in tokens, for which a model with LongRoPE computes every token with the same frequencies; None for any other model.

    transformers chooses the frequencies by the largest position of the whole packed row, and vLLM by the engine's longest sequence: past this length
    one long trajectory would change all its neighbours, and learner and generators would differ.
    """
    text = config.get("text_config") or config
    parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
    # Some models have a dictionary for each kind of layer.
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, Mapping))]
    longs = [kind for kind in kinds if (kind.get("rope_type") or kind.get("type")) in LONG_ROPE]
    if not longs:
        return None
    default = PHI3_ORIGINAL if text.get("model_type") == "phi3" else text["max_position_embeddings"]
    originals = (text.get("original_max_position_embeddings") or kind.get("original_max_position_embeddings") or default for kind in longs)
    return min(int(original) for original in originals)


def _reason(config: Mapping[str, Any]) -> str | None:
    for reason, types in REASONS.items():
        if config.get("model_type") in types.split():
            return reason
    if others := sorted(set(config.get("layer_types") or ()) - LAYER_TYPES):
        return f"has layers of type {', '.join(others)}, in which packed trajectories cannot be kept apart"
    if keys := sorted(key for key, value in config.items() if key.startswith(STATE_KEYS) and value is not None):
        return f"has settings of recurrent layers ({', '.join(keys[:3])}), in which packed trajectories cannot be kept apart"
    if config.get("attn_logit_softcapping") is not None:
        return "soft-caps its attention scores (attn_logit_softcapping), which packed attention does not compute"
    if changes := [name for name in LOGIT_CHANGES if config.get(name) not in (None, 1, 1.0)]:
        return f"changes its logits after the head ({', '.join(changes)}), which the learner does not compute"
    return None
