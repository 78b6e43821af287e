"""Prompts and supervised rows: reading, rendering, length limits, and streaming with Ray Data."""

from __future__ import annotations

from asyncrl.runtime.exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    ROWS_PER_BLOCK="prompt_stream",
    RowsByNumber="sources",
    read_prompts="prompts",
)
