"""Fingerprints of the weights in an engine (see `asyncrl.weights.fingerprint`). Runs in the
engine's worker process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch

from asyncrl.contracts.adapters import PREFIX
from asyncrl.runtime.processes.gpu_memory import gpu_memory
from asyncrl.weights.fingerprint import Block, Fingerprint, Shard, fingerprint, row_products, signs

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class EngineFingerprints:
    """Extension of vLLM's worker (`worker_extension_cls`): adds methods for `collective_rpc`."""

    model_runner: GPUModelRunner
    """An attribute of the worker that this class extends."""

    def loaded_shards(self) -> dict[str, Shard]:
        """Published name → products of this worker's shard."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        return loaded_shards(self.model_runner.model, ParallelLMHead)

    def gpu_memory(self) -> tuple[int, int]:
        """See `asyncrl.runtime.processes.gpu_memory.gpu_memory`."""
        return gpu_memory()

    def fingerprints_of_adapter(self, number: int, scale: float) -> dict[str, Fingerprint]:
        """Published name → fingerprint of the matrices of vLLM's adapter `number`; empty if it is
        not in memory.

        Args:
            scale: the factor of the adapter's product, which vLLM has multiplied into B.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        adapter = manager.list_adapters().get(number)
        return {} if adapter is None else adapter_fingerprints(manager.model, adapter, scale)


@torch.no_grad()
def loaded_shards(model: torch.nn.Module, head: type) -> dict[str, Shard]:
    """Name → this worker's shard of every parameter of a vLLM model, computed from the weights that
    its kernels use. The names are the checkpoint's; fused layers are split into their parts.

    Args:
        head: class of output heads.
    """
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    found: dict[str, Shard] = {}
    for path, module in model.named_modules():
        # vLLM wraps a layer that may have an adapter.
        parent, _, leaf = path.removesuffix(".base_layer").rpartition(".")
        for name, products in _products(module, head):
            split = _split_of(module, name)
            for part, rows, blocks in _parts(leaf, module, products, packed):
                engine_name = ".".join(filter(None, (parent, part, name)))
                shard = Shard(rows.tobytes(), split, blocks)
                found |= dict.fromkeys(_names(model, engine_name), shard)
    return found


@torch.no_grad()
def adapter_fingerprints(
    model: torch.nn.Module, adapter: LoRAModel, scale: float
) -> dict[str, Fingerprint]:
    """Published name → fingerprint of each matrix of an adapter in memory. Fused layers have one
    pair of matrices for each of their parts."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    found: dict[str, Fingerprint] = {}
    for path, layer in adapter.loras.items():
        parent, _, leaf = path.rpartition(".")
        fused = isinstance(layer.lora_a, list)
        parts = packed.get(leaf, [leaf]) if fused else [leaf]
        for side, matrices, factor in (("A", layer.lora_a, 1.0), ("B", layer.lora_b, scale)):
            for part, matrix in zip(parts, matrices if fused else [matrices], strict=True):
                if matrix is None:  # this part has no adapter
                    continue
                products = row_products(matrix.float().cpu().numpy()) / factor
                for name in _names(model, ".".join(filter(None, (parent, part)))):
                    found[f"{PREFIX}{name}.lora_{side}.weight"] = fingerprint(products)
    return found


def _names(model: torch.nn.Module, engine_name: str) -> Iterator[str]:
    """The name in the engine's model, and its names with the checkpoint's prefixes, which vLLM
    replaces in some models (such as vision models). Names that the checkpoint does not have are
    ignored in the comparison."""
    yield engine_name
    prefixes: Mapping[str, str | None] = getattr(
        getattr(model, "hf_to_vllm_mapper", None), "orig_to_new_prefix", {}
    )
    for theirs, ours in prefixes.items():
        if ours and engine_name.startswith(ours):
            yield theirs + engine_name.removeprefix(ours)


def _split_of(module: torch.nn.Module, name: str) -> Literal["none", "rows", "columns"]:
    """How the module's parameter is split between the engine's workers."""
    if getattr(module, "tp_size", 1) == 1:
        return "none"
    if _first_column(module, name) is not None:
        return "columns"
    held = getattr(module, "output_size_per_partition", None)
    whole = getattr(module, "output_size", None) or getattr(module, "num_embeddings_padded", None)
    return "none" if held is None or held == whole else "rows"


def _first_column(module: torch.nn.Module, name: str) -> int | None:
    """The column at which this worker's part of a weight begins; None if it has all columns."""
    held = getattr(module, "input_size_per_partition", None)
    if name != "weight" or held is None or held == module.input_size:
        return None
    return cast("int", module.tp_rank) * int(held)


def _products(module: torch.nn.Module, head: type) -> Iterator[tuple[str, np.ndarray]]:
    """Name and rows' products of each of the module's own parameters.

    On CPU, a linear layer keeps its weight only in its kernel's packed form, and a head computes
    with a packed copy of its weight. Their kernels compute the products.
    """
    for name, parameter in module.named_parameters(recurse=False):
        start = _first_column(module, name) or 0
        if (
            name == "weight"
            and hasattr(module, "cpu_linear")
            and (not parameter.numel() or isinstance(module, head))
        ):
            yield name, _through_kernel(module, parameter, start)
        elif parameter.numel():
            yield name, row_products(parameter.detach().float().cpu().numpy(), start)


def _through_kernel(module: torch.nn.Module, weight: torch.Tensor, start: int) -> np.ndarray:
    columns = (
        getattr(module, "input_size_per_partition", None)
        or getattr(module, "input_size", None)
        or cast("int", module.embedding_dim)
    )
    method = cast("QuantizeMethodBase", module.quant_method)
    by = torch.from_numpy(signs(columns, start)).to(weight.dtype).to(weight.device)
    return method.apply(module, by[None])[0].double().cpu().numpy()


def _parts(
    leaf: str, module: torch.nn.Module, products: np.ndarray, packed: dict[str, list[str]]
) -> Iterator[tuple[str, np.ndarray, tuple[Block, ...]]]:
    """Split the products of a fused layer into those of the checkpoint's layers. A layer that the
    checkpoint fuses too stays whole, and has several blocks."""
    blocks, parts = _blocks(module, len(products)), packed.get(leaf, [leaf])
    if len(parts) != len(blocks):
        yield leaf, products, blocks
        return
    ends = np.cumsum([block.rows for block in blocks])[:-1]
    for part, rows, block in zip(parts, np.split(products, ends), blocks, strict=True):
        yield part, rows, (block,)


def _blocks(module: torch.nn.Module, rows: int) -> tuple[Block, ...]:
    """The blocks of this worker's rows. Several workers have the keys and values in common, where
    the model has fewer of their heads than the engine has workers."""
    workers = getattr(module, "tp_size", 1)
    sizes = [size // workers for size in getattr(module, "output_sizes", None) or ()]
    if sum(sizes) != rows:
        return (Block(rows),)
    first, *others = sizes
    copies = getattr(module, "num_kv_head_replicas", 1)
    return (Block(first), *(Block(size, copies) for size in others))
