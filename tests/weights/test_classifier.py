"""The table of a reward model, for every model family: transformers loads its tensors as a sequence
classifier, whose score is that of the backbone's last output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_published import RENAMED, contents, from_parameters
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from asyncrl.weights.classifier import SCORE, Padding, classifier_table, padding_of
from asyncrl.weights.outline import outline
from asyncrl.weights.published import CannotPublishError, version_table
from benchmarks.families import FAMILIES, byte_tokenizer, family

WITHOUT = {
    "apertus", "bamba", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "falcon_h1",
    "gemma4_text", "glm4_moe", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared",
    "lfm2", "mamba2", "minimax_m2", "nemotron_h", "olmoe",
}  # fmt: skip
"""Families of which transformers has no sequence classifier."""
TOKENS = [5, 9, 33, 60, 2]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in RENAMED else pytest.mark.slow) for name in FAMILIES],
)
def test_transformers_scores_as_the_backbone_does(name: str, tmp_path: Path) -> None:
    path = family(name).save(tmp_path / "causal")
    if name in WITHOUT:
        with pytest.raises(CannotPublishError, match="cannot become a reward model"):
            classifier_table(path, version_table(path))
        return
    table = classifier_table(path, version_table(path))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    score = torch.randn(table.parameters[SCORE], generator=torch.Generator().manual_seed(1))
    parameters: dict[str, Any] = {**dict(model.named_parameters()), SCORE: score}
    target = tmp_path / "classifier"
    config = AutoConfig.from_pretrained(path, num_labels=1, pad_token_id=0)
    config.save_pretrained(target)
    kept = {tensor.name for tensor in table.tensors if not tensor.pieces}
    stored = {name: values for name, values in contents(path).items() if name in kept}
    tensors = from_parameters(table, parameters) | stored
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    classifier, report = AutoModelForSequenceClassification.from_pretrained(
        target, dtype=torch.float32, output_loading_info=True
    )
    assert type(classifier).__name__ == table.architecture
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.tensor([TOKENS])
    prefix = model.base_model_prefix
    backbone = getattr(model, prefix if hasattr(model, prefix) else "model")
    with torch.no_grad():
        hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
        found = classifier.eval()(ids).logits[0, 0]
    assert float(found) == pytest.approx(float(hidden @ score[0]), abs=1e-5)


def test_the_outline_of_a_reward_model_has_its_elements(tiny_model: Path) -> None:
    plain, scoring = outline(tiny_model), outline(tiny_model, reward_model=True)
    hidden = scoring.parameters[SCORE][1]
    assert scoring.refusal is None
    assert scoring.trained == plain.trained + hidden, "the tiny model's head is its embedding"


class FakeTokenizer:
    """A tokenizer with these ids of its special tokens."""

    def __init__(self, further: dict[str, int] | None = None, **ids: int) -> None:
        for name in ("eos", "pad", "unk", "bos"):
            setattr(self, f"{name}_token", f"<{name}>")
            setattr(self, f"{name}_token_id", ids.get(name))
        special = {"<eos>": 2, **(further or {})}
        self.added_tokens_decoder: dict[int, Any] = {}
        self.all_special_tokens, self.all_special_ids = [*special], [*special.values()]


def test_padding_is_never_eos() -> None:
    """A classifier scores the last token that is not padding."""
    assert padding_of(byte_tokenizer()) == Padding("<pad>", 0)
    tokenizer: Any = FakeTokenizer
    assert padding_of(tokenizer(eos=2, pad=2, unk=3, bos=1)) == Padding("<unk>", 3)
    assert padding_of(tokenizer(eos=2, bos=0)) == Padding("<bos>", 0)
    assert padding_of(tokenizer({"<turn>": 9, "<tool>": 7}, eos=2, pad=2)) == Padding("<tool>", 7)
    assert padding_of(tokenizer(eos=2, pad=2)) is None
