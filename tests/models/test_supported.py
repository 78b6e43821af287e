"""Models that would mix packed trajectories are trained unpacked or refused. The decision uses the
config, the class, and a check of the log-probs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from asyncrl.models.attention import register_attention, segment_attention
from asyncrl.models.isolation import check_isolation
from asyncrl.models.micro_batches import Example, micro_batch, token_example
from asyncrl.models.policy import Policy, load_policy
from asyncrl.models.segments import Segments
from asyncrl.models.supported import (
    caps_attention,
    chosen_packing,
    logit_change,
    support,
    uniform_rope_tokens,
)
from asyncrl.models.ulysses import SequenceRanks

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
WAY_OUT = (
    "set learner.packing: none, or use a model with full or sliding-window attention in every layer"
)


@cache
def source(model_type: str) -> str:
    """Return transformers' source code of a model."""
    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(model_type)
    return "".join(path.read_text() for path in sorted(folder.glob("modeling_*.py")))


SIGNS = {
    "a state": (
        r"_is_stateful ="
        r" True|linear_attention|causal_conv1d|selective_scan|GatedDelta|ShortConv|recurrent"
    ),
    "sinks or soft caps": r"s_aux|softcap=",
    "chunks or an indexer": r"chunked_attention|[Ii]ndexer",
}


@pytest.mark.parametrize("sign", SIGNS)
def test_models_of_transformers_with_such_layers_are_not_packed(sign: str) -> None:
    found = [
        name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if re.search(SIGNS[sign], source(name))
    ]
    assert len(found) > 5
    packed = [name for name in found if support({"model_type": name}).packing == "rows"]
    assert not packed, f"transformers has {sign} in {packed}, which would be packed"


def test_models_of_transformers_without_the_attention_interface_are_not_packed() -> None:
    without = [
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if "_supports_attention_backend = True" not in source(name)
    ]
    assert len(without) > 30 and not [
        name for name in without if support({"model_type": name}).packing == "rows"
    ]


def test_models_of_transformers_with_an_indexer_are_refused() -> None:
    found = [
        name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if re.search(r"[Ii]ndexer", source(name))
    ]
    assert len(found) > 3 and not [
        name for name in found if support({"model_type": name}).packing is not None
    ]


COMMON = (
    "deepseek_v3 gemma glm4 llama ministral ministral3 mistral mixtral olmo2 olmo3 phi3 qwen2"
    " qwen2_moe qwen3 qwen3_moe seed_oss smollm3 starcoder2"
)


@pytest.mark.parametrize("model_type", COMMON.split())
def test_common_models_are_packed(model_type: str) -> None:
    config = AutoConfig.for_model(model_type).to_dict()
    assert (
        support(config).text() == "packed"
        and chosen_packing(config, None) == "rows"
        and chosen_packing(config, "none") == "none"
    )


HYBRIDS = "qwen3_next qwen3_5_text lfm2 nemotron_h falcon_h1 gpt_oss gemma2"


@pytest.mark.parametrize("model_type", HYBRIDS.split())
def test_a_model_that_cannot_be_packed_is_trained_unpacked(model_type: str) -> None:
    config = AutoConfig.for_model(model_type).to_dict()
    assert (
        support(config).text().startswith("unpacked, because it has ")
        or "soft-caps" in support(config).text()
    )
    assert chosen_packing(config, None) == chosen_packing(config, "none") == "none"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "qwen3_next"}, "'qwen3_next' has recurrent or convolutional layers"),
        (
            {"model_type": "new", "layer_types": ["full_attention", "linear_attention", "conv"]},
            "has layers of type conv, linear_attention",
        ),
        (
            {"model_type": "new", "text_config": {"layer_types": ["chunked_attention"]}},
            "has layers of type chunked_attention",
        ),
        (
            {"model_type": "new", "mamba_d_state": 16},
            r"has settings of recurrent layers \(mamba_d_state\)",
        ),
        ({"model_type": "gpt_oss"}, "has attention sinks"),
        ({"model_type": "new", "attn_logit_softcapping": 50.0}, "soft-caps its attention scores"),
        ({"model_type": "gptj"}, "does not use transformers' attention interface"),
        ({"model_type": "nemotron"}, "does not pass to its layers what packed attention needs"),
    ],
)
def test_packed_rows_are_refused_with_model_reason_and_way_out(
    config: dict[str, Any], reason: str
) -> None:
    assert chosen_packing(config, None) == "none"
    with pytest.raises(
        ValueError, match=f"{reason}.*, so learner.packing: rows is not possible; {WAY_OUT}"
    ) as error:
        chosen_packing(config, "rows")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bart", "is not a causal language model"),
        ("bert", "is not a causal"),
        ("deepseek_v32", "an indexer"),
        ("rwkv", "divides its own weights"),
    ],
)
@pytest.mark.parametrize("packing", [None, "rows", "none"])
def test_a_model_that_cannot_be_trained_is_refused_with_any_packing(
    model_type: str, reason: str, packing: Any
) -> None:
    with pytest.raises(
        ValueError,
        match=f"model_type '{model_type}' .*{reason}.*; use a decoder that predicts the next token",
    ):
        chosen_packing(
            {"model_type": "multimodal", "text_config": {"model_type": model_type}}
            | {"model_type": model_type},
            packing,
        )
    assert support({"model_type": model_type}).text().startswith("refused, because it ")


