"""An adapter (LoRA) on the learner: its steps, checkpoints and exports beside a plain PEFT loop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_ranks import on_ranks
from recorded import VOCABULARY, learner_config
from safetensors.torch import load_file, save_file

from asyncrl.config import Config, LoraConfig
from asyncrl.contracts.offline_rows import token_table
from asyncrl.models.adapters import (
    add_adapter,
    add_squares,
    low_rank,
    merged,
    published_name,
    with_factors,
)
from asyncrl.preflight import learner_spec
from benchmarks.families import family

STEPS, RATE = 10, 1e-2
EOS, STOP = 2, 7
LORA = {"r": 4, "alpha": 16}


def rows_of(step: int) -> list[Any]:
    drawn = np.random.default_rng(step % 3)
    return [
        (drawn.integers(3, VOCABULARY, 4).tolist(), drawn.integers(3, VOCABULARY, count).tolist())
        for count in (3, 7, 5)
    ]


def config_of(model_path: Path, world_size: int, **lora: Any) -> Config:
    config = learner_config(model_path, world_size, weight_decay=0.1)
    rollout = config.rollout.model_copy(
        update={"rollout_stop": ["A"], "rollout_stop_token_ids": [STOP]}
    )
    return config.model_copy(
        update={"lora": LoraConfig.model_validate(LORA | lora), "rollout": rollout}
    )


def train_and_save(rank: int, world_size: int, config: Config, folder: Path) -> Any:
    """Ten steps, a checkpoint, an export, and two more steps."""
    from asyncrl.learning.engine.adapter import gather_matrices
    from asyncrl.learning.engine.state import load_state
    from asyncrl.learning.rank import LearnerRank
    from asyncrl.learning.steps.supervised_step import supervised_step

    state = load_state(rank, learner_spec(config))
    losses = []
    for step in range(STEPS + 2):
        if step == STEPS:
            files = state.save(folder / f"saved-{world_size}")
            matrices = gather_matrices(state)
            learner = LearnerRank(state, "run", 0)
            learner.export_hf(folder / f"hf-{world_size}", config.model.path)
        losses.append(supervised_step(state, token_table(rows_of(step)))["loss"])
    sizes = {name: size for name, (size, _) in files.items()}
    trained = [name for name, part in state.engine.module.named_parameters() if part.requires_grad]
    return losses, {name: one.numpy() for name, one in matrices.items()}, sizes, trained


def resume(rank: int, world_size: int, config: Config, folder: Path) -> Any:
    """The losses of two steps from the checkpoint, and of one from the exported adapter."""
    from asyncrl.learning.engine.state import load_state
    from asyncrl.learning.steps.supervised_step import supervised_step

    losses = []
    assert config.lora is not None
    loaded = {"load": str(folder / f"hf-{world_size}" / "adapter")}
    for lora in (config.lora, config.lora.model_copy(update=loaded)):
        state = load_state(rank, learner_spec(config.model_copy(update={"lora": lora})))
        if lora.load is None:
            state.load(folder / f"saved-{world_size}")
        losses += [
            supervised_step(state, token_table(rows_of(step)))["loss"]
            for step in range(STEPS, STEPS + (2 if lora.load is None else 1))
        ]
        state.engine.destroy()
        del state  # while it exists, transformers loads every model sharded
    return losses


def plain_loop(model_path: Path, lora: LoraConfig, seed: int) -> tuple[list[float], Any]:
    """PEFT's own layers in one process, one row at a time, with torch's AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    add_adapter(model, lora, seed)
    trained = [part for part in model.parameters() if part.requires_grad]
    groups = [
        {"params": [part for part in trained if part.ndim > 1], "weight_decay": 0.1},
        {"params": [part for part in trained if part.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(STEPS):
        rows = rows_of(step)
        targets = sum(len(following) for _, following in rows)
        total = torch.zeros(())
        for prompt, following in rows:
            ids = torch.tensor([[*prompt, *following]])
            logprobs = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            total = total - logprobs.gather(-1, torch.tensor(following)[:, None]).sum() / targets
        total.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    matrices = {
        published: part.detach()
        for name, part in model.named_parameters()
        if (published := published_name(name))
    }
    return losses, (model, matrices)


@pytest.mark.parametrize(
    ("world_size", "dora"),
    [
        (1, False),
        pytest.param(1, True, marks=pytest.mark.slow),
        *(pytest.param(2, dora, marks=pytest.mark.slow) for dora in (0, 1)),
    ],
    ids=["lora", "dora", "lora-two", "dora-two"],
)
def test_steps_checkpoints_and_exports_are_those_of_a_plain_loop(
    world_size: int, dora: bool, model_path: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = config_of(model_path, world_size, use_dora=bool(dora))
    assert config.lora is not None
    (losses, matrices, sizes, trained), *_ = on_ranks(world_size, train_and_save, config, tmp_path)
    expected, (model, plain) = plain_loop(model_path, config.lora, config.seed)
    assert losses[:STEPS] == pytest.approx(expected, rel=1e-5)
    assert losses[0] > losses[9] and len(trained) == 2 * 7 * (3 if dora else 2)
    assert set(matrices) == set(plain)
    for name, matrix in matrices.items():
        np.testing.assert_allclose(matrix, plain[name], atol=2e-5, err_msg=name)
    # The checkpoint has the adapter, its moments and its copy in float32, and no frozen weight.
    elements = sum(matrix.size for matrix in matrices.values())
    whole = sum(part.numel() for part in model.parameters()) - elements
    assert sum(size for name, size in sizes.items() if name.endswith(".pt")) < 4 * whole
    *resumed, loaded = on_ranks(world_size, resume, config, tmp_path)[0]
    assert resumed == losses[STEPS:] and loaded == losses[STEPS]

    exported = tmp_path / f"hf-{world_size}"
    ids = torch.arange(3, 30)[None]
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(exported)(input_ids=ids).logits
        before = base(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, exported / "adapter")(input_ids=ids).logits
    assert (merged - wanted).abs().max() < 1e-4 < (before - wanted).abs().max()
    assert (adapted - wanted).abs().max() < 1e-4
    for folder in (exported, exported / "adapter"):
        written = GenerationConfig.from_pretrained(folder)
        assert written.eos_token_id == [EOS, STOP] and written.stop_strings == ["A"]
    settings = json.loads((exported / "adapter" / "adapter_config.json").read_text())
    assert settings["r"] == 4 and settings["base_model_name_or_path"] == str(model_path)
    assert settings["use_dora"] == bool(dora)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_new_dora_adapter_is_merged_without_a_change(dtype: torch.dtype, tmp_path: Path) -> None:
    """PEFT's own output is then exactly that of the base model, also in bfloat16."""
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=2, use_dora=True)
    model = AutoModelForCausalLM.from_pretrained(family("llama").save(tmp_path), dtype=dtype)
    before = {name: part.detach().clone() for name, part in model.named_parameters()}
    add_adapter(model, lora, seed=0)
    matrices = {
        published: part.detach()
        for name, part in model.named_parameters()
        if (published := published_name(name))
    }
    adapters, squares = low_rank(lora, matrices), dict[str, torch.Tensor]()
    for name in adapters:
        flat = before[name].reshape(-1)
        for start in range(0, flat.numel(), 100):
            add_squares(adapters, squares, name, start, flat[start : start + 100])
    adapters = with_factors(adapters, squares)
    assert adapters
    for name in adapters:
        flat = before[name].reshape(-1)
        assert torch.allclose(merged(adapters, name, 0, flat), flat, rtol=1e-6, atol=0), name


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2_moe", "mixtral"])
def test_every_linear_layer_but_the_head_gets_matrices(name: str, tmp_path: Path) -> None:
    from asyncrl.models.policy import load_policy

    policy = load_policy(str(family(name).save(tmp_path)), torch.float32, 1.0)
    head = policy.model.get_output_embeddings()
    linear = [
        module
        for module in policy.model.modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    ]
    add_adapter(policy.model, LoraConfig(r=2), seed=0)
    names = [name for name, part in policy.model.named_parameters() if part.requires_grad]
    assert len(names) == 2 * len(linear) and policy.model.get_output_embeddings() is head
    assert not any(".experts." in name for name in names), "experts are fused parameters"


def test_a_mixture_whose_experts_peft_adapts_needs_named_layers(tmp_path: Path) -> None:
    from asyncrl.models.policy import load_policy

    path = str(family("qwen3_moe").save(tmp_path))
    with pytest.raises(ValueError, match=r"name the attention's layers in lora\.target_modules"):
        add_adapter(load_policy(path, torch.float32, 1.0).model, LoraConfig(r=2), seed=0)
    model = load_policy(path, torch.float32, 1.0).model
    add_adapter(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), seed=0)
    names = [name for name, part in model.named_parameters() if part.requires_grad]
    assert names and all(".q_proj." in name or ".v_proj." in name for name in names)


def test_a_layer_that_cannot_have_an_adapter_is_refused(tmp_path: Path) -> None:
    from asyncrl.models.policy import load_policy

    policy = load_policy(str(family("llama").save(tmp_path)), torch.float32, 1.0)
    for target in ("query", "lm_head", "proj"):
        lora = LoraConfig(target_modules=["q_proj", target])
        with pytest.raises(ValueError, match=rf"'{target}' is not a linear.*'down_proj'.*'v_proj'"):
            add_adapter(policy.model, lora, seed=0)


@pytest.mark.slow
def test_weights_that_are_no_numbers_are_refused_at_the_start(
    model_path: Path, tmp_path: Path
) -> None:
    """On both ranks, although the value is in the shard of one."""
    other = shutil.copytree(model_path, tmp_path / "other")
    (file,) = other.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][-1, -1] = float("inf")
    save_file(tensors, file, metadata={"format": "pt"})
    for refusal in on_ranks(2, refused_start, other):
        assert refusal.startswith(f"model.path = '{other}': its weights contain NaN or Inf")


def refused_start(rank: int, world_size: int, path: Path) -> str:
    from asyncrl.learning.engine.state import load_state

    try:
        load_state(rank, learner_spec(learner_config(path, world_size)))
    except ValueError as error:
        return str(error)
    return ""
