"""Packs rows of tokens into micro-batches and Arrow tables."""

from __future__ import annotations

from asyncrl.runtime.exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    pack="packing",
    pack_blocks="blocks",
    pack_rows="packing",
)
