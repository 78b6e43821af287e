"""Versions gathered from the shards of one and two ranks equal the checkpoint that transformers
saves, for families whose parameters it renames or fuses. Every parameter is changed first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plain_ranks import on_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.families import family

FAMILIES = ["qwen3_moe", "mixtral", "gpt_neox", "gemma3", "apertus", "glm4_moe", "phi3"]
BUCKET_BYTES = 4096
"""Far below the largest tensor, so a bucket has that tensor's size. Parts are 1/16 of it."""

BUFFERS = ("e_score_correction_bias", "act_fn.beta", "act_fn.eps")


def change(name: str, parameter: torch.Tensor) -> None:
    """Add noise to the parameter, seeded by its name and size."""
    generator = torch.Generator().manual_seed(len(name) * 1000 + parameter.numel())
    with torch.no_grad():
        parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    paths = {name: family(name).save(folder / name, max_shard_size="100KB") for name in FAMILIES}
    paths["qwen3 tied"] = family("qwen3").save(folder / "tied", tie_word_embeddings=True)
    # The same weights in another format. No index names this file.
    (paths["mixtral"] / "consolidated.safetensors").write_bytes(b"not even safetensors")
    return paths


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_version_equals_the_checkpoint_of_transformers(
    checkpoints: dict[str, Path], tmp_path: Path, world_size: int
) -> None:
    on_ranks(world_size, export_all, checkpoints, tmp_path / "ours")
    for family_name, path in checkpoints.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            change(name, parameter)
        model.save_pretrained(tmp_path / "theirs" / family_name)
        found, expected, before = (
            contents(folder)
            for folder in (tmp_path / "ours" / family_name, tmp_path / "theirs" / family_name, path)
        )
        assert set(found) == set(expected) == set(before)
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), (family_name, name)
            assert torch.equal(tensor, before[name]) == name.endswith(BUFFERS), (
                f"{name} of {family_name} should have changed unless it is a buffer"
            )
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / family_name)
        assert (
            type(exported) is type(model)
            and exported.config.architectures == model.config.architectures
            and exported.dtype == torch.float32
        )
        tokens = torch.arange(4, 24)[None]
        assert torch.equal(exported(input_ids=tokens).logits, model(input_ids=tokens).logits)


def contents(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in path.glob("model*.safetensors")
        for name, tensor in load_file(file).items()
    }


def export_all(rank: int, world_size: int, checkpoints: dict[str, Path], target: Path) -> None:
    """Load each family sharded, change every parameter, and export it under `target`."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    from asyncrl.config import LearnerConfig
    from asyncrl.learning.engine import zero
    from asyncrl.learning.engine.hf_directory import HfDirectory
    from asyncrl.text.stops import Stops
    from asyncrl.weights.gather import gather_buckets
    from asyncrl.weights.published import version_table

    tables = {name: version_table(path) for name, path in checkpoints.items()}
    sharded = HfDeepSpeedConfig(zero.settings(LearnerConfig(world_size=world_size)))
    with pytest.raises(RuntimeError, match="before an HfDeepSpeedConfig"):
        version_table(checkpoints["mixtral"])
    for family_name, path in checkpoints.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if rank == 0:
                    change(name, parameter)
        table = tables[family_name]
        directory = HfDirectory(target / family_name, table, "float32", BUCKET_BYTES)
        assert (
            max(directory.sizes)
            == max(4 * tensor.stored.elements for tensor in table.tensors)
            > BUCKET_BYTES
        )
        directory.directory.mkdir(parents=True, exist_ok=True)
        gather_buckets(parameters, table, directory.entries, directory.sizes, rank, directory.write)
        if rank == 0:
            directory.finish(path, str(path), Stops({2: ("tokenizer EOS",)}))
    del sharded
