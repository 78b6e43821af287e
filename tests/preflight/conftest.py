"""Configs for the plan's tests."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml


@pytest.fixture
def write(tmp_path, tiny_model):
    def write(changes=None, rows=("1 + 2 =", "30 - 4 =")):
        train = tmp_path / "train.parquet"
        pq.write_table(
            pa.table(
                {
                    "prompt": pa.array(rows, pa.string()),
                    "answer": pa.array(["3"] * len(rows), pa.string()),
                }
            ),
            train,
        )
        tree = {
            "name": "run",
            "runs_root": str(tmp_path / "runs"),
            "max_steps": 3,
            "model": {"path": str(tiny_model)},
            "data": {"train": str(train), "max_prompt_length": 20},
            "rollout": {"max_completion_length": 8},
            "reward": {"functions": {"exact": {"function": "asyncrl.rewards.builtin:exact_match"}}},
        }
        for name, value in (changes or {}).items():
            *parents, leaf = name.split(".")
            at = tree
            for parent in parents:
                at = at.setdefault(parent, {})
            at[leaf] = value.replace("HERE", str(tmp_path)) if isinstance(value, str) else value
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


@pytest.fixture
def hybrid(tmp_path, tiny_model):
    shutil.copytree(tiny_model, tmp_path / "hybrid")
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "hybrid" / "config.json").write_text(
        json.dumps(config | {"layer_types": ["linear_attention", "full_attention"]})
    )
    return str(tmp_path / "hybrid")