@pytest.mark.parametrize(
    ("config", "change"),
    [
        ({"model_type": "llama"}, (1.0, None)),
        ({"model_type": "granite", "logits_scaling": 8.0}, (0.125, None)),
        ({"model_type": "hyperclovax", "logits_scaling": 8.0}, (8.0, None)),
        ({"model_type": "cohere", "logit_scale": 0.0625}, (0.0625, None)),
        ({"model_type": "falcon_h1", "lm_head_multiplier": 0.5}, (0.5, None)),
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, (1.0, 30.0)),
        ({"model_type": "gemma2", "final_logit_softcapping": "30"}, (1.0, 30.0)),
        ({"model_type": "gemma3", "text_config": {"final_logit_softcapping": None}}, (1.0, None)),
        ({"model_type": "gemma4", "text_config": {"final_logit_softcapping": 30}}, (1.0, 30.0)),
        ({"model_type": "recurrent_gemma", "logits_soft_cap": 30.0}, (1.0, 30.0)),
        (
            {
                "model_type": "muse_glimmer",
                "output_multiplier": 2.0,
                "final_logit_softcapping": 20.0,
            },
            (2.0, 20.0),
        ),
    ],
)
def test_a_change_of_the_logits_is_read_from_the_config(
    config: dict[str, Any], change: tuple[float, float | None]
) -> None:
    assert logit_change(config) == change


def test_a_soft_cap_on_attention_is_known() -> None:
    assert caps_attention({"attn_logit_softcapping": 50.0}) and caps_attention(
        {"text_config": {"attn_logit_softcapping": 50.0}}
    )
    assert not caps_attention({"attn_logit_softcapping": None})


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (
            {
                "model_type": "phi3",
                "max_position_embeddings": 99,
                "original_max_position_embeddings": 10,
                "rope_scaling": {"type": "longrope"},
            },
            10,
        ),
        (
            {"model_type": "phi3", "max_position_embeddings": 9999, "rope_scaling": {"type": "su"}},
            4096,
        ),
        (
            {
                "max_position_embeddings": 99,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 11,
                },
            },
            11,
        ),
        (
            {
                "max_position_embeddings": 99,
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "longrope",
                        "original_max_position_embeddings": 12,
                    }
                },
            },
            12,
        ),
        ({"max_position_embeddings": 99, "rope_parameters": {"rope_type": "longrope"}}, 99),
        (
            {
                "max_position_embeddings": 99,
                "rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 12},
            },
            None,
        ),
        ({"max_position_embeddings": 99, "rope_scaling": None}, None),
    ],
)
def test_long_rope_is_known_under_every_name(config: dict[str, Any], tokens: int | None) -> None:
    assert uniform_rope_tokens(config) == tokens == uniform_rope_tokens({"text_config": config})


def test_long_rope_changes_a_short_trajectory_behind_a_long_one() -> None:
    """This is why `uniform_rope_tokens` exists. A longer trajectory changes the log-probs of the
    shorter one when it needs the long frequencies."""
    torch.manual_seed(0)
    factors = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
    }
    config = Phi3Config(
        **SIZES,
        original_max_position_embeddings=16,
        rope_parameters=factors,
        pad_token_id=0,
        initializer_range=0.2,
        attn_implementation=register_attention(),
    )
    policy = Policy(Phi3ForCausalLM(config), 1.0)
    bound = uniform_rope_tokens(config.to_dict())
    assert bound == 16

    def of_the_shorter(longest: int) -> torch.Tensor:
        rows = [
            token_example((range(first, first + 3), range(first + 3, first + length)))
            for first, length in ((2, longest), (3, 12))
        ]
        with torch.no_grad():
            return policy(micro_batch(rows, [0, 1], "cpu"))[0][-9:]

    torch.testing.assert_close(of_the_shorter(bound), of_the_shorter(bound - 3), atol=1e-5, rtol=0)
    assert float((of_the_shorter(bound + 2) - of_the_shorter(bound)).abs().max()) > 1e-2


def test_loading_refuses_a_checkpoint(tmp_path: Path) -> None:
    Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])).save_pretrained(
        tmp_path
    )
    with pytest.raises(
        ValueError,
        match=(
            rf"model.path = '{tmp_path}': model_type 'lfm2' has recurrent or convolutional"
            rf" layers.*{WAY_OUT}"
        ),
    ):
        load_policy(str(tmp_path), torch.float32, 1.0, packing="rows")
    with pytest.raises(ValueError, match=r"learner\.sequence_parallel_size = 2 splits packed rows"):
        load_policy(str(tmp_path), torch.float32, 1.0, sequence_group=SequenceRanks(None, 0, 2))


def test_weights_that_are_no_numbers_are_named_as_such() -> None:
    model = qwen3()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(ValueError, match=r"^model\.path = 'model': its weights contain NaN or Inf"):
        check_isolation(Policy(model, 1.0), 50, "cpu", torch.float32, "model")


