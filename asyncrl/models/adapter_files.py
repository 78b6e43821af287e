"""Reads an adapter (LoRA) in PEFT's format. Needs torch only for the values of its matrices."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.contracts.adapters import PREFIX

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TAKEN = {
    "r": "r",
    "lora_alpha": "alpha",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "target_modules": "target_modules",
}
"""PEFT's setting → the setting of the section `lora`."""
DEFAULTS: Mapping[str, object] = {"r": 8, "lora_alpha": 8}
"""PEFT's values of settings that a file leaves out, where those of `lora` are others."""
ABSENT: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
    "qalora_group_size": (16,),
}
"""Values of PEFT's settings that change nothing, besides empty ones."""
WITHOUT_EFFECT = (
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "revision",
    "runtime_config",
    "task_type",
)
"""PEFT's settings that do not change what the adapter of a `torch.nn.Linear` computes in
evaluation."""
NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")
"""PEFT's settings that take layers from those of target_modules. The names of the matrices tell the
layers that are left."""
MAGNITUDE = re.compile(r"(lora_magnitude_vector)(\.weight)?")


class AdapterFilesError(ValueError):
    """A folder is no adapter that can be trained here. The message is one line and names it."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """What a folder says of its adapter."""

    settings: Mapping[str, object]
    """Setting of the section `lora` → value."""
    shapes: Mapping[str, tuple[int, ...]]
    """Published name of each matrix → its shape."""
    base: str
    """The model that it was made for, as PEFT recorded it; may be empty."""
    dropout: float
    """Share of an adapter's inputs that PEFT drops in training. Nothing is dropped here."""


def adapter_base(directory: Path) -> str | None:
    """The model for which a folder's adapter was made, "" if it is not recorded; None if the folder
    has no adapter."""
    if not (directory / SETTINGS).exists():
        return None
    return str(_tree(directory).get("base_model_name_or_path") or "")


def open_adapter(directory: Path) -> AdapterFolder:
    """Read an adapter's settings and the shapes of its matrices.

    Raises:
        AdapterFilesError: there is no such adapter, or training it here would change it.
    """
    from safetensors import SafetensorError, safe_open

    tree = _tree(directory)
    _refuse_other_kinds(directory, tree)
    path = directory / WEIGHTS
    try:
        path.open("rb").close()
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
            shapes = {_published(name): tuple(file.get_slice(name).get_shape()) for name in names}
    except (OSError, SafetensorError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise AdapterFilesError(
            f"{path} cannot be read ({why}); give PEFT's folder of an adapter with safetensors"
        ) from None
    if len(shapes) < len(names):
        found = [_published(name) for name in names]
        twice = next(name for name in found if found.count(name) > 1)
        raise AdapterFilesError(f"{path} has {twice!r} under two names; keep one of them")
    if foreign := next((name for name in shapes if ".lora_" not in name), None):
        raise AdapterFilesError(
            f"{path} has {foreign!r}, which is no matrix of an adapter; merge the adapter into its"
            " model, and train that"
        )
    tree = {**DEFAULTS, **tree}
    known = {ours: tree[theirs] for theirs, ours in TAKEN.items() if theirs in tree}
    targets = known.get("target_modules")
    if not isinstance(targets, list) or any(tree.get(name) not in (None, []) for name in NARROWING):
        known["target_modules"] = sorted({_layer(name) for name in shapes})
    base, dropout = tree.get("base_model_name_or_path"), tree.get("lora_dropout")
    share = dropout if isinstance(dropout, (int, float)) else 0.0
    return AdapterFolder(known, shapes, str(base or ""), share)


def read_matrices(directory: Path) -> dict[str, Tensor]:
    """The matrices by their published names.

    Raises:
        AdapterFilesError: a matrix has values that are no finite numbers, or a quantized type.
    """
    from safetensors.torch import load_file

    matrices = load_file(directory / WEIGHTS)
    for name, value in matrices.items():
        if not value.is_floating_point() or value.itemsize < 2:
            why = f"has type {value.dtype}; give an adapter that is not quantized"
        elif not value.isfinite().all():
            why = "has NaN or infinite values, so it cannot be trained; give an earlier checkpoint"
        else:
            continue
        raise AdapterFilesError(f"{name!r} in {directory / WEIGHTS} {why}")
    return {_published(name): value for name, value in matrices.items()}


def _tree(directory: Path) -> dict[str, object]:
    path = directory / SETTINGS
    try:
        tree = json.loads(path.read_text())
    except OSError as error:
        raise AdapterFilesError(
            f"{path} cannot be read ({error.strerror}); give PEFT's folder of an adapter"
        ) from None
    except ValueError as error:
        raise AdapterFilesError(f"{path} is not JSON ({error}); restore it") from None
    if not isinstance(tree, dict):
        raise AdapterFilesError(f"{path} is not a JSON object; restore it")
    return tree


def _refuse_other_kinds(directory: Path, tree: Mapping[str, object]) -> None:
    """Raise AdapterFilesError for a setting that would have no effect here."""
    if (kind := tree.get("peft_type")) != "LORA":
        raise AdapterFilesError(
            f"{directory} is an adapter of type {kind!r}; give one of type LORA"
        )
    for name, value in tree.items():
        known = name in TAKEN or name in WITHOUT_EFFECT or name in NARROWING
        if known or not value or value in ABSENT.get(name, ()):
            continue
        raise AdapterFilesError(
            f"{directory / SETTINGS} has {name} = {value!r}, which adapters have not here; merge"
            " the adapter into its model, and train that"
        )


def _published(name: str) -> str:
    name = name if name.startswith(PREFIX) else f"{PREFIX}{name}"
    return MAGNITUDE.sub(r"\1", name)


def _layer(published: str) -> str:
    return published.removeprefix(PREFIX).rpartition(".lora_")[0]
