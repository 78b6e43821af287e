"""Low-rank adapters on the learner's model (PEFT). The model's own weights are frozen.

PEFT replaces a linear layer by one that adds the adapter's product. The frozen weight is then named
`<layer>.base_layer.weight`, and the adapter's matrices `<layer>.lora_A.default.weight` [r, in] and
`<layer>.lora_B.default.weight` [out, r]. DoRA adds `<layer>.lora_magnitude_vector.default.weight`
[out].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig as PeftConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.config import LoraConfig
from asyncrl.contracts.adapters import PREFIX
from asyncrl.models.adapter_files import read_matrices

ADAPTER = "default"
"""PEFT's name for the only adapter."""
MATRIX = re.compile(rf"(?P<layer>.+)\.lora_(?P<side>A|B|magnitude_vector)\.{ADAPTER}\.weight")
MAGNITUDE = "magnitude_vector"


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapter of one layer, whose product is added to the layer's weight [out, in]. With DoRA,
    each row of the sum is then given a length of its own."""

    down: Tensor
    """PEFT's lora_A [r, in]."""
    up: Tensor
    """PEFT's lora_B [out, r]."""
    scale: float
    magnitude: Tensor | None = None
    """DoRA's lengths of the rows [out]."""
    factor: Tensor | None = None
    """DoRA's factors of the rows [out]: `magnitude` over the rows' own lengths (`with_factors`)."""

    def rows(self, start: int, count: int) -> Tensor:
        """The row of each of `count` flat elements from `start` on."""
        return torch.arange(start, start + count) // self.down.shape[1]

    def slice(self, start: int, count: int) -> Tensor:
        """`count` flat elements of scale · up @ down from `start` on."""
        width = self.down.shape[1]
        first, end = start // width, -(-(start + count) // width)
        rows = self.up[first:end] @ self.down * self.scale
        return rows.reshape(-1)[start - first * width :][:count]


