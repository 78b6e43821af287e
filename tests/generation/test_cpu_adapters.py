"""The plugin that multiplies all tokens of an adapter at once."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
import torch
from hypothesis import given, settings, strategies as st
from vllm.lora.ops.torch_ops import lora_ops

from asyncrl.generation import cpu_adapters

SLOTS, RANK, WIDTH, OUT = 3, 4, 6, 10
THEIRS = {name: getattr(lora_ops, name) for name in ("bgmv_shrink", "bgmv_expand_slice")}


def by_row(inputs: torch.Tensor, adapters: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """The definition: each row alone."""
    return torch.stack(
        [
            adapters[slot, 0] @ row if slot >= 0 else row.new_zeros(adapters.shape[2])
            for row, slot in zip(inputs, slots, strict=True)
        ]
    )


@settings(deadline=None)
@given(slots=st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_each_row_gets_its_own_adapter_and_a_row_without_one_gets_none(slots, seed):
    torch.manual_seed(seed)
    first, second = torch.randn(SLOTS, 1, RANK, WIDTH), torch.randn(SLOTS, 1, OUT, RANK)
    inputs, before = torch.randn(len(slots), WIDTH), torch.randn(len(slots), 16)
    where = torch.tensor(slots)

    middle = torch.zeros(len(slots), RANK)
    cpu_adapters.shrink(inputs, first, middle, where, 0.5)
    expected = 0.5 * by_row(inputs, first, slots)
    torch.testing.assert_close(middle, expected)

    after = before.clone()
    cpu_adapters.expand_slice(middle, second, after, where, 3, OUT)
    added = by_row(middle, second, slots)
    torch.testing.assert_close(after[:, 3 : 3 + OUT], before[:, 3 : 3 + OUT] + added)
    assert torch.equal(after[:, :3], before[:, :3])
    assert torch.equal(after[:, 3 + OUT :], before[:, 3 + OUT :])

    for add_inputs in (True, False):  # the adapter is padded to more columns than the output
        after = before[:, :7].clone()
        cpu_adapters.expand(middle, second, after, where, add_inputs)
        torch.testing.assert_close(after, add_inputs * before[:, :7] + added[:, :7])


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_adapters_get_what_vllm_gives_them(rows, dtype):
    assert {made.__module__ for made in THEIRS.values()} == {lora_ops.__name__}
    torch.manual_seed(0)
    inputs = torch.randn(rows, WIDTH).to(dtype)
    first, second = (torch.randn(shape).to(dtype) for shape in ((2, 1, 4, WIDTH), (2, 1, OUT, 4)))
    slots = torch.arange(rows) % 2
    found = []
    for shrink, expand_slice in (
        (THEIRS["bgmv_shrink"], THEIRS["bgmv_expand_slice"]),
        (cpu_adapters.shrink, cpu_adapters.expand_slice),
    ):
        middle, output = torch.zeros(rows, RANK), torch.ones(rows, 16).to(dtype)
        shrink(inputs, first, middle, slots, 2.0)
        expand_slice(middle, second, output, slots, 2, OUT)
        found.append((middle, output))
    for theirs, ours in zip(*found, strict=True):
        assert theirs.dtype == ours.dtype
        torch.testing.assert_close(ours, theirs)


def test_an_engine_on_the_cpu_loads_the_plugin():
    from asyncrl.generation import engine_environment

    (plugin,) = entry_points(group="vllm.general_plugins", name="asyncrl_adapters")
    assert plugin.load() is cpu_adapters.multiply_by_adapter
    assert plugin.name in engine_environment("cpu")["VLLM_PLUGINS"].split(",")
    assert plugin.name not in engine_environment("cuda")["VLLM_PLUGINS"]
