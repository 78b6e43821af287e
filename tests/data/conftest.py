import functools
import json

import pytest
from chat_families import save_chat_model
from small_config import offline_spec

from asyncrl.config import Config
from asyncrl.contracts.offline_rows import check_offline_table
from asyncrl.data.offline_checks import refuse_idle
from asyncrl.data.offline_rows import write_offline_rows
from asyncrl.runtime.files.arrow_files import map_table


@pytest.fixture
def prompt_config(tiny_model, tmp_path):
    """`prompt_config(rows, **data)`: a config whose data.train is a JSONL file with these rows.
    `sections` may contain other sections."""

    def make(rows, sections=None, **data):
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Config.model_validate(
            {
                "name": "prompts",
                "max_steps": 1,
                "seed": 3,
                "model": {"path": str(tiny_model)},
                "data": {"train": str(path), "max_prompt_length": 16, **data},
                "rollout": {"max_completion_length": 8},
                "reward": {
                    "functions": {"exact": {"function": "asyncrl.rewards.builtin:exact_match"}}
                },
                **(sections or {}),
            }
        )

    return make


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """`chat_model(template)`: the path of a tokenizer with this chat template, made once."""

    @functools.cache
    def make(template=None):
        return save_chat_model(tmp_path_factory.mktemp("chat"), template)

    return make


@pytest.fixture
def offline(chat_model, tmp_path):
    """`offline(rows, objective, template, **fields)`: the table and the report of rows in a JSONL
    file. `fields` belong to the spec."""

    def read(rows, objective="sft", template=None, **fields):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = offline_spec(chat_model(template), **fields)
        report = write_offline_rows(
            tmp_path / "rows.arrow", spec, str(path), "data.train", objective
        )
        refuse_idle(spec, {"data.train": report})
        table = map_table(tmp_path / "rows.arrow")
        check_offline_table(table)
        return table, report

    return read
