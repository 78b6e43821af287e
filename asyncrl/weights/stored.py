"""Lists the tensors of a checkpoint directory from its index and the headers of its files."""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
"""Name in a file → torch's name of each dtype that can be published. Quantized dtypes are missing,
because their tensors cannot be trained."""


COMPARED_ELEMENTS = 1 << 22
"""Elements of two tensors that are compared at a time."""
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Samples of each weights file, and the bytes of one."""


class CheckpointFilesError(ValueError):
    """The tensors of a checkpoint directory cannot be read."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a checkpoint's file. `dtype` is torch's name, or the file's name for a dtype that
    cannot be published."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def sampled_weights(model_path: str | Path) -> dict[str, tuple[int, str]]:
    """Name of each weights file → its bytes, and SHA-256 of samples over its length. Training
    changes the samples.

    Raises:
        CheckpointFilesError: see `stored_files`.
        OSError: a file cannot be read.
    """
    weights = {}
    for file in stored_files(model_path):
        samples = hashlib.sha256()
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            for number in range(SAMPLES):
                opened.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                samples.update(opened.read(SAMPLE_BYTES))
        weights[file.name] = size, samples.hexdigest()
    return weights


def weights_hash(model_path: str | Path) -> str:
    """SHA-256 of `sampled_weights`, in hexadecimal. The same weights in other files have another
    hash.

    Raises:
        CheckpointFilesError, OSError: see `sampled_weights`.
    """
    return hashlib.sha256(
        json.dumps(sorted(sampled_weights(model_path).items())).encode()
    ).hexdigest()


def stored_files(model_path: str | Path) -> list[Path]:
    """The checkpoint's weight files: those that the index names, or `model.safetensors`. Other
    safetensors files do not belong to the checkpoint, such as the same weights in another format.

    Raises:
        CheckpointFilesError: a file is missing, the index names a path outside the directory, or
            it is unclear which files belong to the checkpoint.
    """
    directory = Path(model_path)
    if not (directory / INDEX).exists():
        if not (directory / SINGLE).exists():
            raise CheckpointFilesError(
                f"{str(directory)!r} has no {SINGLE} and no {INDEX}; give a Hugging Face"
                " checkpoint directory with safetensors"
            )
        if more := sorted(
            file.name for file in directory.glob("*.safetensors") if file.name != SINGLE
        ):
            # vLLM would load all of them.
            raise CheckpointFilesError(
                f"{str(directory)!r} has {SINGLE} and {more[0]}, but no {INDEX} that lists the"
                " files to read; move the other files elsewhere"
            )
        return [directory / SINGLE]
    if (directory / SINGLE).exists() and set(_weight_map(directory).values()) != {SINGLE}:
        raise CheckpointFilesError(
            f"{str(directory)!r} has {SINGLE} and an {INDEX} that names other files; remove one"
            " of the two"
        )
    names = sorted(set(_weight_map(directory).values()))
    for name in names:
        if Path(name).name != name:
            raise CheckpointFilesError(
                f"{str(directory / INDEX)!r} names {name!r}, which is not a file of that directory;"
                " write the index again"
            )
        if not (directory / name).exists():
            raise CheckpointFilesError(
                f"{str(directory / INDEX)!r} names {name!r}, which is missing; complete the"
                " download"
            )
    return [directory / name for name in names]


def stored_tensors(model_path: str | Path) -> dict[str, StoredTensor]:
    """Name → tensor of everything in the checkpoint's files.

    Raises:
        CheckpointFilesError: as in `stored_files`, or a file is damaged, or two files have a tensor
            of the same name.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, StoredTensor] = {}
    for file in stored_files(model_path):
        try:
            file.open("rb").close()  # safetensors calls a file missing that it may not read
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    if name in found:
                        raise CheckpointFilesError(
                            f"{found[name].file} and {file} both have {name!r}; keep one of them"
                        )
                    view = tensors.get_slice(name)
                    dtype = str(view.get_dtype())
                    found[name] = StoredTensor(
                        file, tuple(view.get_shape()), TORCH_NAMES.get(dtype, dtype)
                    )
        except PermissionError as error:
            raise CheckpointFilesError(
                f"{file} cannot be read ({error.strerror}); give this user permission to read it"
            ) from None
        except (SafetensorError, OSError) as error:
            raise CheckpointFilesError(
                f"{file} cannot be read ({error}); download it again"
            ) from None
    return found


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file with the permissions of any new file. The library makes a private
    one."""
    from safetensors.torch import save_file

    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)


def same_values(stored: Mapping[str, StoredTensor], one: str, other: str) -> bool:
    """Whether two tensors of a checkpoint are equal, in float32. NaN equals NaN. Reads them in
    parts."""
    import torch
    from safetensors import safe_open

    names, equal = (one, other), partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
    if stored[one].shape != stored[other].shape:
        return False
    with ExitStack() as files:
        slices = [
            files.enter_context(safe_open(stored[name].file, framework="pt")).get_slice(name)
            for name in names
        ]
        shape = stored[one].shape
        if not shape:
            return equal(*(part[...].float() for part in slices))
        rows = max(1, COMPARED_ELEMENTS // max(1, math.prod(shape[1:])))
        return all(
            equal(*(part[start : start + rows].float() for part in slices))
            for start in range(0, shape[0], rows)
        )


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
            f"the weight_map of {str(directory / INDEX)!r} names no files; download it again"
        )
    return weight_map
