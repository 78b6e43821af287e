"""`asyncrl plan` accepts every recipe, with a model and data made here."""

import json
import re
import shutil
from collections import namedtuple
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sparse_checkpoint import save_sparse

from asyncrl.config import load_config
from asyncrl.preflight.plan.plan import make_plan
from asyncrl.preflight.resources.memory_estimate import estimate
from asyncrl.preflight.resources.model_limits import kv_bytes_per_token

Usage = namedtuple("Usage", "total used free")
ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "jobs" / "recipes").glob("*.yaml"))
ROWS = 512
TESTS = json.dumps([{"input": "1\n", "output": "2\n"}])


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "rows.parquet"
    rows = {
        "prompt": ["1 + 2 ="] * ROWS,
        "answer": ["3"] * ROWS,
        "tests": [TESTS] * ROWS,
        "number": range(ROWS),
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


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory, llama_model: Path) -> Callable[[str], Path]:
    """A checkpoint of this size, with a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("sparse")

    @cache
    def make(size: str) -> Path:
        return save_sparse(folder / size, size, llama_model)

    return make


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_planned_for_its_model_and_card(
    path: Path,
    data: Path,
    sparse: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it is, for a model of the size that it names. Both sides fit on its cards."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 42, 0, 1 << 42))
    (shape,) = re.findall(r"about (\d+ B) parameters", path.read_text())
    (memory,) = re.findall(r"GPUs? of (\d+) GB", path.read_text())
    changes = {"runs_root": tmp_path / "runs", "model.path": sparse(shape), "data.train": data}
    if load_config(path).eval.data is not None:
        changes["eval.data"] = data
    overrides = [part for name, value in changes.items() for part in (f"--{name}", str(value))]
    config = load_config(path, overrides)
    plan = make_plan(config)
    assert f"rollout_batch_size {config.rollout.rollout_batch_size} /" in plan.text()
    assert {config.learner.device, config.engines.device} == {"cuda"}
    assert {config.model.dtype, config.learner.bf16} == {"bfloat16", True}
    card, learner, width = int(memory) * 10**9, estimate(config), kv_bytes_per_token(config)
    assert width is not None
    assert learner.on_device + learner.logits < 0.6 * card  # activations need room
    cache = config.engine_share * card - plan.weights_bytes
    assert cache > 16 * width * config.longest_trajectory
