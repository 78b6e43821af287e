"""Tracks which elements of which parameters a tensor consists of. It uses shapes and strides only,
without any data.

A `Selection` replaces a tensor while other code cuts, joins, transposes and reshapes it. The result
lists its pieces. Each piece has a strided position in a parameter and another one in the result.
It can therefore be copied from shards part by part.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")

Factor = tuple[int, int]
"""Size and stride of one digit of a dimension's index."""
Digits = tuple[Factor, ...]
"""A dimension's index as a mixed-radix number, outermost digit first. No digits mean size 1."""


class NotExpressibleError(ValueError):
    """The operation computes new elements, or its result has no strided pieces."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Where elements of a parameter are in a tensor. Both are row-major. Starts and strides count
    elements."""

    parameter: str
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]
    to: int
    to_strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """Elements of the parameter from the piece's first to its last."""
        return 1 + sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        )

    def parts(self, limit: int) -> Iterator[Piece]:
        """Split the piece into parts that each span at most `limit` elements of the parameter, or
        one element."""
        if self.span <= max(1, limit):
            yield self
            return
        widest = max(
            range(len(self.shape)), key=lambda dim: (self.shape[dim] - 1) * self.strides[dim]
        )
        rest = self.span - (self.shape[widest] - 1) * self.strides[widest]
        rows = max(1, (limit - rest) // self.strides[widest] + 1)
        for first in range(0, self.shape[widest], rows):
            yield from self._rows(widest, first, min(rows, self.shape[widest] - first)).parts(limit)

    def _rows(self, dim: int, first: int, count: int) -> Piece:
        shape = (*self.shape[:dim], count, *self.shape[dim + 1 :])
        return replace(
            self,
            shape=shape,
            start=self.start + first * self.strides[dim],
            to=self.to + first * self.to_strides[dim],
        )


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a tensor that is one strided part of a parameter.

    `corner` is its first index in each dimension of the tensor. `dims` are the digits of each
    dimension.
    """

    parameter: str
    start: int
    corner: tuple[int, ...]
    dims: tuple[Digits, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """Replaces a tensor that consists of parameters' elements. It has the tensor methods that
    transformers' conversions use, and torch's functions of the same names accept it.

    Raises:
        NotExpressibleError: any other torch function is called, or the result has no strided
            pieces.
    """

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, parameter: str, shape: Sequence[int]) -> Selection:
        """Select the whole parameter."""
        shape = tuple(shape)
        strides = _row_major(shape)
        dims = tuple(
            ((size, stride),) if size > 1 else ()
            for size, stride in zip(shape, strides, strict=True)
        )
        return cls(shape, (Block(parameter, 0, (0,) * len(shape), dims),))

    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of parameters that the tensor consists of."""
        return tuple(_piece(block, _row_major(self.shape)) for block in self.blocks)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def contiguous(self) -> Selection:
        return self

    def clone(self) -> Selection:
        return self

    def detach(self) -> Selection:
        return self

    def narrow(self, dim: int, start: int, length: int) -> Selection:
        dim %= self.ndim
        cut = [part for block in self.blocks for part in _cut(block, dim, start, start + length)]
        return Selection((*self.shape[:dim], length, *self.shape[dim + 1 :]), tuple(cut))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Selection, ...]:
        size = self.shape[dim]
        each = -(-size // chunks)
        return tuple(
            self.narrow(dim, first, min(each, size - first)) for first in range(0, size, each)
        )

    def unbind(self, dim: int = 0) -> tuple[Selection, ...]:
        return tuple(self.narrow(dim, index, 1).squeeze(dim) for index in range(self.shape[dim]))

    def squeeze(self, dim: int | None = None) -> Selection:
        removed = {
            index
            for index, size in enumerate(self.shape)
            if size == 1 and dim in (None, index, index - self.ndim)
        }
        return self._permuted([index for index in range(self.ndim) if index not in removed])

    def unsqueeze(self, dim: int) -> Selection:
        dim %= self.ndim + 1
        blocks = (
            replace(
                b,
                corner=(*b.corner[:dim], 0, *b.corner[dim:]),
                dims=(*b.dims[:dim], (), *b.dims[dim:]),
            )
            for b in self.blocks
        )
        return Selection((*self.shape[:dim], 1, *self.shape[dim:]), tuple(blocks))

    def transpose(self, dim0: int, dim1: int) -> Selection:
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self._permuted(order)

    def permute(self, *dims: int) -> Selection:
        return self._permuted([dim % self.ndim for dim in dims])

    def reshape(self, *shape: int | Sequence[int]) -> Selection:
        wanted = _sizes(shape, self.numel())
        if wanted == self.shape:
            return self
        if len(self.blocks) != 1:
            raise NotExpressibleError("reshapes a joined tensor")
        (block,) = self.blocks
        return Selection(
            wanted,
            (replace(block, corner=(0,) * len(wanted), dims=_regrouped(block.dims, wanted)),),
        )

    view = reshape

    def _permuted(self, order: list[int]) -> Selection:
        def ordered(values: tuple[T, ...]) -> tuple[T, ...]:
            return tuple(values[index] for index in order)

        return Selection(
            ordered(self.shape),
            tuple(replace(b, corner=ordered(b.corner), dims=ordered(b.dims)) for b in self.blocks),
        )

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: Sequence[type],
        arguments: tuple[object, ...] = (),
        keywords: dict[str, object] | None = None,
    ) -> object:
        name = getattr(function, "__name__", str(function))
        known: Callable[..., object] | None = JOINS.get(name) or (
            getattr(cls, name, None) if name in METHODS else None
        )
        if known is None:
            raise NotExpressibleError(f"calls torch.{name}")
        return known(*arguments, **(keywords or {}))


