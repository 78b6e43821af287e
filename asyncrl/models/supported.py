"""How a model can be trained, told from config.json alone: no torch, so that `asyncrl plan` says it
before anything is allocated.

Packed rows need every layer to be causal attention that transformers' attention interface computes.
Whatever else passes something along the row (a recurrent state, a convolution, an attention of its
own) would carry one trajectory into the next, silently. Such a model is trained one trajectory a
forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "NO_SHARES",
    "WAY_OUT",
    "Packing",
    "Support",
    "caps_attention",
    "chosen_packing",
    "keeps_state",
    "logit_change",
    "squares_scores",
    "support",
    "uniform_rope_tokens",
]

Packing = Literal["rows", "none"]
"""Many trajectories in one packed row, or one trajectory a forward."""

WAY_OUT = (
    "set learner.packing: none, or use a model with full or sliding-window attention in every"
    " layer, such as Llama, Mistral, Qwen3 or OLMo 3"
)

NO_SHARES = (
    "learner.sequence_parallel_size = {size} shares packed rows, and this model is trained one"
    " trajectory a forward (learner.packing: none); set sequence_parallel_size: 1"
)

LAYER_TYPES = frozenset({"attention", "full_attention", "sliding_attention"})
"""Layers that packed attention computes; `attention` is the older name of `full_attention`."""

RECURRENT = (
    "has recurrent or convolutional layers, whose state would run from one packed trajectory into"
    " the next"
)
RECURRENT_SETTINGS = "has settings of recurrent layers"

UNPACKED = {
    RECURRENT: (
        """
        bamba falcon_h1 falcon_mamba granitemoehybrid hrm_text inkling_text jamba kimi_linear lfm2
        lfm2_moe mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text
        qwen3_5_text qwen3_next recurrent_gemma xlstm zamba zamba2 zaya"""
    ),
    "has chunked attention, which packed attention does not compute": "llama4 llama4_text",
    "has attention sinks, which packed attention does not compute": (
        "gpt_oss granite_swa granitemoe_swa mimo_v2_flash"
    ),
    "soft-caps its attention scores, which packed attention does not compute": "gemma2 vaultgemma",
    "keeps from its layers what packed attention needs, so packed trajectories cannot be kept apart"
    " in it": ("nemotron"),
    "does not use transformers' attention interface, so packed trajectories cannot be kept apart in"
    " it": (
        """
        biogpt bloom codegen falcon gpt-sw3 gpt_neo gpt_neox_japanese gptj mpt openai-gpt stablelm
        xglm"""
    ),
}
"""Why not packed, and the `model_type`s of transformers that it holds for."""

REFUSED = {
    "is not a causal language model (an encoder, a decoder that needs one, or another input"
    " than tokens)": (
        """
        bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small blt
        camembert cpmant data2vec-text electra ernie gemma4_assistant gemma4_unified_assistant git
        marian mbart megatron-bert musicgen musicgen_melody mvp pegasus plbart prophetnet reformer
        rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-roberta
        xlm-roberta-xl xlnet xmod"""
    ),
    "picks the tokens that it attends to by an indexer, which gets no gradient and in transformers"
    " may look ahead": (
        """
        axk2 deepseek_v32 deepseek_v4 glm_moe_dsa hy_v4 minimax_m3_vl_text qwen4_exp
        qwen4_exp_text"""
    ),
    "divides its own weights in eval mode": "rwkv",
}
"""Why not at all, and the `model_type`s."""

STATE_KEYS = (
    "mamba_",
    "ssm_",
    "linear_attn",
    "linear_conv",
    "linear_num",
    "conv_L",
    "lru_",
    "layers_block_type",
    "hybrid_override",
)
"""Beginnings of settings that only models with such layers have, for models newer than the lists.
"""

MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Settings by which a model multiplies, divides or soft-caps its logits after the head."""
DIVISORS_THAT_MULTIPLY = ("hyperclovax",)
"""Models whose `logits_scaling` is a factor."""


@dataclass(frozen=True, slots=True)
class Support:
    """How a model can be trained."""

    packing: Packing | None
    """The better way; None = the model cannot be trained."""
    reason: str = ""
    """Why not on packed rows, or not at all; empty for packed rows. It goes on after "model_type
    'x' "."""

    def text(self) -> str:
        """`packed`, `unpacked, because …` or `refused, because …`."""
        names: dict[str | None, str] = {"rows": "packed", "none": "unpacked", None: "refused"}
        name = names[self.packing]
        return f"{name}, because it {self.reason}" if self.reason else name


