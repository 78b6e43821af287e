"""Decides from config.json alone how a model can be trained. It needs no torch, so `asyncrl plan`
can report the decision before anything is allocated.

With packed rows, each layer must be causal attention that uses transformers' attention interface.
Another layer that passes information along the row (a recurrent state, a convolution, its own
attention) would silently mix trajectories. Such a model is trained with one trajectory in each
forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Packing = Literal["rows", "none"]
"""Many trajectories in a packed row, or one trajectory in each forward pass."""

WAY_OUT = (
    "set learner.packing: none, or use a model with full or sliding-window attention in every"
    " layer, such as Llama, Mistral, Qwen3 or OLMo 3"
)

NO_SHARES = (
    "learner.sequence_parallel_size = {size} splits packed rows, and this model is trained with one"
    " trajectory in each forward pass (learner.packing: none); set sequence_parallel_size: 1"
)

LAYER_TYPES = frozenset({"attention", "full_attention", "sliding_attention"})
"""Layers that packed attention supports. `attention` is the older name of `full_attention`."""

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
    "does not pass to its layers what packed attention needs, so packed trajectories cannot be kept"
    " apart in it": ("nemotron"),
    "does not use transformers' attention interface, so packed trajectories cannot be kept apart in"
    " it": (
        """
        biogpt bloom codegen falcon gpt-sw3 gpt_neo gpt_neox_japanese gptj mpt openai-gpt stablelm
        xglm"""
    ),
}
"""Reasons against packed rows, and the `model_type`s of transformers that each applies to."""

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
    "chooses the tokens to attend to with an indexer, which gets no gradient and in transformers"
    " may look ahead": (
        """
        axk2 deepseek_v32 deepseek_v4 glm_moe_dsa hy_v4 minimax_m3_vl_text qwen4_exp
        qwen4_exp_text"""
    ),
    "divides its own weights in eval mode": "rwkv",
}
"""Reasons why a model cannot be trained, and the `model_type`s that each applies to."""

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
"""Prefixes of settings that only models with recurrent layers have. They identify models that are
newer than the lists."""

MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Settings with which a model multiplies, divides or soft-caps its logits after the head."""
DIVISORS_THAT_MULTIPLY = ("hyperclovax",)
"""Models that multiply by `logits_scaling`."""


@dataclass(frozen=True, slots=True)
class Support:
    """How a model can be trained."""

    packing: Packing | None
    """The faster way that works; None = the model cannot be trained."""
    reason: str = ""
    """Why the model cannot be trained on packed rows, or at all; empty for packed rows. It is the
    end of a sentence that starts with "model_type 'x'"."""

    def text(self) -> str:
        """Return `packed`, `unpacked, because …` or `refused, because …`."""
        names: dict[str | None, str] = {"rows": "packed", "none": "unpacked", None: "refused"}
        name = names[self.packing]
        return f"{name}, because it {self.reason}" if self.reason else name


def support(config: Mapping[str, object]) -> Support:
    """Return how a model with this config.json can be trained, as far as the file shows."""
    parts = _parts(config)
    for part in parts:
        for reason, types in REFUSED.items():
            if part.get("model_type") in types.split():
                return Support(None, reason)
    why = next((found for part in parts for found in [_unpacked(part)] if found), None)
    return Support("none", why) if why else Support("rows")


def chosen_packing(config: Mapping[str, object], packing: Packing | None) -> Packing:
    """Check the setting `learner.packing` for this model. None chooses the faster way that works.

    Raises:
        ValueError: the model cannot be trained, or not with this packing.
    """
    found, name = support(config), config.get("model_type")
    if found.packing is None:
        raise ValueError(
            f"model_type {name!r} {found.reason}; use a decoder that predicts the next token"
        )
    if packing == "rows" and found.packing == "none":
        raise ValueError(
            f"model_type {name!r} {found.reason}, so learner.packing: rows is not possible;"
            f" {WAY_OUT}"
        )
    return packing or found.packing


def keeps_state(config: Mapping[str, object]) -> bool:
    """Whether some layers keep another state than the keys and values of each token."""
    return support(config).reason.startswith((RECURRENT, RECURRENT_SETTINGS, "has layers of type"))


def squares_scores(config: Mapping[str, object]) -> bool:
    """Whether the model's own attention stores scores of size tokens × tokens. For sinks, soft caps
    and its oldest models, transformers has only such an attention."""
    found = support(config)
    return found.packing == "none" and (
        "attention scores" in found.reason or "sinks" in found.reason or "interface" in found.reason
    )


def caps_attention(config: Mapping[str, object]) -> bool:
    """Whether the model soft-caps its attention scores. transformers' `sdpa` silently ignores the
    cap."""
    return any(part.get("attn_logit_softcapping") is not None for part in _parts(config))


def logit_change(config: Mapping[str, object]) -> tuple[float, float | None]:
    """Return the factor and the soft cap that the model applies to its logits after the head, in
    this order. Most models have (1.0, None)."""
    text = _parts(config)[-1]
    factor = 1.0
    for name in MULTIPLIERS:
        if text.get(name) is not None:
            factor *= _number(text[name])
    for name in DIVISORS:
        if text.get(name) is not None:
            multiplies = str(text.get("model_type")).startswith(DIVISORS_THAT_MULTIPLY)
            divisor = _number(text[name])
            factor = factor * divisor if multiplies else factor / divisor
    caps = [_number(text[name]) for name in SOFTCAPS if text.get(name) is not None]
    return factor, caps[0] if caps else None


def _parts(config: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Return the config, and the config of its text model if it has one."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, Mapping) else [config]


def _number(value: object) -> float:
    if not isinstance(value, int | float | str):
        raise TypeError(f"config.json contains {value!r} where a number is expected")
    return float(value)


LONG_ROPE = ("longrope", "su")
"""Types of RoPE with two sets of frequencies. The long set applies to a row that is longer than
`original_max_position_embeddings`. `su` is the older name."""
PHI3_ORIGINAL = 4096
"""transformers' default if a Phi-3 config has no `original_max_position_embeddings`."""


def uniform_rope_tokens(config: Mapping[str, object]) -> int | None:
    """Return the length, in tokens, up to which a model with LongRoPE uses the same frequencies for
    every trajectory. None for any other model.

    transformers chooses the frequencies by the largest position of the whole packed row. vLLM
    chooses them by the engine's longest sequence. So a longer trajectory would change all its
    neighbors in the row, and learner and generators would differ.
    """
    text = _parts(config)[-1] or config
    parameters = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(parameters, Mapping):
        return None
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
    return min(int(_number(original)) for original in originals)


def _unpacked(config: Mapping[str, object]) -> str | None:
    for reason, types in UNPACKED.items():
        if config.get("model_type") in types.split():
            return reason
    layer_types = config.get("layer_types")
    if isinstance(layer_types, Iterable) and (others := sorted({*layer_types} - LAYER_TYPES)):
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
