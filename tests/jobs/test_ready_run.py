"""A run of the ready environments, with everything real. Some of the tiny model's tokens are whole
tool calls, so that it calls tools without training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from audited_runs import audited

from asyncrl.sandbox import probe
from jobs.guess.task import CHAT_TEMPLATE, SPECIAL_TOKENS

SUM, CODE = "6 * 7", "print(6 * 7)"
CALLS = tuple(
    f'<tool_call>{{"name": "{name}", "arguments": {{"{argument}": "{text}"}}}}</tool_call>'
    for name, argument, text in (
        ("calculate", "expression", SUM),
        ("run_python", "code", CODE),
        ("calculate", "expression", "6 *"),
    )
)
WORDS = (
    *CALLS,
    *("system\n", "user\n", "assistant\n", "tool\n", "\n", "error", "That is wrong. Try again."),
    *"0123456789+-*?= ",
)
KINDS = ("calculator", "python", "reasoning_gym")


def save_tokenizer(directory: Path) -> None:
    """One token for each word. The ids of special tokens are those of the checkpoint."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    marks = [AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")]
    found.add_special_tokens({"additional_special_tokens": marks})
    found.add_tokens([AddedToken(word, special=False) for word in WORDS if len(word) > 1])
    found.chat_template = CHAT_TEMPLATE
    found.save_pretrained(directory)


def rows() -> list[dict[str, str]]:
    import reasoning_gym

    found = [
        {"prompt": f"{SUM}=", "kind": kind, "answer": "42", "question": "", "metadata": ""}
        for kind in KINDS[:2]
        for _ in range(4)
    ]
    for entry in reasoning_gym.create_dataset("chain_sum", size=4, seed=0, max_digits=1):
        row = {name: entry[name] for name in ("question", "answer")}
        expression = entry["metadata"]["expression"]
        metadata = json.dumps(entry["metadata"])
        found.append({"prompt": f"{expression} =", "kind": KINDS[2], **row, "metadata": metadata})
    return [{**row, "task": "chain_sum"} for row in found]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_of_ready_environments_calls_their_tools(
    start_run: Callable[..., Any], session_task: dict[str, Any], tmp_path: Path
) -> None:
    save_tokenizer(tmp_path / "model")
    pq.write_table(pa.Table.from_pylist(rows()), tmp_path / "train.parquet")
    level = probe().best
    assert level is not None
    started = start_run(
        session_task
        | {
            "max_steps": 4,
            "data": {
                "train": str(tmp_path / "train.parquet"),
                "max_prompt_length": 32,
                "max_length": 160,
                "apply_chat_template": True,
            },
            "environment": {
                "function": "environments_for_runs:ready",
                "arguments": {"level": level.value},
                "processes": 1,
            },
            "rollout.rollout_batch_size": 6,
            "rollout.n_samples_per_prompt": 8,
            "rollout.max_completion_length": 8,
        }
    )
    assert started.wait() == 0, started.output
    run = audited(tmp_path / "runs" / "run")
    told: dict[str, set[str]] = {kind: set() for kind in KINDS}
    ends: dict[str, set[str]] = {kind: set() for kind in KINDS}
    turns: dict[str, int] = dict.fromkeys(KINDS, 0)
    for row in run.groups().to_pylist():
        kind = row["kind"]
        ends[kind] |= set(row["session_end"])
        for text in row["session_messages"]:
            chat = json.loads(text)
            turns[kind] = max(turns[kind], sum(one["role"] == "assistant" for one in chat))
            told[kind] |= {one["content"] for one in chat if one["role"] == "tool"}
    assert set.union(*ends.values()) <= {"done", "length"}, ends
    assert "42" in told["calculator"] and "42" in told["python"], told
    assert "error: CalculationError: this is no arithmetic expression" in told["calculator"]
    assert any(text.startswith("error: there is no tool") for text in told["python"])
    assert turns["calculator"] > 2 and turns["python"] > 2 and turns["reasoning_gym"] == 2
    assert not told["reasoning_gym"]
