"""The tensors that a checkpoint directory holds, told from its index and the headers of its
files."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CheckpointFilesError", "StoredTensor", "stored_files", "stored_tensors"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The types that can be published, by their names in a file. Quantized types are not among them:
their tensors cannot be trained."""


class CheckpointFilesError(ValueError):
    """A checkpoint directory whose tensors cannot be read."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a checkpoint's file. `dtype` is torch's name, or the file's own name for a type
    that cannot be published."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def stored_files(model_path: str | Path) -> list[Path]:
    """The checkpoint's weight files: those that the index names, or `model.safetensors`. Other
    safetensors files in the directory are not part of it, such as the same weights once more in
    another format.

    Raises:
        CheckpointFilesError: there are none, one is missing, or the index names a path outside the
            directory.
    """
    directory = Path(model_path)
    if not (directory / INDEX).exists():
        if not (directory / SINGLE).exists():
            raise CheckpointFilesError(
                f"{str(directory)!r} holds neither {SINGLE} nor {INDEX}; give a Hugging Face"
                " checkpoint directory with safetensors"
            )
        if more := sorted(
            file.name for file in directory.glob("*.safetensors") if file.name != SINGLE
        ):
            # vLLM would load every one of them.
            raise CheckpointFilesError(
                f"{str(directory)!r} holds {more[0]} beside {SINGLE} and no {INDEX} that says which"
                " to read; move it elsewhere"
            )
        return [directory / SINGLE]
    if (directory / SINGLE).exists() and set(_weight_map(directory).values()) != {SINGLE}:
        raise CheckpointFilesError(
            f"{str(directory)!r} holds {SINGLE} and an {INDEX} that names other files; remove one"
            " of the two"
        )
    names = sorted(set(_weight_map(directory).values()))
    for name in names:
        if Path(name).name != name:
            raise CheckpointFilesError(
                f"{str(directory / INDEX)!r} names {name!r}, which is no file of that directory;"
                " write the index again"
            )
        if not (directory / name).exists():
            raise CheckpointFilesError(
                f"{str(directory / INDEX)!r} names {name!r}, which is not there; complete the"
                " download"
            )
    return [directory / name for name in names]


def stored_tensors(model_path: str | Path) -> dict[str, StoredTensor]:
    """Name → tensor of everything in the checkpoint's files.

    Raises:
        CheckpointFilesError: as `stored_files`, a file is damaged, or two files hold the same name.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, StoredTensor] = {}
    for file in stored_files(model_path):
        try:
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - a safetensors file is no mapping
                    if name in found:
                        raise CheckpointFilesError(
                            f"{found[name].file} and {file} both hold {name!r}; keep one of them"
                        )
                    view = tensors.get_slice(name)
                    dtype = str(view.get_dtype())
                    found[name] = StoredTensor(
                        file, tuple(view.get_shape()), TORCH_NAMES.get(dtype, dtype)
                    )
        except (SafetensorError, OSError) as error:
            raise CheckpointFilesError(
                f"{file} cannot be read ({error}); download it again"
            ) from None
    return found


def _weight_map(directory: Path) -> dict[str, str]:
    try:
        weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointFilesError(
            f"{str(directory / INDEX)!r} is not JSON with a weight_map; download it again"
        ) from None
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise CheckpointFilesError(
            f"{str(directory / INDEX)!r} has a weight_map without files; download it again"
        )
    return weight_map