@pytest.mark.parametrize(
    ("name", "value"), [("_is_stateful", True), ("_supports_attention_backend", False)]
)
def test_loading_refuses_a_class_by_its_attributes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: bool
) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, name, value)
    with pytest.raises(
        ValueError, match=f"LlamaForCausalLM has a recurrent state or its own attention.*{WAY_OUT}"
    ):
        load_policy(str(tmp_path), torch.float32, 1.0)


def qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            **SIZES, head_dim=8, initializer_range=0.2, attn_implementation=register_attention()
        )
    )


def two_rows() -> list[Example]:
    tokens = np.arange(3, 9)
    return [
        Example(
            tokens + shift, 2, np.ones(4, bool), np.zeros(4, np.float32), 1.0, np.zeros(4, np.int32)
        )
        for shift in (0, 7)
    ]


def bypass(model: Qwen3ForCausalLM) -> None:
    """The second layer uses its own attention."""
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **rest: (hidden_states, None)


def twice(model: Qwen3ForCausalLM) -> None:
    """The second layer's attention also replaces the first's."""
    model.model.layers[0].self_attn = model.model.layers[1].self_attn


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (bypass, r"1 attended within segments \(1 times\)"),
        (twice, r"1 attended within segments \(2 times\)"),
    ],
)
def test_a_layer_that_bypasses_packed_attention_is_an_error(
    change: Callable[[Qwen3ForCausalLM], None], count: str
) -> None:
    model = qwen3()
    policy, batch = Policy(model, 1.0), micro_batch(two_rows(), [0, 1], "cpu")
    for _ in range(2):  # A batch can be used twice.
        policy(batch)
    change(model)
    with pytest.raises(
        ValueError, match=f"Qwen3ForCausalLM has 2 layers, of which {count}.*{WAY_OUT}"
    ):
        policy(batch)


def shifted(model: Qwen3ForCausalLM) -> None:
    """A convolution of two tokens before the first layer."""
    model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: output + 0.1 * output.roll(1, dims=1)
    )


def remembering(model: Qwen3ForCausalLM) -> None:
    """A recurrent state that sums up all earlier tokens."""
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, inputs, output: output + 0.01 * output.cumsum(1)
    )


def continuing(model: Qwen3ForCausalLM) -> None:
    """Position embeddings that do not restart with each trajectory."""
    places = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: output + places[: output.shape[1]]
    )


@pytest.mark.parametrize("leak", [shifted, remembering, continuing])
def test_the_check_finds_a_leak_that_no_list_names(
    leak: Callable[[Qwen3ForCausalLM], None],
) -> None:
    model = qwen3()
    policy = Policy(model, 1.0).eval()
    check_isolation(policy, 50, "cpu", torch.float32, "fine")
    leak(model)
    with pytest.raises(
        ValueError,
        match=f"model.path = 'leaky' carries one packed trajectory into the next: .*{WAY_OUT}",
    ):
        check_isolation(policy, 50, "cpu", torch.float32, "leaky")


@pytest.mark.parametrize("sharpness", [1, 30])
def test_the_check_tolerates_the_rounding_of_bfloat16(sharpness: int) -> None:
    """With a sharpness of 30, logits reach 80, where bfloat16 has a resolution of 0.5."""
    model = qwen3().bfloat16()
    with torch.no_grad():
        model.lm_head.weight *= sharpness
    policy = Policy(model, 0.1).eval()
    check_isolation(policy, 50, "cpu", torch.bfloat16, "fine")
    shifted(model)
    with pytest.raises(ValueError, match="carries one packed trajectory into the next"):
        check_isolation(policy, 50, "cpu", torch.bfloat16, "leaky")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"attention_mask": torch.ones(4, 4)}, "passes its own attention mask"),
        ({"softcap": 50.0}, "soft-caps its attention scores"),
        ({"s_aux": torch.zeros(2)}, "has attention sinks"),
        ({"is_causal": False}, "attends in both directions"),
        ({}, "has a sliding window of 3 tokens in its config and asks for None"),
    ],
)
def test_other_kinds_of_attention_are_refused(settings: dict[str, Any], reason: str) -> None:
    module = torch.nn.Module()
    module.config = Qwen3Config(
        **SIZES,
        use_sliding_window=True,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
    )
    tensors = [torch.zeros(1, 2, 4, 8)] * 3
    module.layer_idx = 0 if not settings else 1
    arguments = {"attention_mask": None, "segments": Segments.of([4], "cpu"), **settings}
    with pytest.raises(
        ValueError, match=f"Module {reason}, which packed attention does not compute; {WAY_OUT}"
    ):
        segment_attention(module, *tensors, **arguments)


def test_the_lists_need_no_torch() -> None:
    path = Path(__file__).parents[2] / "asyncrl" / "models" / "supported.py"
    assert not re.search(r"import (torch|transformers)|from (torch|transformers)", path.read_text())
    assert json.dumps(support({"model_type": "rwkv"}).text())