def support(config: Mapping[str, Any]) -> Support:
    """How a model with this config.json can be trained, as far as that file tells."""
    parts = _parts(config)
    for part in parts:
        for reason, types in REFUSED.items():
            if part.get("model_type") in types.split():
                return Support(None, reason)
    why = next((found for part in parts for found in [_unpacked(part)] if found), None)
    return Support("none", why) if why else Support("rows")


def chosen_packing(config: Mapping[str, Any], asked: Packing | None) -> Packing:
    """What `learner.packing: asked` comes to for this model; None takes the better way.

    Raises:
        ValueError: the model cannot be trained at all, or not as asked.
    """
    found, name = support(config), config.get("model_type")
    if found.packing is None:
        raise ValueError(
            f"model_type {name!r} {found.reason}; use a decoder that predicts the next token"
        )
    if asked == "rows" and found.packing == "none":
        raise ValueError(
            f"model_type {name!r} {found.reason}, so learner.packing: rows is not possible;"
            f" {WAY_OUT}"
        )
    return asked or found.packing


def keeps_state(config: Mapping[str, Any]) -> bool:
    """Whether some layers keep something else than keys and values of each token."""
    return support(config).reason.startswith((RECURRENT, RECURRENT_SETTINGS, "has layers of type"))


def squares_scores(config: Mapping[str, Any]) -> bool:
    """Whether the model's own attention holds scores of tokens by tokens: transformers has no other
    for sinks, soft caps and its oldest models."""
    found = support(config)
    return found.packing == "none" and (
        "attention scores" in found.reason or "sinks" in found.reason or "interface" in found.reason
    )


def caps_attention(config: Mapping[str, Any]) -> bool:
    """Whether the model soft-caps its attention scores: transformers' `sdpa` would leave that out
    in silence."""
    return any(part.get("attn_logit_softcapping") is not None for part in _parts(config))


def logit_change(config: Mapping[str, Any]) -> tuple[float, float | None]:
    """(factor, soft cap) that the model applies to its logits after the head, in this order; (1.0,
    None) for most."""
    text = _parts(config)[-1]
    factor = 1.0
    for name in MULTIPLIERS:
        factor *= 1.0 if text.get(name) is None else text[name]
    for name in DIVISORS:
        if text.get(name) is not None:
            multiplies = str(text.get("model_type")).startswith(DIVISORS_THAT_MULTIPLY)
            factor = factor * text[name] if multiplies else factor / text[name]
    caps = [text[name] for name in SOFTCAPS if text.get(name) is not None]
    return float(factor), float(caps[0]) if caps else None


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config, and that of its text model if it has one."""
    return [
        config,
        *([config["text_config"]] if isinstance(config.get("text_config"), Mapping) else []),
    ]


LONG_ROPE = ("longrope", "su")
"""Rotary frequencies of two kinds: short ones, and long ones for a row that reaches past
`original_max_position_embeddings`. `su` is the older name."""
PHI3_ORIGINAL = 4096
"""transformers' default where a Phi-3 config does not say it."""


def uniform_rope_tokens(config: Mapping[str, Any]) -> int | None:
    """Longest trajectory, in tokens, for which a model with LongRoPE computes every token with the
    same frequencies; None for any other model.

    transformers chooses the frequencies by the largest position of the whole packed row, and vLLM
    by the engine's longest sequence: past this length one long trajectory would change all its
    neighbors, and learner and generators would differ.
    """
    text = config.get("text_config") or config
    parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
    # Some models have a dictionary for each kind of layer.
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, Mapping))]
    longs = [kind for kind in kinds if (kind.get("rope_type") or kind.get("type")) in LONG_ROPE]
    if not longs:
        return None
    default = PHI3_ORIGINAL if text.get("model_type") == "phi3" else text["max_position_embeddings"]
    originals = (
        text.get("original_max_position_embeddings")
        or kind.get("original_max_position_embeddings")
        or default
        for kind in longs
    )
    return min(int(original) for original in originals)


def _unpacked(config: Mapping[str, Any]) -> str | None:
    for reason, types in UNPACKED.items():
        if config.get("model_type") in types.split():
            return reason
    if others := sorted(set(config.get("layer_types") or ()) - LAYER_TYPES):
        return (
            f"has layers of type {', '.join(others)}, in which packed trajectories cannot be kept"
            " apart"
        )
    if keys := sorted(
        key for key, value in config.items() if key.startswith(STATE_KEYS) and value is not None
    ):
        return (
            f"{RECURRENT_SETTINGS} ({', '.join(keys[:3])}), in which packed trajectories cannot be"
            " kept apart"
        )
    if config.get("attn_logit_softcapping") is not None:
        return (
            "soft-caps its attention scores (attn_logit_softcapping), which packed attention does"
            " not compute"
        )
    return None
