"""Tiny random checkpoints of many decoder families, written with transformers.

    path = family("mixtral").save(tmp_path / "mixtral")

A checkpoint has its family's typical settings (experts, windows, soft caps, sinks, recurrent
layers) and at least one layer of each kind. No parameter or saved buffer is constant, so
a lost tensor changes the log-probs. Dropout and jitter are those of the family's default config.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 288
"""Rows of the embedding. As in most released models, there are more than the tokenizer's 260
tokens."""

SPREAD = 0.1
"""Smallest standard deviation of each tensor. With the usual 0.02, the attention of such a small
model is nearly uniform, so a leak between trajectories would be smaller than rounding."""

LEGACY = ("global_head_dim", "attn_layer_indices")
"""Settings that config classes accept in addition to their fields."""

SHAPE: Mapping[str, object] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Settings of nearly all families. Heads have width 32, the minimum of vLLM's CPU attention."""


@dataclass(frozen=True)
class Family:
    """One architecture, and the settings of its tiny checkpoint."""

    name: str
    """The name for tests: the `model_type`, if that has only one entry."""
    title: str
    """The official name."""
    model_type: str
    settings: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the config class, in addition to `SHAPE`. None removes an argument."""
    text_settings: Mapping[str, object] | None = None
    """Arguments of a multimodal checkpoint's `text_config`. `SHAPE` is then added to these."""
    published: Mapping[str, object] = field(default_factory=dict)
    """Entries in the `config.json` of published checkpoints that transformers does not write, but
    vLLM reads."""

    def config(self, **changes: object) -> PreTrainedConfig:
        """Return the transformers config. `changes` are settings of the text model.

        Raises:
            ValueError: the config class has no such setting.
        """
        from transformers import AutoConfig

        if self.text_settings is None:
            return _config(self.model_type, {**SHAPE, **self.settings, **changes})
        text = {**SHAPE, **self.text_settings, **changes}
        return AutoConfig.for_model(self.model_type, text_config=text, **self.settings)

    def build(self, seed: int = 0, **changes: object) -> PreTrainedModel:
        """Return the model in float32 and eval mode. It depends only on seed and changes. The
        global random state is restored."""
        import torch
        from transformers import AutoModelForCausalLM

        with _seeded(seed):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                self.config(**changes), dtype=torch.float32, trust_remote_code=False
            )
            _stir(model)
        model.eval()
        return model

    def save(
        self, path: str | Path, seed: int = 0, max_shard_size: str = "50GB", **changes: object
    ) -> Path:
        """Write config, safetensors, generation config and `byte_tokenizer()` to a folder, and
        return the folder.

        Args:
            seed: seed of all parameters and buffers.
            max_shard_size: as for `save_pretrained`. "60KB" gives several files and an index.
            changes: settings of the text model's config, such as `num_hidden_layers=4`.
        """
        path = Path(path)
        self.build(seed, **changes).save_pretrained(path, max_shard_size=max_shard_size)
        if self.published:
            tree = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(tree | self.published, indent=2))
        byte_tokenizer().save_pretrained(path)
        return path


