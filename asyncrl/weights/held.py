"""What an engine holds, tensor by tensor, as `asyncrl.weights.fingerprint` describes it. Lives in
the engine's worker process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from asyncrl.weights.fingerprint import Fingerprint, fingerprint, row_products, signs

__all__ = ["HeldWeights", "held_fingerprints"]


class HeldWeights:
    """What vLLM adds to its worker (`worker_extension_cls`): a method for `collective_rpc`."""

    def held_fingerprints(self) -> dict[str, Fingerprint]:
        """Published name → fingerprint."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        worker: Any = self
        return held_fingerprints(worker.model_runner.model, ParallelLMHead)


@torch.no_grad()
def held_fingerprints(model: torch.nn.Module, head: type) -> dict[str, Fingerprint]:
    """Name → fingerprint of every parameter of a vLLM model, as it computes with it, under the
    checkpoint's names: fused layers are taken apart.

    Args:
        head: class of output heads.
    """
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    found: dict[str, Fingerprint] = {}
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        for name, products in _products(module, head):
            for part, rows in _apart(leaf, module, products, packed):
                held = ".".join(filter(None, (parent, part, name)))
                found |= dict.fromkeys(_names(model, held), fingerprint(rows))
    return found


def _names(model: torch.nn.Module, held: str) -> Iterator[str]:
    """The name in the engine's model, and those of the checkpoint that vLLM makes it from by
    another prefix, as for a model with vision. A name that the checkpoint does not have is not
    compared."""
    yield held
    prefixes: Mapping[str, str | None] = getattr(
        getattr(model, "hf_to_vllm_mapper", None), "orig_to_new_prefix", {}
    )
    for theirs, ours in prefixes.items():
        if ours and held.startswith(ours):
            yield theirs + held.removeprefix(ours)


def _products(module: torch.nn.Module, head: type) -> Iterator[tuple[str, np.ndarray]]:
    """Name and rows' products of each of the module's own parameters. On CPU a linear layer keeps
    its weight only in its kernel's packed form, and a head computes with such a copy of the weight:
    both are asked for the products."""
    for name, parameter in module.named_parameters(recurse=False):
        if (
            name == "weight"
            and hasattr(module, "cpu_linear")
            and (not parameter.numel() or isinstance(module, head))
        ):
            yield name, _through_kernel(module, parameter)
        elif parameter.numel():
            yield name, row_products(parameter.detach().float().cpu().numpy())


def _through_kernel(module: Any, weight: torch.Tensor) -> np.ndarray:
    columns = (
        getattr(module, "input_size_per_partition", None)
        or getattr(module, "input_size", None)
        or module.embedding_dim
    )
    by = torch.from_numpy(signs(columns)).to(weight.dtype).to(weight.device)
    products: torch.Tensor = module.quant_method.apply(module, by[None])[0]
    return products.double().cpu().numpy()


def _apart(
    leaf: str, module: Any, products: np.ndarray, packed: dict[str, list[str]]
) -> Iterator[tuple[str, np.ndarray]]:
    """The products of each of the checkpoint's layers that this one is made of."""
    sizes = getattr(module, "output_sizes", None)
    parts = packed.get(leaf, [leaf])
    if sizes is None or len(parts) == 1 or len(parts) != len(sizes) or sum(sizes) != len(products):
        yield leaf, products
        return
    yield from zip(parts, np.split(products, np.cumsum(sizes)[:-1]), strict=True)
