"""Versions of families whose parameters transformers renames or fuses, out of the shards of one and two ranks, after a change of every parameter: what
transformers itself would save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plain_ranks import on_ranks
from safetensors.torch import load_file

from asyncrl.testing.families import family

FAMILIES = ["qwen3_moe", "mixtral", "gpt_neox", "gemma3", "apertus", "glm4_moe", "phi3"]
BUCKET_BYTES = 4096
"""Far below the largest tensor, so that a bucket is as large as that one; parts are a sixteenth of it."""


def change(name: str, parameter: torch.Tensor) -> None:
    """Another one for each parameter."""
    generator = torch.Generator().manual_seed(len(name) * 1000 + parameter.numel())
    with torch.no_grad():
        parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    paths = {name: family(name).save(folder / name, max_shard_size="100KB") for name in FAMILIES}
    paths["qwen3 tied"] = family("qwen3").save(folder / "tied", tie_word_embeddings=True)
    # Somebody else's format of the same weights, which no index names.
    (paths["mixtral"] / "consolidated.safetensors").write_bytes(b"not even safetensors")
    return paths


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_version_is_what_transformers_would_save(checkpoints: dict[str, Path], tmp_path: Path, world_size: int) -> None:
    from transformers import AutoModelForCausalLM

    published, *others = on_ranks(world_size, publish_all, checkpoints)
    assert not any(others), "only rank 0 has any of it"
    for family_name, path in checkpoints.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            change(name, parameter)
        model.save_pretrained(tmp_path / family_name)
        expected = {name: tensor for file in (tmp_path / family_name).glob("*.safetensors") for name, tensor in load_file(file).items()}
        before = {name: tensor for file in path.glob("model*.safetensors") for name, tensor in load_file(file).items()}
        found, as_stored = published[family_name]
        assert set(found) == set(expected)
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), (family_name, name)
            assert torch.equal(tensor, before[name]) == (name in as_stored), f"{name} of {family_name} should have changed, and no buffer"
    assert any("e_score_correction_bias" in name for name in published["glm4_moe"][1]) and any("act_fn" in name for name in published["apertus"][1])


def publish_all(rank: int, world_size: int, checkpoints: dict[str, Path]) -> dict[str, tuple[dict[str, torch.Tensor], set[str]]]:
    """Family → tensors published, and the names of those that are as the files have them; loaded sharded, each parameter changed by its owner."""
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from asyncrl.config import LearnerConfig
    from asyncrl.learning import zero3
    from asyncrl.weights.gather import TORCH_DTYPES, gather_buckets, weight_layout
    from asyncrl.weights.published import version_table

    tables = {name: version_table(path) for name, path in checkpoints.items()}
    sharded = HfDeepSpeedConfig(zero3.settings(LearnerConfig(world_size=world_size)))
    published: dict[str, Any] = {}
    for family_name, path in checkpoints.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if rank == 0:
                    change(name, parameter)
        table = tables[family_name]
        entries, sizes = weight_layout(table, "float32", BUCKET_BYTES)
        assert max(sizes) == max(4 * tensor.stored.elements for tensor in table.tensors) > BUCKET_BYTES
        contents: dict[int, torch.Tensor] = {}
        gather_buckets(parameters, table, entries, sizes, rank, lambda number, content, to=contents: to.update({number: torch.from_numpy(content.copy())}))
        if rank == 0:
            published[family_name] = (
                {e.name: contents[e.bucket][e.offset : e.offset + e.nbytes].view(TORCH_DTYPES[e.dtype]).view(e.shape) for e in entries},
                {tensor.name for tensor in table.tensors if not tensor.pieces},
            )
    del sharded
    return published
