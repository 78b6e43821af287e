"""The sizes of a version, for a plan. Making the table imports torch, which the driver does not: it
asks another process.

`python -m asyncrl.weights.outline DIRECTORY SCORES LORA` prints the result of `outline` as JSON.
SCORES is `true` for a reward model, else `false`. LORA is the adapter's settings in JSON, or null.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

from asyncrl.config import LoraConfig
from asyncrl.weights.classifier import classifier_table
from asyncrl.weights.layout import ITEM_BYTES
from asyncrl.weights.published import CannotPublishError, version_table
from asyncrl.weights.stored import CheckpointFilesError

TABLE_TIMEOUT_S = 300.0
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
    adapter: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of each of the adapter's matrices, by its published name; empty without an adapter."""
    refusal: str | None = None
    adapter_refusal: str | None = None
    """Why the model cannot have the adapter."""

    def nbytes(self, dtype: str) -> int:
        """Bytes of a version whose parameters are published as `dtype`."""
        return self.trained * ITEM_BYTES[dtype] + sum(self.as_stored.values())


def outline(
    model_path: str | Path, reward_model: bool = False, lora: LoraConfig | None = None
) -> Outline:
    """The outline of a checkpoint's table, or of the reward model's that begins from it. Another
    process makes it if this one has not imported torch. The result is cached until the checkpoint's
    files change.

    Args:
        lora: the adapter that the model shall have.
    """
    settings = "null" if lora is None else lora.model_dump_json()
    files = _file_states(Path(model_path))
    if lora is not None and lora.load is not None:
        files += _file_states(Path(lora.load))
    return _outline(str(model_path), reward_model, settings, files)


@lru_cache(maxsize=32)
def _outline(
    model_path: str, reward_model: bool, lora: str, files: tuple[FileState, ...]
) -> Outline:
    if "torch" in sys.modules:
        return _outline_here(model_path, reward_model, lora)
    command = [sys.executable, "-P", "-m", "asyncrl.weights.outline", model_path]
    command += [json.dumps(reward_model), lora]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TABLE_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")
    return Outline(**json.loads(done.stdout.splitlines()[-1]))


def _outline_here(model_path: str, reward_model: bool, lora: str) -> Outline:
    try:
        table = version_table(model_path)
        if reward_model:
            table = classifier_table(model_path, table)
    except (CannotPublishError, CheckpointFilesError) as error:
        return Outline(0, 0, {}, (), {}, refusal=str(error))
    trained = [tensor.stored.elements for tensor in table.tensors if tensor.pieces]
    as_stored = {
        tensor.name: tensor.stored.elements * ITEM_BYTES[tensor.stored.dtype]
        for tensor in table.tensors
        if not tensor.pieces
    }
    adapter: dict[str, tuple[int, ...]] = {}
    adapter_refusal = None
    if lora != "null":
        try:
            adapter = _adapter(model_path, LoraConfig.model_validate_json(lora))
        except ValueError as error:
            adapter_refusal = str(error)
    return Outline(
        sum(trained),
        max(trained),
        as_stored,
        table.left_out,
        table.parameters,
        adapter,
        adapter_refusal=adapter_refusal,
    )


def _adapter(model_path: str, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each of the adapter's matrices. PEFT makes them on a model without data.

    Raises:
        ValueError: the model cannot have the adapter, or its values cannot be trained.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from asyncrl.models.adapter_files import read_matrices
    from asyncrl.models.adapters import add_adapter, published_name

    if lora.load is not None:
        read_matrices(Path(lora.load))
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        add_adapter(model, lora, seed=0)
    return {
        published: tuple(matrix.shape)
        for name, matrix in model.named_parameters()
        if (published := published_name(name))
    }


def _file_states(directory: Path) -> tuple[FileState, ...]:
    files = [*sorted(directory.glob("*.safetensors*")), directory / "config.json"]
    return tuple(
        (file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists()
    )


if __name__ == "__main__":
    directory, scores, settings = sys.argv[1:]
    print(json.dumps(asdict(_outline_here(directory, json.loads(scores), settings))))
