"""The plan of a run on a dataset: epochs, forms, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import ConfigError, OfflineConfig
from asyncrl.contracts.rows import (
    Completion,
    Group,
    Prompt,
    Trajectory,
    VersionSpan,
    groups_to_table,
)
from asyncrl.preflight.offline_plan import OfflinePlan, make_offline_plan
from asyncrl.rewards.files import write_groups
from asyncrl.text.tokenizer import decode, load_tokenizer

ROWS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(5) for b in range(4)]


@pytest.fixture
def plan(tiny_model: Path, tmp_path: Path) -> Any:
    """`plan(data, **changes)`: the plan of an SFT run with this data.train."""

    def make(train: object, **changes: Any) -> OfflinePlan:
        data = {"train": train, "max_length": 12, **changes.pop("data", {})}
        return make_offline_plan(
            OfflineConfig.model_validate(
                {
                    "name": "plan",
                    "runs_root": str(tmp_path / "runs"),
                    "objective": "sft",
                    "batch_size": 4,
                    "model": {"path": str(tiny_model)},
                    "data": data,
                    **changes,
                }
            )
        )

    return make


def written(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def recorded(folder: Path, model: Path) -> str:
    """A folder of groups as a run records them. The second completion is rewarded."""
    tokenizer = load_tokenizer(str(model))
    groups = []
    for ordinal, row in enumerate(ROWS):
        made = []
        for reward, text in enumerate(("9", row["completion"])):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            spans = (VersionSpan(0, 0, len(ids)),)
            told = Completion(ids, (-0.5,) * len(ids), spans, "stop", decode(tokenizer, ids))
            made.append(Trajectory(told, (1,) * len(ids), float(reward), {}, 0.0, "ok"))
        prompt = Prompt(ordinal, 0, row["prompt"], tuple(tokenizer.encode(row["prompt"])))
        groups.append(Group(0, prompt, tuple(made), "replica", 1.0, 2.0, scored_at=3.0))
    write_groups(folder / "attempt_0000-00000000.parquet", [groups_to_table(groups)])
    return str(folder)


def test_epochs_are_those_of_the_order(plan: Any, tmp_path: Path) -> None:
    """A mixture of 18 and 2 rows has an epoch of 1,000."""
    sources = [
        {"path": written(tmp_path / "a.jsonl", ROWS[:18]), "weight": 1},
        {"path": written(tmp_path / "b.jsonl", ROWS[18:]), "weight": 3},
    ]
    mixed = plan(sources, num_epochs=3)
    assert mixed.steps == 750 and mixed.order.epoch == 1000
    assert mixed.order.place(750 * 4 - 1)[0] == 2 and mixed.order.place(750 * 4)[0] == 3
    assert "1,000 rows per epoch" in mixed.arithmetic()
    assert "750 steps = 3.00 epochs" in mixed.arithmetic()
    alone = plan([{"path": source["path"]} for source in sources], num_epochs=3)
    assert alone.steps == 15 and "15 steps = 3.00 epochs" in alone.arithmetic()


def test_the_forms_of_the_rows_are_shown(plan: Any, tmp_path: Path) -> None:
    train = written(tmp_path / "a.jsonl", ROWS)
    text = written(tmp_path / "b.jsonl", [{"text": "1+1=2"}])
    shown = plan(train, eval={"data": text}).text()
    assert "data.train: prompt-completion (strings): 20 rows from 20" in shown
    assert "eval.data: text (strings): 1 rows from 1" in shown
    assert "eval.data has another form than data.train" in shown
    assert "another form" not in plan(train, eval={"data": train}).text()
    assert "data     prompt-completion (strings): 20 rows" in plan(train).brief()


def test_recorded_groups_may_be_evaluated_on_prompts_and_answers(
    plan: Any, tiny_model: Path, tmp_path: Path
) -> None:
    groups = recorded(tmp_path / "groups", tiny_model)
    answers = [{"question": row["prompt"], "answer": row["completion"]} for row in ROWS]
    held_out = written(tmp_path / "held_out.jsonl", answers)
    columns = {"prompt_column": "question", "target_column": "answer", "least_reward": 1.0}
    made = plan(groups, data=columns, eval={"data": held_out})
    assert (made.train.forms, made.train.rows) == (("recorded groups",), 20)
    assert (made.held_out.forms, made.held_out.rows) == (("prompt-completion (strings)",), 20)
    with pytest.raises(ConfigError, match=r"data.target_column = 'answer' has no effect"):
        plan(groups, data=columns)


def test_a_step_may_not_be_longer_than_an_epoch(plan: Any, tmp_path: Path) -> None:
    train = written(tmp_path / "a.jsonl", ROWS)
    assert plan(train, batch_size=20).steps == 1
    with pytest.raises(ConfigError, match="batch_size = 21 is above the 20 rows of an epoch"):
        plan(train, batch_size=21)