def add_adapter(model: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
    """Add an adapter to the model's linear layers and freeze all other parameters. The matrices
    have the dtype of the weights. `lora_B` is 0, so the model's outputs are the same at first.

    Raises:
        ValueError: `lora.target_modules` names a layer that cannot have an adapter.
    """
    layers = _target_layers(model, lora)
    if not layers:
        raise ValueError(
            f"lora: {type(model).__name__} has no torch.nn.Linear besides its head; train all"
            " weights"
        )
    settings = PeftConfig(
        r=lora.r,
        lora_alpha=cast("int", lora.alpha),  # PEFT takes fractions too
        target_modules=layers,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the same values on every rank
        try:
            inject_adapter_in_model(settings, model, ADAPTER)
        except ValueError as error:
            raise ValueError(f"lora: PEFT refuses {type(model).__name__}: {error}") from error
    found = {match["layer"] for name, _ in model.named_parameters() if (match := _matrix(name))}
    if found != set(layers):
        # PEFT replaces the names of some models' layers by their experts' fused parameters, whose
        # adapters cannot be merged or published here.
        raise ValueError(
            f"lora: PEFT gives {type(model).__name__} other matrices than those of its linear"
            f" layers, first for {min(found ^ set(layers))!r}; name the attention's layers in"
            " lora.target_modules, or train all weights"
        )


def load_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Give the matrices of `add_adapter` the values of an adapter's folder, in their own dtype.

    Raises:
        ValueError: the folder has other matrices.
    """
    stored = read_matrices(directory)
    own = {published_name(name): part for name, part in model.named_parameters() if _matrix(name)}
    if different := sorted(set(stored) ^ {str(name) for name in own}):
        raise ValueError(
            f"lora.load = {str(directory)!r}: it has other matrices than lora.target_modules asks"
            f" for, first {different[0]!r}"
        )
    with torch.no_grad():
        for name, part in own.items():
            part.copy_(stored[str(name)])


def _target_layers(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Full names of the linear layers that get an adapter. Raises ValueError."""
    head = model.get_output_embeddings()
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    if lora.target_modules == "all-linear":
        return sorted(linear)
    for target in lora.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            leaves = sorted({name.rpartition(".")[2] for name in linear})
            raise ValueError(
                f"lora.target_modules: {target!r} is not a linear layer of"
                f" {type(model).__name__}; use all-linear, or some of {leaves}"
            )
    return sorted(
        name
        for name in linear
        if any(name == target or name.endswith(f".{target}") for target in lora.target_modules)
    )


def _matrix(name: str) -> re.Match[str] | None:
    return MATRIX.fullmatch(name)


def base_name(name: str) -> str | None:
    """The name of a parameter of the model's own, as without an adapter; None for a matrix of the
    adapter."""
    return None if _matrix(name) else name.replace(".base_layer.", ".")


def published_name(name: str) -> str | None:
    """The name of an adapter's matrix in PEFT's files; None for another parameter."""
    found = _matrix(name)
    if found is None:
        return None
    name = f"{PREFIX}{found['layer']}.lora_{found['side']}"
    return name if found["side"] == MAGNITUDE else f"{name}.weight"


def layer_of(published: str) -> str:
    """The layer of an adapter's matrix, from its published name."""
    return published.removeprefix(PREFIX).rpartition(".lora_")[0]


def adapter_settings(lora: LoraConfig, names: Iterable[str], model_path: str) -> dict[str, object]:
    """The content of PEFT's adapter_config.json.

    Args:
        names: published names of the adapter's matrices.
    """
    layers = {layer_of(name) for name in names}
    targets = lora.target_modules
    if isinstance(targets, str) or not any("." in target for target in targets):
        layers = {layer.rpartition(".")[2] for layer in layers}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_path,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(layers),
    }


def low_rank(lora: LoraConfig, matrices: Mapping[str, Tensor]) -> dict[str, LowRank]:
    """Name of a base weight → its adapter in float32, from the matrices by published name."""
    layers = {layer_of(name) for name in matrices}
    return {
        f"{layer}.weight": LowRank(
            matrices[f"{PREFIX}{layer}.lora_A.weight"].float(),
            matrices[f"{PREFIX}{layer}.lora_B.weight"].float(),
            lora.scale,
            matrices[f"{PREFIX}{layer}.lora_{MAGNITUDE}"] if lora.use_dora else None,
        )
        for layer in layers
    }


def add_squares(
    adapters: Mapping[str, LowRank],
    squares: dict[str, Tensor],
    parameter: str,
    start: int,
    values: Tensor,
) -> Tensor:
    """Add to `squares` the squared lengths [out] of DoRA's rows, from flat elements of a base
    weight from `start` on. Returns these elements. Pass each element exactly once."""
    found = adapters.get(parameter)
    if found is not None and found.magnitude is not None:
        total = squares.setdefault(parameter, torch.zeros(found.up.shape[0]))
        count = values.numel()
        sums = values.float().cpu() + found.slice(start, count)
        total.index_add_(0, found.rows(start, count), sums.square())
    return values


def with_factors(
    adapters: Mapping[str, LowRank], squares: Mapping[str, Tensor]
) -> dict[str, LowRank]:
    """The adapters with DoRA's factors, from the squared lengths of the rows (`add_squares`). PEFT
    rounds these lengths as it rounds the trained ones."""
    found = dict(adapters)
    for name, adapter in adapters.items():
        if adapter.magnitude is not None:
            lengths = squares[name].sqrt().to(adapter.magnitude.dtype).float()
            found[name] = replace(adapter, factor=adapter.magnitude.float() / lengths)
    return found


def merged(adapters: Mapping[str, LowRank], parameter: str, start: int, values: Tensor) -> Tensor:
    """Flat elements of a base weight from `start` on, with those of its adapter added."""
    found = adapters.get(parameter)
    if found is None:
        return values
    count = values.numel()
    total = values.float() + found.slice(start, count).to(values.device)
    if found.factor is not None:
        total *= found.factor[found.rows(start, count)].to(values.device)
    return total.to(values.dtype)


def share_weights_with_dora(
    model: nn.Module, share: Callable[[nn.Module, nn.Parameter], None]
) -> None:
    """Call `share(module, parameter)` for each parameter that DoRA's modules read although it is
    another module's."""
    for module in model.modules():
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_magnitude_vector:
            reader = module.lora_magnitude_vector[ADAPTER]
            for owner in (module.get_base_layer(), module.lora_A[ADAPTER], module.lora_B[ADAPTER]):
                share(reader, cast("nn.Parameter", owner.weight))
