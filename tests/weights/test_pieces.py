"""Selections compared with real tensors of element numbers: after the same operations, the pieces
copy the same elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.weights.pieces import NotExpressibleError, Piece, Selection

SHAPES = {"a": (4, 6, 5), "b": (4, 3, 5), "c": (12, 10)}
Operation = Callable[[dict[str, Any]], Any]

OPERATIONS: dict[str, Operation] = {
    "nothing": lambda t: t["a"],
    "one expert": lambda t: torch.chunk(t["a"], 4, dim=0)[2].squeeze(),
    "half of one expert": (
        lambda t: torch.chunk(torch.chunk(t["a"], 2, dim=1)[1], 4, dim=0)[3].squeeze()
    ),
    "the last chunk is smaller": lambda t: torch.chunk(t["c"], 5, dim=0)[3],
    "transposed": lambda t: torch.transpose(t["a"], 1, 2).contiguous(),
    "transposed by a negative dimension": lambda t: t["a"].transpose(-1, 0),
    "cut, then transposed": lambda t: torch.chunk(t["a"], 3, dim=1)[1].transpose(0, 2),
    "joined": lambda t: torch.cat([t["a"], t["b"]], dim=1),
    "joined and cut across the seam": lambda t: torch.cat([t["a"], t["b"]], dim=-2).narrow(1, 4, 4),
    "stacked": lambda t: torch.stack([t["c"], t["c"]], dim=1),
    "unbound": lambda t: torch.unbind(t["a"], dim=1)[4],
    "interleaved": (
        lambda t: t["c"].reshape([6, 2, 10]).transpose(0, 1).reshape((12, 10)).contiguous()
    ),
    "interleaved and cut": lambda t: torch.chunk(
        t["c"].reshape(6, 2, 10).transpose(0, 1).reshape(12, 10), 2, dim=0
    )[1],
    "interleaved and cut within": (
        lambda t: t["c"].reshape(6, 2, 10).transpose(0, 1).reshape(12, 10).narrow(0, 7, 2)
    ),
    "heads permuted": lambda t: t["c"].view(3, 2, 2, 10).transpose(1, 2).reshape(12, 10),
    "flat": lambda t: t["c"].reshape(-1),
    "split within a digit": (
        lambda t: t["c"].reshape(2, 6, 5, 2).permute(3, 1, 0, 2).reshape(4, 3, 10)
    ),
    "joined after other operations": lambda t: torch.cat(
        [t["a"].reshape(12, 10).transpose(0, 1), t["c"].transpose(0, 1)], dim=1
    ),
}


def tensors() -> dict[str, torch.Tensor]:
    """Tensors in which every element has a unique number."""
    return {
        name: torch.arange(index * 1000, index * 1000 + torch.Size(shape).numel()).view(shape)
        for index, (name, shape) in enumerate(SHAPES.items())
    }


def copied(shape: tuple[int, ...], pieces: tuple[Piece, ...] | list[Piece]) -> torch.Tensor:
    target = torch.full((torch.Size(shape).numel(),), -1)
    for piece in pieces:
        source = tensors()[piece.parameter].reshape(-1)
        target.as_strided(piece.shape, piece.to_strides, piece.to).copy_(
            source.as_strided(piece.shape, piece.strides, piece.start)
        )
    return target.view(shape)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("limit", [1, 3, 7, 40, 1000])
def test_the_pieces_copy_the_result_of_the_operation(name: str, limit: int) -> None:
    right = OPERATIONS[name](tensors())
    selection = OPERATIONS[name](
        {name: Selection.of(name, shape) for name, shape in SHAPES.items()}
    )
    assert selection.shape == selection.size() == tuple(right.shape)
    parts = [part for piece in selection.pieces() for part in piece.parts(limit)]
    assert torch.equal(copied(selection.shape, parts), right)
    assert sum(part.elements for part in parts) == right.numel(), "no element is copied twice"
    assert all(part.span <= limit or part.elements == 1 for part in parts)


def test_contiguous_elements_become_one_piece() -> None:
    (piece,) = Selection.of("a", (4, 6, 5)).chunk(4)[1].pieces()
    assert piece == Piece("a", (30,), 30, (1,), 0, (1,))
    assert (
        Selection.of("x", ()).pieces()
        == Selection.of("x", (1, 1)).pieces()
        == (Piece("x", (1,), 0, (1,), 0, (1,)),)
    )


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (lambda t: torch.add(t["a"], 1), r"calls torch.add"),
        (lambda t: torch.cat([t["a"], t["b"]], dim=1).reshape(-1), "reshapes a joined tensor"),
        (lambda t: torch.cat([t["a"], t["b"]], dim=0), "joins"),
        (
            lambda t: t["c"].reshape(6, 2, 10).transpose(0, 1).reshape(12, 10).narrow(0, 5, 4),
            "slices across",
        ),
        (lambda t: t["c"].transpose(0, 1).reshape(8, 15), "across its pieces"),
        (lambda t: t["c"].reshape(7, 7), "reshapes 120 elements"),
    ],
)
def test_an_unsupported_operation_raises(operation: Operation, words: str) -> None:
    with pytest.raises(NotExpressibleError, match=words):
        operation({name: Selection.of(name, shape) for name, shape in SHAPES.items()})


def test_sizes_may_be_numpy_integers() -> None:
    assert Selection.of("a", (4, 6, 5)).reshape(np.int64(2), 60).shape == (2, 60)
