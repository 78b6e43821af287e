"""Version tables of real checkpoints: the elements that each published tensor takes from the
model's parameters equal the checkpoint's tensor of that name."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from asyncrl.weights.outline import outline
from asyncrl.weights.published import CannotPublishError, VersionTable, version_table
from asyncrl.weights.stored import INDEX
from benchmarks.families import FAMILIES, SHAPE, family

RENAMED = ["qwen3", "qwen3_moe", "mixtral", "gpt_neox", "gemma3", "apertus", "glm4_moe", "gpt_oss"]
"""Families whose parameters transformers renames, fuses or extends by buffers, and a plain one."""


def contents(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in path.glob("model*.safetensors")
        for name, tensor in load_file(file).items()
    }


def from_parameters(
    table: VersionTable, parameters: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors that come from the parameters, copied in small parts."""
    found = {}
    for tensor in table.tensors:
        if not tensor.pieces:
            continue
        target = torch.full((tensor.stored.elements,), float("nan"))
        for part in (part for piece in tensor.pieces for part in piece.parts(500)):
            source = parameters[part.parameter].detach().contiguous().reshape(-1)
            target.as_strided(part.shape, part.to_strides, part.to).copy_(
                source.as_strided(part.shape, part.strides, part.start)
            )
        found[tensor.name] = target.view(tensor.stored.shape)
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in RENAMED else pytest.mark.slow) for name in FAMILIES],
)
def test_a_version_is_the_whole_checkpoint_under_its_names(name: str, tmp_path: Path) -> None:
    path = family(name).save(tmp_path)
    table = version_table(path)
    stored = contents(path)
    assert {tensor.name for tensor in table.tensors} == set(stored) and not table.left_out
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    assert dict(table.parameters) == {
        name: tuple(parameter.shape) for name, parameter in parameters.items()
    }
    for key, values in from_parameters(table, parameters).items():
        assert torch.equal(values, stored[key]), key
    kept = {tensor.name for tensor in table.tensors if not tensor.pieces}
    assert len(kept) == sum(1 for name, _ in model.named_buffers() if name in model.state_dict())


def rewritten(path: Path, change: object) -> Path:
    """The checkpoint in one file, with its dictionary of tensors changed by `change`."""
    tensors = contents(path)
    change(tensors)  # type: ignore[operator]
    for file in path.glob("model*.safetensors*"):
        file.unlink()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_a_saved_copy_of_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    path = family("qwen3").save(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in {tensor.name for tensor in version_table(path).tensors}
    rewritten(
        path,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    parts = {
        tensor.name: {piece.parameter for piece in tensor.pieces}
        for tensor in version_table(path).tensors
    }
    assert (
        parts["lm_head.weight"]
        == parts["model.embed_tokens.weight"]
        == {"model.embed_tokens.weight"}
    )
    untied = {
        tensor.name: tensor.pieces[0].parameter
        for tensor in version_table(
            family("qwen3").save(tmp_path / "untied", tie_word_embeddings=False)
        ).tensors
    }
    assert untied["lm_head.weight"] == "lm_head.weight"


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_tied_head_with_values_of_its_own_is_refused(name: str, tmp_path: Path) -> None:
    """For example a base model into which an adapter of the head was merged. ZeRO-3's loading would
    tie it, and vLLM would drop it."""
    path = family(name).save(tmp_path, tie_word_embeddings=True)
    embedding = next(key for key in contents(path) if key.endswith("embed_tokens.weight"))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors[embedding].clone()
        tensors["lm_head.weight"][-1, -1] += 1

    rewritten(path, change)
    assert "tie_word_embeddings: false" in str(outline(path).refusal)
    with pytest.raises(CannotPublishError, match=r"ties '.*' to '.*', and the files hold other"):
        version_table(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    table = version_table(path)
    parameters = dict(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters()
    )
    assert torch.equal(
        from_parameters(table, parameters)["lm_head.weight"], contents(path)["lm_head.weight"]
    )


def test_a_tied_head_with_the_same_nan_is_the_embedding(tmp_path: Path) -> None:
    path = family("qwen3").save(tmp_path, tie_word_embeddings=True)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][0, 0] = float("nan")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert outline(rewritten(path, change)).refusal is None


def test_names_without_the_base_model_prefix_are_kept(tmp_path: Path) -> None:
    """The original GPT-2 checkpoints have such names."""
    path = family("gpt2").save(tmp_path)
    rewritten(
        path,
        lambda tensors: [
            tensors.update({name.removeprefix("transformer."): tensors.pop(name)})
            for name in list(tensors)
        ],
    )
    table = version_table(path)
    assert {tensor.name for tensor in table.tensors if tensor.pieces} == set(
        contents(path)
    ) and "wte.weight" in contents(path)
    parameters = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    assert all(
        torch.equal(values, contents(path)[name])
        for name, values in from_parameters(table, parameters).items()
    )


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen3", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.0.attn.masked_bias"),
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt_neox", "gpt_neox.layers.1.attention.bias"),
        ("glm4_moe", "model.layers.2.eh_proj.weight"),
        ("glm4_moe", "model.layers.92.eh_proj.weight"),
    ],
)
def test_tensors_that_no_model_of_the_family_loads_are_left_out(
    tmp_path: Path, name: str, key: str
) -> None:
    """Buffers of old checkpoints, and layers that predict several tokens (GLM-4.5 has one)."""
    path = family(name).save(tmp_path)
    extra = {key: torch.ones(1, 1, 4, 4)}
    table = version_table(rewritten(path, lambda tensors: tensors.update(extra)))
    assert table.left_out == (key,)


