"""The sizes of a version, for a plan. Making the table imports torch, which the driver does not: it
asks another process.

`python -m asyncrl.weights.outline DIRECTORY [reward_model]` prints the result of `outline` as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from asyncrl.weights.classifier import classifier_table
from asyncrl.weights.layout import ITEM_BYTES
from asyncrl.weights.published import CannotPublishError, version_table
from asyncrl.weights.stored import CheckpointFilesError

__all__ = ["Outline", "outline"]

TABLE_TIMEOUT_S = 300.0
REWARD_MODEL = "reward_model"
"""Argument of this module that asks for the outline of a reward model."""
FileState = tuple[str, int, int]
"""Name, time of the last change (ns) and bytes of a file."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The sizes of a version's table, or the reason why it cannot be made."""

    trained: int
    """Elements of tensors that come from the learner's parameters."""
    largest: int
    """Elements of the largest of these tensors."""
    as_stored: Mapping[str, int]
    """Bytes of each tensor that is published as stored in the file."""
    left_out: tuple[str, ...]
    parameters: Mapping[str, tuple[int, ...]]
    refusal: str | None = None

    def nbytes(self, dtype: str) -> int:
        """Bytes of a version whose parameters are published as `dtype`."""
        return self.trained * ITEM_BYTES[dtype] + sum(self.as_stored.values())


def outline(model_path: str | Path, reward_model: bool = False) -> Outline:
    """The outline of a checkpoint's table, or of the reward model's that begins from it. Another
    process makes it if this one has not imported torch. The result is cached until the checkpoint's
    files change."""
    return _outline(str(model_path), reward_model, _file_states(Path(model_path)))


@lru_cache(maxsize=32)
def _outline(model_path: str, reward_model: bool, files: tuple[FileState, ...]) -> Outline:
    if "torch" in sys.modules:
        return _outline_here(model_path, reward_model)
    command = [sys.executable, "-m", "asyncrl.weights.outline", model_path]
    command += [REWARD_MODEL] if reward_model else []
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TABLE_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")
    return Outline(**json.loads(done.stdout.splitlines()[-1]))


def _outline_here(model_path: str, reward_model: bool) -> Outline:
    try:
        table = version_table(model_path)
        if reward_model:
            table = classifier_table(model_path, table)
    except (CannotPublishError, CheckpointFilesError) as error:
        return Outline(0, 0, {}, (), {}, str(error))
    trained = [tensor.stored.elements for tensor in table.tensors if tensor.pieces]
    as_stored = {
        tensor.name: tensor.stored.elements * ITEM_BYTES[tensor.stored.dtype]
        for tensor in table.tensors
        if not tensor.pieces
    }
    return Outline(sum(trained), max(trained), as_stored, table.left_out, table.parameters)


def _file_states(directory: Path) -> tuple[FileState, ...]:
    files = [*sorted(directory.glob("*.safetensors*")), directory / "config.json"]
    return tuple(
        (file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists()
    )


if __name__ == "__main__":
    print(json.dumps(asdict(_outline_here(sys.argv[1], REWARD_MODEL in sys.argv[2:]))))
