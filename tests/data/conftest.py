import json

import pytest

from asyncrl.config import Config


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