def test_the_text_model_of_a_composite_checkpoint_is_trained(tmp_path: Path) -> None:
    """Such as Qwen3.5's, which has an image model too. That stays as stored."""
    linear = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 32}
    layers = {"linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]}
    images = {"depth": 1, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2}
    config = Qwen3_5Config(
        text_config={**SHAPE, "head_dim": 32, **linear, **layers},
        vision_config={**images, "out_hidden_size": 64},
    )
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    rewritten(tmp_path, lambda tensors: tensors.update({"mtp.norm.weight": torch.ones(64)}))
    table, stored = version_table(tmp_path), contents(tmp_path)
    assert table.architecture == "Qwen3_5ForCausalLM" and table.left_out == ("mtp.norm.weight",)
    kept = {tensor.name for tensor in table.tensors if not tensor.pieces}
    assert kept == {name for name in stored if name.startswith("model.visual.")} and kept
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    made = from_parameters(table, dict(model.named_parameters()))
    assert all(torch.equal(values, stored[key]) for key, values in made.items())


def test_buffers_keep_their_type(tmp_path: Path) -> None:
    table = version_table(family("glm4_moe").save(tmp_path))
    kept = {tensor.name: tensor.dtype("bfloat16") for tensor in table.tensors if not tensor.pieces}
    assert kept == {"model.layers.1.mlp.gate.e_score_correction_bias": "float32"}
    assert {tensor.dtype("bfloat16") for tensor in table.tensors if tensor.pieces} == {"bfloat16"}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen3", "model.layers.0.self_attn.q_proj.bias"),
        ("qwen3", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
        ("qwen3", "model.layers.0.self_attn.q_proj.lora_A.default.weight"),
        ("qwen3", "model.layers.2.input_layernorm.weight"),
        ("qwen3", "lm_head.bias"),
        ("qwen3", "score.weight"),
        ("qwen3", "model.steps"),
        ("gpt2", "wte.weight"),
        ("gemma3", "audio_tower.layers.0.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.gate.bias"),
        ("glm4_moe", "model.layers.2.input_layernorm.weight"),
    ],
)
def test_tensors_without_a_place_in_the_model_are_refused(
    tmp_path: Path, name: str, key: str
) -> None:
    """Dropped in silence, another model than the checkpoint's would be trained."""
    path = family(name).save(tmp_path)
    rewritten(path, lambda tensors: tensors.update({key: torch.ones(4)}))
    for reward_model in False, True:
        refusal = outline(path, reward_model).refusal
        assert f"the checkpoint's tensor {key!r} has no parameter in " in str(refusal)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight"),
            (
                "cannot make the parameters of Qwen3MoeForCausalLM from the checkpoint's tensors:"
                " some are missing"
            ),
        ),
        (
            lambda tensors: tensors.pop("model.norm.weight"),
            (
                r"lacks 'model.norm.weight' of Qwen3MoeForCausalLM, which would start from new"
                r" values"
            ),
        ),
        (
            lambda tensors: tensors.pop("lm_head.weight"),
            "lacks 'lm_head.weight' of Qwen3MoeForCausalLM",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(8)}),
            r"'model.norm.weight' has shape \(8,\) in the checkpoint, and \(64,\) in Qwen3Moe",
        ),
        (
            lambda tensors: tensors.update(
                {"model.scale": torch.ones(4, dtype=torch.float8_e4m3fn)}
            ),
            "'model.scale' of the checkpoint has type F8_E4M3: it is q",
        ),
    ],
)
def test_a_checkpoint_that_the_model_does_not_fit_is_refused(
    tmp_path: Path, change: object, words: str
) -> None:
    path = rewritten(family("qwen3_moe").save(tmp_path), change)
    with pytest.raises(CannotPublishError, match=words) as error:
        version_table(path)
    assert "\n" not in str(error.value)


def test_a_buffer_that_is_missing_is_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    path = rewritten(family("glm4_moe").save(tmp_path), lambda tensors: tensors.pop(name))
    with pytest.raises(CannotPublishError, match=f"lacks '{name}' of Glm4MoeForCausalLM"):
        version_table(path)


def test_quantized_weights_are_refused_by_the_config(tmp_path: Path) -> None:
    path = family("qwen3").save(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(CannotPublishError, match="quantization_config"):
        version_table(path)


def test_the_outline_is_the_same_from_another_process_and_follows_the_files(tmp_path: Path) -> None:
    path = family("apertus").save(tmp_path, max_shard_size="60KB")
    assert len(json.loads((path / INDEX).read_text())["weight_map"]) == len(contents(path))
    here = outline(path)
    assert outline(path) is here and here.refusal is None
    assert here.nbytes("float32") == sum(tensor.nbytes for tensor in contents(path).values())
    assert here.nbytes("bfloat16") == here.nbytes("float32") - 2 * here.trained
    assert sum(here.as_stored.values()) == here.nbytes("float32") - 4 * here.trained > 0
    command = [sys.executable, "-m", "asyncrl.weights.outline", str(path), "false", "null"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout) == json.loads(json.dumps(asdict(here)))
    rewritten(path, lambda tensors: tensors.pop("model.norm.weight"))
    refusal = outline(path).refusal
    assert refusal is not None and "lacks 'model.norm.weight'" in refusal
