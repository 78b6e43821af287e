"""Each tiny checkpoint loads as it was saved, and has no constant tensor that a wrong tensor could
equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.families import FAMILIES, family

TOKENS = torch.randint(4, 260, (1, 24), generator=torch.Generator().manual_seed(0))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_loads_as_it_was_saved(name: str, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    path = family(name).save(tmp_path, seed=3)
    assert torch.equal(state, torch.random.get_rng_state())
    model, loading = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    found = logits(model.eval())
    assert torch.equal(found, logits(family(name).build(seed=3)))
    assert not torch.equal(found, logits(family(name).build(seed=4)))
    for key, tensor in model.state_dict().items():
        assert not tensor.is_floating_point() or tensor.numel() == 1 or tensor.std() > 1e-3, key


def test_the_families_are_many_and_tiny() -> None:
    assert len(FAMILIES) >= 35
    assert all(name == made.name for name, made in FAMILIES.items())
    assert len({made.title for made in FAMILIES.values()}) == len(FAMILIES)
    assert all(
        sum(p.numel() for p in made.build().parameters()) < 300_000 for made in FAMILIES.values()
    )


def test_a_setting_that_the_family_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="LlamaConfig has no setting num_expert"):
        family("llama").save(tmp_path, num_expert=4)
    with pytest.raises(KeyError, match="there is no family 'lama'; use one of llama, mistral"):
        family("lama")


def test_the_tokenizer_handles_any_text(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(family("qwen3").save(tmp_path))
    text = "2 + 2 = 4;\n Größe \N{SNOWMAN}"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
