"""A whole short job with somebody else's model: Llama-shaped, sharded, untied, with a BPE tokenizer and a chat template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_checkpoint import BOS, END, EOS, SPECIAL

import asyncrl


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_another_family_trains_from_chat_prompts_to_a_plain_checkpoint(start_run: Callable[..., Any], llama_model: Path, tmp_path: Path) -> None:
    changes = {
        "model.path": str(llama_model),
        "max_steps": 3,
        "data.apply_chat_template": True,
        "data.max_prompt_length": 24,
        "weights.check_every_versions": 1,
        "checkpoint.every_steps": 3,
    }
    run = start_run(changes)
    assert run.wait(800) == 0, run.output
    assert run.gone() == []

    directory = tmp_path / "runs" / "run"
    finished = asyncrl.open_run(directory)
    checks = [record["check/logprob_max_diff"] for record in finished.records("logprob_check")]
    assert len(checks) >= 3 and max(checks) <= 1e-4, checks
    assert len(finished.records("step")) == 3 and len(list(llama_model.glob("*.safetensors"))) > 3

    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(directory / "hf")
    groups = finished.groups().to_pylist()
    assert groups
    for group in groups:
        text = group["prompt_text"]
        assert text.startswith(f"{BOS}<|user|>") and text.endswith(f"{END}<|assistant|>")
        assert group["prompt_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"] and group["prompt_ids"].count(SPECIAL.index(BOS)) == 1

    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (llama_model, directory / "hf"))
    assert type(after) is type(before) and not after.config.tie_word_embeddings
    weights = after.state_dict()
    assert all((parameter != weights[name]).any() for name, parameter in before.state_dict().items()), "every parameter has been trained"
    assert (weights["lm_head.weight"] != weights["model.embed_tokens.weight"]).any()
    ends = {SPECIAL.index(EOS), SPECIAL.index(END)}
    assert set(GenerationConfig.from_pretrained(directory / "hf").eos_token_id) == ends
    question = [{"role": "user", "content": "3+4="}]
    assert tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True) == f"{BOS}<|user|>3+4={END}<|assistant|>"