METHODS = frozenset(
    {
        "chunk",
        "clone",
        "narrow",
        "permute",
        "reshape",
        "squeeze",
        "transpose",
        "unbind",
        "unsqueeze",
    }
)
"""Methods of `Selection` that also implement torch's functions of the same names."""


def cat(selections: Sequence[Selection], dim: int = 0) -> Selection:
    """torch.cat of selections."""
    first = selections[0]
    dim %= first.ndim
    blocks: list[Block] = []
    at = 0
    for selection in selections:
        shape = selection.shape
        if shape[:dim] + shape[dim + 1 :] != first.shape[:dim] + first.shape[dim + 1 :]:
            raise NotExpressibleError(f"joins {first.shape} and {shape}")
        blocks.extend(
            replace(b, corner=(*b.corner[:dim], b.corner[dim] + at, *b.corner[dim + 1 :]))
            for b in selection.blocks
        )
        at += shape[dim]
    return Selection((*first.shape[:dim], at, *first.shape[dim + 1 :]), tuple(blocks))


def stack(selections: Sequence[Selection], dim: int = 0) -> Selection:
    """torch.stack of selections."""
    return cat([selection.unsqueeze(dim) for selection in selections], dim)


JOINS: dict[str, Callable[..., Selection]] = {"cat": cat, "concat": cat, "stack": stack}
"""Implementations of torch's functions that take a sequence of tensors."""


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[index + 1 :]) for index in range(len(shape)))


def _count(digits: Digits) -> int:
    return math.prod(size for size, _ in digits)


def _cut(block: Block, dim: int, first: int, end: int) -> Iterator[Block]:
    """The part of the block within indices [first, end) of a dimension, counted from `first`."""
    corner, digits = block.corner[dim], block.dims[dim]
    low, high = max(first - corner, 0), min(end - corner, _count(digits))
    if low >= high:
        return
    offset, rest = _narrowed(digits, low, high)
    yield replace(
        block,
        start=block.start + offset,
        corner=(*block.corner[:dim], corner + low - first, *block.corner[dim + 1 :]),
        dims=(*block.dims[:dim], rest, *block.dims[dim + 1 :]),
    )


def _narrowed(digits: Digits, low: int, high: int) -> tuple[int, Digits]:
    """The range [low, high) of a mixed-radix number: offset of its first value, and its digits."""
    if high - low == _count(digits):
        return 0, digits
    (_, stride), *inner = digits
    unit = _count(tuple(inner))
    if low % unit == 0 and high % unit == 0:
        size = (high - low) // unit
        return low // unit * stride, (((size, stride),) if size > 1 else ()) + tuple(inner)
    if low // unit == (high - 1) // unit:
        offset, rest = _narrowed(tuple(inner), low % unit, (high - 1) % unit + 1)
        return low // unit * stride + offset, rest
    raise NotExpressibleError("slices across a reshaped dimension")


def _sizes(shape: tuple[int | Sequence[int], ...], elements: int) -> tuple[int, ...]:
    """The shape for `reshape`, from its arguments: numbers or one sequence. -1 is inferred."""
    requested = [
        operator.index(size)
        for part in shape
        for size in (part if isinstance(part, Sequence) else (part,))
    ]
    known = math.prod(size for size in requested if size != -1)
    sizes = tuple(elements // known if size == -1 else size for size in requested)
    if math.prod(sizes) != elements:
        raise NotExpressibleError(f"reshapes {elements} elements to {sizes}")
    return sizes


def _regrouped(dims: Sequence[Digits], shape: Sequence[int]) -> tuple[Digits, ...]:
    """Regroup the digits, in the same order, into dimensions of other sizes. A digit is split where
    a dimension ends within it."""
    left = list(itertools.chain.from_iterable(dims))
    made: list[Digits] = []
    for size in shape:
        digits: list[Factor] = []
        while size > 1:
            count, stride = left.pop(0)
            taken = min(count, size)
            if size % taken or count % taken:
                raise NotExpressibleError(f"reshapes to {tuple(shape)} across its pieces")
            inner = count // taken
            digits.append((taken, stride * inner))
            if inner > 1:
                left.insert(0, (inner, stride))
            size //= taken
        made.append(tuple(digits))
    return tuple(made)


def _piece(block: Block, row_strides: tuple[int, ...]) -> Piece:
    """Convert a block to a piece. Digits that are contiguous on both sides are merged."""
    digits: list[tuple[int, int, int]] = []
    for of_dim, row in zip(block.dims, row_strides, strict=True):
        for index, (size, stride) in enumerate(of_dim):
            digits.append((size, stride, row * _count(of_dim[index + 1 :])))
    merged: list[tuple[int, int, int]] = []
    for size, stride, to_stride in digits:
        if merged and merged[-1][1:] == (stride * size, to_stride * size):
            size *= merged.pop()[0]
        merged.append((size, stride, to_stride))
    to = sum(index * row for index, row in zip(block.corner, row_strides, strict=True))
    shape, strides, to_strides = zip(*merged, strict=True) if merged else ((1,), (1,), (1,))
    return Piece(block.parameter, shape, block.start, strides, to, to_strides)
