"""Packs rows of tokens into micro-batches and Arrow tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.packing.blocks import pack_blocks as pack_blocks
    from asyncrl.packing.packing import pack as pack, pack_rows as pack_rows

__getattr__ = lazy_exports(
    __name__,
    pack="packing",
    pack_blocks="blocks",
    pack_rows="packing",
)
