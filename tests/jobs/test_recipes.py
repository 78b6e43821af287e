"""`asyncrl plan` accepts every recipe, with a model and data made here."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config import load_config
from asyncrl.preflight.plan import make_plan

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "jobs" / "recipes").glob("*.yaml"))
TESTS = json.dumps([{"input": "1\n", "output": "2\n"}])


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "rows.parquet"
    rows = {
        "prompt": ["1 + 2 ="] * 4,
        "answer": ["3"] * 4,
        "tests": [TESTS] * 4,
        "number": range(4),
    }
    pq.write_table(pa.table(rows), path)
    return path


def test_the_recipes_that_the_docs_name_exist() -> None:
    names = {path.stem for path in RECIPES}
    assert names == {
        "math",
        "code",
        "long_answers",
        "tool_agent",
        "one_gpu",
        "two_gpus",
        "eight_gpus",
        "two_nodes",
        "black_box_agent",
        "verifiers_agent",
    }
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert all(f"`jobs/recipes/{name}.yaml`" in page for name in names)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_planned(path: Path, data: Path, tiny_model: Path, tmp_path: Path) -> None:
    """The tiny model has no chat template and a short context."""
    given = load_config(path)
    changes = {
        "runs_root": tmp_path / "runs",
        "model.path": tiny_model,
        "data.train": data,
        "data.apply_chat_template": "false",
        "data.system_prompt": "null",
        "data.max_prompt_length": 16,
        "rollout.max_completion_length": 16,
        "reward.overlong_buffer": min(given.reward.overlong_buffer, 8),
    }
    if given.data.max_length is not None:
        changes["data.max_length"] = 64
    if given.eval.data is not None:
        changes["eval.data"] = data
    overrides = [part for name, value in changes.items() for part in (f"--{name}", str(value))]
    config = load_config(path, overrides)
    text = make_plan(config).text()
    assert f"rollout_batch_size {config.rollout.rollout_batch_size} /" in text
    assert given.algorithm == config.algorithm and given.learner == config.learner
    assert given.generator == config.generator and given.staleness == config.staleness
