"""The inputs of the runs with SmolLM2, below the runs root. Each is made once.

    python -m jobs.smollm.inputs [model] [checkers] [data] [human_eval]

makes these, or all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.config import ConfigError, load_config
from jobs.smollm import instructions, subjects, sums, task
from jobs.smollm.human_eval import make_human_eval
from jobs.smollm.model import make_model
from jobs.smollm.packages import CHECKERS, install, whole

DIALOGUES, HELD_OUT_DIALOGUES = 60, 15
"""Dialogues with instructions. There are two thirds as many with the calculator."""
SUMS, HELD_OUT_SUMS = 1000, 100
WRITTEN_BY = (instructions, subjects, sums, task)
"""Modules whose text decides what the data are."""


def inputs_of(runs_root: Path | None = None) -> Path:
    """The folder of the inputs, `{runs_root}/smollm-inputs` in the YAML files."""
    if runs_root is None:
        runs_root = load_config(Path(__file__).with_name("smollm.yaml"), []).run_directory.parent
    return runs_root / "smollm-inputs"


def make_inputs(folder: Path, parts: Sequence[str]) -> None:
    """Make these of PARTS, unless they exist.

    Raises:
        ConfigError: one could not be made. Nothing of that one stays.
    """
    for part in parts:
        PARTS[part](folder)


def make_data(folder: Path, seed: int = 0) -> None:
    """Write the prompts with instructions, the sums, and the dialogues of both for SFT."""
    task.make_data(folder, seed)
    for name, count in (("sums_train", SUMS), ("sums_held_out", HELD_OUT_SUMS)):
        rows = sums.tasks(seed, count, held_out=name == "sums_held_out", stories=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    for name, count in (("train", DIALOGUES), ("held_out", HELD_OUT_DIALOGUES)):
        lines = [json.dumps(row) for row in dialogues(name, count, seed)]
        (folder / f"dialogues_{name}.jsonl").write_text("\n".join(lines) + "\n")


def dialogues(name: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows for SFT, from the subjects and numbers of `train` or `held_out`, shuffled."""
    rows: list[dict[str, Any]] = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": row["reference_answer"]}]}
        for row in task.rows_of(name, seed)[:count]
    ]
    found = sums.tasks(seed, count * 2 // 3, held_out=name == "held_out")
    rows += [sums.dialogue(one) for one in found]
    Random(seed).shuffle(rows)
    return rows


def _data(folder: Path) -> None:
    source = "".join(Path(str(module.__file__)).read_text() for module in WRITTEN_BY)
    whole(folder / "data", make_data, source)


PARTS: Mapping[str, Callable[[Path], object]] = {
    "model": lambda folder: make_model(folder / "model"),
    "checkers": lambda folder: install(folder / "checkers", CHECKERS),
    "data": _data,
    "human_eval": lambda folder: make_human_eval(folder / "human_eval.parquet"),
}


def main(parts: list[str]) -> int:
    """Make the inputs and return the exit code."""
    try:
        if unknown := set(parts).difference(PARTS):
            raise ConfigError(f"{', '.join(sorted(unknown))} is unknown; choose from {[*PARTS]}")
        make_inputs(inputs_of(), parts or [*PARTS])
    except ConfigError as error:
        print(f"inputs: {error}", file=sys.stderr)
        return 2
    print(inputs_of())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
