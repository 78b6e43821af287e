"""Prompts and supervised rows: reading, rendering, length limits, and streaming with Ray Data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.data.prompt_stream import ROWS_PER_BLOCK as ROWS_PER_BLOCK
    from asyncrl.data.prompts import read_prompts as read_prompts
    from asyncrl.data.sources import RowsByNumber as RowsByNumber
    from asyncrl.data.token_file import TokenFile as TokenFile, open_token_file as open_token_file

__getattr__ = lazy_exports(
    __name__,
    open_token_file="token_file",
    read_prompts="prompts",
    ROWS_PER_BLOCK="prompt_stream",
    RowsByNumber="sources",
    TokenFile="token_file",
)
