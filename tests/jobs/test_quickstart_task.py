"""The quickstart's inputs are ordinary files, disjoint and reproducible."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.quickstart.task import make_data, make_model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    make_data(directory, seed=0, held_out_rows=40, max_digits=1)
    make_model(directory / "model", seed=0)
    return directory


def test_sets_are_distinct_and_cover_nearly_every_sum(inputs: Path) -> None:
    train, held_out = (
        pq.read_table(inputs / f"{name}.parquet").to_pylist() for name in ("train", "held_out")
    )
    prompts = [row["prompt"] for row in train + held_out]
    assert len(held_out) == 40
    assert len(prompts) == len(set(prompts)) and 85 <= len(prompts) <= 100  # 10 x 10 digits


def test_rows_contain_what_a_scorer_needs(inputs: Path) -> None:
    import reasoning_gym

    score = reasoning_gym.get_score_answer_fn("chain_sum")
    for row in pq.read_table(inputs / "held_out.parquet").to_pylist():
        left, right = row["prompt"].removesuffix("=").split("+")
        assert int(row["answer"]) == int(left) + int(right)
        assert f"{left} + {right}" in row["question"]
        assert row["task"] == json.loads(row["metadata"])["source_dataset"] == "chain_sum"
        assert (
            score(row["answer"], {"answer": row["answer"], "metadata": json.loads(row["metadata"])})
            == 1.0
        )


def test_same_seed_same_files(inputs: Path, tmp_path: Path) -> None:
    make_data(tmp_path, seed=0, held_out_rows=40, max_digits=1)
    make_model(tmp_path / "model", seed=0)
    for name in ("train.parquet", "held_out.parquet", "model/model.safetensors"):
        assert _digest(tmp_path / name) == _digest(inputs / name)


def test_model_is_a_plain_checkpoint_with_one_token_per_character(inputs: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    ids = tokenizer("12 - 34 =")["input_ids"]
    assert len(ids) == 9
    assert tokenizer.decode(ids) == "12 - 34 ="
    assert (
        tokenizer.decode(
            [*tokenizer("-22")["input_ids"], tokenizer.eos_token_id], skip_special_tokens=True
        )
        == "-22"
    )
    assert (
        GenerationConfig.from_pretrained(inputs / "model").eos_token_id
        == tokenizer.eos_token_id
        == model.config.eos_token_id
    )
    with torch.no_grad():
        assert model(torch.tensor([ids])).logits.shape == (1, 9, model.config.vocab_size)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
