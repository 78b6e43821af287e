"""`asyncrl sft` and `asyncrl dpo` on sessions that a run recorded, through the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_families import CHATML, save_chat_model
from scripted_sessions import Script, record
from transformers import AutoConfig, AutoModelForCausalLM

import asyncrl
from asyncrl.rewards.files import write_groups
from asyncrl.run.audit import audit, audit_text
from asyncrl.runtime.files.arrow_files import map_table

GOOD = Script(("ask", "ask higher", "ask lower"), ("5", "8", "7"), 1.0)
BAD = Script(("ask", "ask higher"), ("1", "2"), 0.0)
FAILED = Script(("ask", "ask higher"), ("5", "8"), 9.0, "env_error")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_a_run_trains_the_turns_of_recorded_sessions(
    start_config: Callable[[dict[str, Any]], Any], tmp_path: Path, objective: str
) -> None:
    model = make_model(tmp_path / "model")
    sampled = []
    for ordinal in range(8):
        table, turns = record(model, ordinal, [BAD, GOOD, FAILED])
        write_groups(tmp_path / "groups" / f"attempt_0001-{ordinal:08d}.parquet", [table])
        sampled.append([token for turn in turns[1] for token in turn.tokens])
    run = start_config(
        {
            "name": "run",
            "runs_root": str(tmp_path / "runs"),
            "objective": objective,
            "max_steps": 6,
            "batch_size": 4,
            "model": {"path": model},
            "data": {"train": str(tmp_path / "groups"), "max_length": 200},
            "learner": {"learning_rate": 1e-3},
            "checkpoint": {"every_steps": 0},
            "placement_timeout_s": 120,
        }
    )
    assert run.wait() == 0, run.output
    directory = tmp_path / "runs" / "run"
    found = asyncrl.open_run(directory)
    checks = audit(found)
    assert all(check.passed for check in checks), audit_text(checks)
    steps = found.records("step")
    loss = "loss" if objective == "sft" else "pref/loss"
    assert len(steps) == 6 and steps[-1][loss] < steps[0][loss]
    (rows,) = (map_table(path).to_pylist() for path in (directory / "rows").glob("train.arrow"))
    ids, mask = ("input_ids", "loss_mask") if objective == "sft" else ("chosen_ids", "chosen_mask")
    trained = [[t for t, own in zip(row[ids], row[mask], strict=True) if own] for row in rows]
    assert trained == sampled


def make_model(folder: Path) -> str:
    """A tiny Qwen3 with the tokenizer of the scripts."""
    path = save_chat_model(folder, CHATML)
    from asyncrl.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)
