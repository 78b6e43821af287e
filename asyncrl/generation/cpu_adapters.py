"""vLLM plugin for engines on the CPU: multiplies all tokens of an adapter at once.

vLLM's operators for adapters (LoRA, arXiv:2106.09685) on the CPU copy an adapter's matrices once
per token, which takes most of the engine's time. They also give a token without an adapter, whose
slot is -1, the adapter in the last slot. Here each adapter in a step is one matrix product, and a
token without an adapter gets none.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu


def products(inputs: torch.Tensor, adapters: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Each row times the matrix of its adapter.

    Args:
        inputs: [rows, in].
        adapters: [slots, out, in] or [slots, 1, out, in].
        slots: [rows]: the slot of each row's adapter; -1 = the row has none.

    Returns:
        [rows, out], of the type of `inputs`. A row without an adapter has zeros.
    """
    if adapters.dim() == 4:
        adapters = adapters.squeeze(1)
    lowest, highest = (int(slot) for slot in slots.aminmax())
    if lowest == highest >= 0:
        return inputs @ adapters[highest].to(inputs.dtype).T
    found = inputs.new_zeros(len(inputs), adapters.shape[1])
    for slot in range(max(lowest, 0), highest + 1):
        rows = (slots == slot).nonzero().squeeze(1)
        if len(rows):
            found[rows] = inputs[rows] @ adapters[slot].to(inputs.dtype).T
    return found


def shrink(
    inputs: torch.Tensor,
    adapters: torch.Tensor,
    output: torch.Tensor,
    slots: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """vLLM's `bgmv_shrink`: write the products with the adapters' first matrices, [rank, in]."""
    found = products(inputs.to(output.dtype), adapters, slots)
    output[:, : found.shape[1]] = scaling * found


def expand(
    inputs: torch.Tensor,
    adapters: torch.Tensor,
    output: torch.Tensor,
    slots: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    """vLLM's `bgmv_expand`: add or write the products with the second matrices, [out, rank].
    `output` may have other padding than the adapter."""
    width = min(adapters.shape[-2], output.shape[1])
    expand_slice(inputs, adapters[..., :width, :], output, slots, 0, width, add_inputs)


def expand_slice(
    inputs: torch.Tensor,
    adapters: torch.Tensor,
    output: torch.Tensor,
    slots: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """vLLM's `bgmv_expand_slice`: the same for some columns of the output."""
    found = products(inputs.to(output.dtype), adapters, slots)
    part = output[: len(found), slice_offset : slice_offset + slice_size]
    if add_inputs:
        part += found
    else:
        part.copy_(found)


def multiply_by_adapter() -> None:
    """Make vLLM's adapters on the CPU use these operators. A second call has no effect."""
    modules: tuple[Any, ...] = (lora_ops, punica_cpu)  # those of prefills call those in `lora_ops`
    for module in modules:
        module.bgmv_shrink = shrink
        module.bgmv_expand = expand
        module.bgmv_expand_slice = expand_slice
