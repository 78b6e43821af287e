"""The tokenizer, chat template and stops of a model, for every process of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.text.response import ResponseReader as ResponseReader
    from asyncrl.text.stops import load_stops as load_stops, text_before as text_before
    from asyncrl.text.tokenizer import decode as decode, load_tokenizer as load_tokenizer

__getattr__ = lazy_exports(
    __name__,
    decode="tokenizer",
    load_stops="stops",
    load_tokenizer="tokenizer",
    ResponseReader="response",
    text_before="stops",
)
