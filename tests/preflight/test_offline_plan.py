"""The plan of a run on a dataset: epochs, forms, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.config import ConfigError, OfflineConfig
from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.rows import Completion, Group, Prompt, Trajectory, VersionSpan
from asyncrl.preflight.plan.offline import OfflinePlan, make_offline_plan
from asyncrl.rewards.files import write_groups
from asyncrl.text.tokenizer import decode, load_tokenizer, save_tokenizer
from benchmarks.families import family

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


def written(path: Path, rows: Sequence[Mapping[str, object]]) -> str:
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
    assert (
        mixed.order.epoch_and_row(750 * 4 - 1)[0] == 2
        and mixed.order.epoch_and_row(750 * 4)[0] == 3
    )
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


def test_an_adapter_needs_layers_that_exist(plan: Any, tmp_path: Path) -> None:
    """Before anything is allocated, and not only in the plan's text."""
    train = written(tmp_path / "a.jsonl", ROWS)
    assert plan(train, lora={"target_modules": ["q_proj"]}).steps == 5
    with pytest.raises(ConfigError, match=r"lora\.target_modules: 'q_prj' is not a linear layer"):
        plan(train, lora={"target_modules": ["q_proj", "q_prj"]})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt2", "GPT2LMHeadModel has no torch.nn.Linear besides its head"),
        ("qwen3_moe", "PEFT gives Qwen3MoeForCausalLM other matrices than those of its linear"),
        ("falcon_h1", "PEFT refuses FalconH1ForCausalLM: .*'out_proj' is incompatible with Mamba"),
    ],
)
def test_a_model_that_cannot_have_the_adapter_is_refused(
    plan: Any, tiny_model: Path, tmp_path: Path, name: str, reason: str
) -> None:
    """Their weights have two dimensions and names like those of linear layers."""
    model = family(name).save(tmp_path / name, vocab_size=64)
    save_tokenizer(str(tiny_model), model)
    changes = {"model": {"path": str(model)}, "lora": {"r": 2}}
    with pytest.raises(ConfigError, match=rf"^lora: model\.path = .*: {reason}"):
        plan(written(tmp_path / "a.jsonl", ROWS), **changes)


def _with_tensors(source: Path, target: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    shutil.copytree(source, target)
    (file,) = target.glob("*.safetensors")
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})
    return str(target)


def test_tensors_without_a_place_are_refused_in_every_objective_and_the_reference(
    plan: Any, tiny_model: Path, tmp_path: Path
) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    other = _with_tensors(tiny_model, tmp_path / "other", {name: torch.ones(4)})
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 4
    train, rows = (written(tmp_path / f"{len(kind)}.jsonl", kind) for kind in (pairs, ROWS))
    for objective, data in (("sft", rows), ("dpo", train), ("reward_model", train)):
        with pytest.raises(
            ConfigError, match=rf"^model\.path = .* tensor '{name}' has no parameter"
        ):
            plan(data, objective=objective, model={"path": other})
    missing = rf"^objective\.ref_load = .* tensor '{name}' has no parameter"
    with pytest.raises(ConfigError, match=missing):
        plan(train, objective={"name": "dpo", "ref_load": other})


def test_a_reward_model_leaves_the_head_out_and_says_so(
    plan: Any, untied_model: Path, tmp_path: Path
) -> None:
    train = written(tmp_path / "a.jsonl", [{"prompt": "1=", "chosen": "1", "rejected": "2"}] * 4)
    text = plan(train, objective="reward_model", model={"path": str(untied_model)}).text()
    assert "because the model does not use them: 1 (first lm_head.weight)" in text


def test_the_rows_decide_what_a_tokenizer_must_cover(plan: Any, tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "Größe=", "completion": "1"}]
    made = plan(written(tmp_path / "a.jsonl", rows))
    note = "no token for parts of 1 of 21 texts, which the model does not see: 'G', 'ö', 'ß'"
    assert note in made.rows_text()


def test_tokens_without_an_embedding_are_refused(
    plan: Any, save_qwen3: Any, tmp_path: Path
) -> None:
    """A tokenizer may have tokens that were added without a row of the embedding."""
    model = save_qwen3(tmp_path / "few", tied=True, vocab_size=20)
    train = written(tmp_path / "a.jsonl", [{"prompt": "1+1=", "completion": "x"}])
    changes = {"model": {"path": str(model)}, "batch_size": 1}
    with pytest.raises(ConfigError, match=r"row 0: .* .'x' has the id \d+, .* ids from 0 to 19"):
        plan(train, **changes)


def test_the_context_of_learned_positions_is_known(plan: Any, tmp_path: Path) -> None:
    """GPT-2 calls it n_positions."""
    model = family("gpt2").save(tmp_path / "gpt2", max_position_embeddings=10)
    assert json.loads((model / "config.json").read_text())["n_positions"] == 10
    train = written(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ConfigError, match="above the model's context of 10"):
        plan(train, model={"path": str(model)})


def test_kto_refuses_a_single_completion(plan: Any, tmp_path: Path) -> None:
    """Its baseline would pair the completion with itself."""
    rows = [{**row, "label": number % 2 == 0} for number, row in enumerate(ROWS)]
    train = written(tmp_path / "train.jsonl", rows)
    alone = written(tmp_path / "alone.jsonl", rows[:1])
    kto = {"objective": {"name": "dpo", "loss": "kto"}}
    two = plan(train, eval={"data": train, "max_rows": 2}, **kto)
    assert two.held_out is not None and two.held_out.rows == 2
    for data in ({"data": alone}, {"data": train, "max_rows": 1}):
        with pytest.raises(ConfigError, match=r"^eval\.data gives 1 completion, and KTO"):
            plan(train, eval=data, **kto)
    with pytest.raises(ConfigError, match=r"^data\.train gives 1 completion, and KTO"):
        plan(alone, **kto)