def family(name: str) -> Family:
    """Return the family with this name.

    Raises:
        KeyError: `FAMILIES` has no such name.
    """
    if name not in FAMILIES:
        raise KeyError(f"there is no family {name!r}; use one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer without merges. Ids 0 to 3 are special tokens, and each UTF-8
    byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = {
        token: index
        for index, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def _config(model_type: str, settings: Mapping[str, object]) -> PreTrainedConfig:
    """Make a config with these settings. transformers silently accepts unknown settings, so this
    checks them."""
    from transformers import CONFIG_MAPPING, AutoConfig

    cls = CONFIG_MAPPING[model_type]
    known = {*cls.__dataclass_fields__, *cls.attribute_map, *LEGACY}
    settings = {name: value for name, value in settings.items() if value is not None}
    if unknown := sorted(set(settings) - known):
        raise ValueError(f"{cls.__name__} has no setting {', '.join(unknown)}")
    return AutoConfig.for_model(model_type, **settings)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _stir(model: PreTrainedModel) -> None:
    """Give each tensor of the checkpoint a standard deviation of at least `SPREAD`: add noise to
    constants, and scale other weights up."""
    import torch

    saved = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name in sorted(saved):
            tensor = saved[name]
            if not tensor.is_floating_point() or tensor.numel() == 0:
                continue
            spread = float(tensor.std(correction=0))
            if spread < 1e-3:
                tensor.add_(torch.randn(tensor.shape) * SPREAD)
            elif spread < SPREAD and tensor.ndim > 1:
                tensor.mul_(SPREAD / spread)
            if not tensor.isfinite().all():
                raise ValueError(f"{type(model).__name__}: {name} is not finite")


def _made(title: str, name: str, /, **settings: object) -> Family:
    """Make the family of a text model whose name is its `model_type`."""
    return Family(name, title, name, settings)


SLIDING = ["sliding_attention", "full_attention"]
LINEAR = ["linear_attention", "full_attention"]
MIXTURE: dict[str, object] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
DEEPSEEK: dict[str, object] = {
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
MAMBA: dict[str, object] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
DELTA: dict[str, object] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": LINEAR,
    "head_dim": 32,
}
GRANITE: dict[str, object] = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
}
VISION: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA4: dict[str, object] = {
    "head_dim": 32,
    "global_head_dim": 32,
    "layer_types": [*SLIDING, *SLIDING],
    "num_hidden_layers": 4,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 2,
    "final_logit_softcapping": 3.0,
}

FAMILIES: Mapping[str, Family] = {
    each.name: each
    for each in (
        _made("Llama", "llama", attention_bias=True, mlp_bias=True, head_dim=32),
        _made("Mistral", "mistral", sliding_window=6, head_dim=32),
        _made("Ministral", "ministral", sliding_window=6, layer_types=SLIDING, head_dim=32),
        _made("Qwen2", "qwen2"),
        _made("Qwen2-MoE", "qwen2_moe", **MIXTURE, shared_expert_intermediate_size=48),
        _made("Qwen3", "qwen3", head_dim=32, tie_word_embeddings=True),
        _made("Qwen3-MoE", "qwen3_moe", **MIXTURE, mlp_only_layers=[0], norm_topk_prob=True),
        _made("Mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2, head_dim=32),
        _made("GPT-NeoX", "gpt_neox", num_key_value_heads=None),
        _made("GPT-2", "gpt2", intermediate_size=None, num_key_value_heads=None),
        _made(
            "StarCoder (GPT-BigCode)",
            "gpt_bigcode",
            intermediate_size=None,
            num_key_value_heads=None,
        ),
        _made(
            "OPT",
            "opt",
            intermediate_size=None,
            num_key_value_heads=None,
            ffn_dim=96,
            word_embed_proj_dim=64,
        ),
        _made("Seed-OSS", "seed_oss", head_dim=32),
        _made("Gemma", "gemma", head_dim=32),
        _made(
            "Gemma 2",
            "gemma2",
            head_dim=32,
            sliding_window=6,
            layer_types=SLIDING,
            query_pre_attn_scalar=32,
            attn_logit_softcapping=1.0,
            final_logit_softcapping=3.0,
        ),
        _made(
            "Gemma 3 (text)",
            "gemma3_text",
            head_dim=32,
            sliding_window=6,
            layer_types=SLIDING,
            query_pre_attn_scalar=32,
        ),
        Family(
            "gemma3",
            "Gemma 3 (multimodal)",
            "gemma3",
            {
                "vision_config": {"model_type": "siglip_vision_model", **VISION},
                "mm_tokens_per_image": 4,
                "boi_token_index": 280,
                "eoi_token_index": 281,
                "image_token_index": 282,
            },
            text_settings={
                "head_dim": 32,
                "sliding_window": 6,
                "layer_types": SLIDING,
                "query_pre_attn_scalar": 32,
            },
        ),
        _made("Gemma 4 (text)", "gemma4_text", **GEMMA4),
        _made("Phi", "phi", num_key_value_heads=2, qk_layernorm=True),
        _made("Phi-3", "phi3", sliding_window=6),
        Family(
            "phi3_longrope",
            "Phi-3 with LongRoPE",
            "phi3",
            {
                "max_position_embeddings": 512,
                "original_max_position_embeddings": 64,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0 + 0.01 * i for i in range(16)],
                    "long_factor": [1.0 + 0.25 * i for i in range(16)],
                    "original_max_position_embeddings": 64,
                },
            },
        ),
        Family(
            "phimoe",
            "Phi-3.5-MoE",
            "phimoe",
            {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True},
            published={"architectures": ["PhiMoEForCausalLM"]},
        ),
        _made("OLMo", "olmo", clip_qkv=1.0),
        _made("OLMo 2", "olmo2"),
        _made("OLMo 3", "olmo3", sliding_window=6, layer_types=SLIDING),
        _made("OLMoE", "olmoe", num_experts=4, num_experts_per_tok=2),
        _made("Granite", "granite", **GRANITE),
        _made("GraniteMoE", "granitemoe", **GRANITE, num_local_experts=4, num_experts_per_tok=2),
        _made(
            "GraniteMoE with shared experts",
            "granitemoeshared",
            **GRANITE,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=48,
        ),
        _made(
            "Granite 4 (hybrid)",
            "granitemoehybrid",
            **GRANITE,
            **MAMBA,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=48,
            layer_types=LINEAR,
        ),
        _made("Cohere Command R", "cohere", use_qk_norm=True, logit_scale=0.25),
        _made(
            "Cohere Command R7B", "cohere2", sliding_window=6, layer_types=SLIDING, logit_scale=0.25
        ),
        _made(
            "StarCoder2",
            "starcoder2",
            sliding_window=6,
            residual_dropout=0.1,
            embedding_dropout=0.1,
        ),
        _made("StableLM", "stablelm", use_qkv_bias=True, hidden_dropout=0.1),
        _made("GLM", "glm", head_dim=32),
        _made("GLM-4", "glm4", head_dim=32, attention_bias=True),
        Family(
            "glm4_moe",
            "GLM-4.5 (MoE)",
            "glm4_moe",
            {
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "n_shared_experts": 1,
                "moe_intermediate_size": 48,
                "use_qk_norm": True,
                "attention_bias": True,
                "routed_scaling_factor": 2.5,
            },
            published={"head_dim": 32},
        ),
        _made("Apertus", "apertus"),
        _made("Arcee", "arcee", head_dim=32),
        _made("SmolLM3", "smollm3", no_rope_layers=[1, 0]),
        _made("Ernie 4.5", "ernie4_5", head_dim=32, use_bias=True),
        _made(
            "Ernie 4.5 (MoE)",
            "ernie4_5_moe",
            moe_num_experts=4,
            moe_k=2,
            moe_num_shared_experts=1,
            moe_intermediate_size=48,
        ),
        _made("EXAONE 4", "exaone4", sliding_window=6, layer_types=SLIDING),
        _made("Hunyuan", "hunyuan_v1_dense", head_dim=32),
        _made("Nemotron", "nemotron", head_dim=32),
        _made("DeepSeek-V2", "deepseek_v2", **DEEPSEEK, topk_method="group_limited_greedy"),
        Family(
            "deepseek_v3",
            "DeepSeek-V3",
            "deepseek_v3",
            DEEPSEEK,
            published={"topk_method": "noaux_tc"},
        ),
        Family(
            "minimax_m2",
            "MiniMax-M2",
            "minimax_m2",
            {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
            published={
                "rotary_dim": 32,
                "scoring_func": "sigmoid",
                "use_qk_norm": True,
                "use_routing_bias": True,
            },
        ),
        _made("Qwen3-Next", "qwen3_next", **DELTA, **MIXTURE, shared_expert_intermediate_size=48),
        _made("Qwen3.5 (text)", "qwen3_5_text", **DELTA),
        Family(
            "lfm2",
            "LFM2",
            "lfm2",
            {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
            published={"conv_dim": 64, "conv_dim_out": 64, "block_dim": 64},
        ),
        _made(
            "Nemotron-H",
            "nemotron_h",
            num_hidden_layers=None,
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
            head_dim=32,
            ssm_state_size=16,
            mamba_num_heads=4,
            mamba_head_dim=32,
            n_groups=1,
            chunk_size=8,
            n_routed_experts=4,
            moe_intermediate_size=48,
            moe_shared_expert_intermediate_size=48,
        ),
        _made(
            "Falcon-H1",
            "falcon_h1",
            **MAMBA,
            mamba_d_ssm=128,
            lm_head_multiplier=0.5,
            embedding_multiplier=2.0,
            key_multiplier=0.5,
            attention_out_multiplier=0.5,
        ),
        _made(
            "GPT-OSS",
            "gpt_oss",
            head_dim=32,
            sliding_window=6,
            layer_types=SLIDING,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        _made("Bamba", "bamba", **MAMBA, attn_layer_indices=[1]),
        _made(
            "Jamba",
            "jamba",
            num_experts=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=8,
            use_mamba_kernels=False,
        ),
        _made(
            "Mamba 2",
            "mamba2",
            intermediate_size=None,
            num_attention_heads=None,
            num_key_value_heads=None,
            max_position_embeddings=None,
            num_heads=4,
            head_dim=32,
            state_size=16,
            n_groups=1,
            chunk_size=8,
        ),
    )
}
"""Families by name."""
