"""The tokenizer, chat template and stops of a model, for every process of a run."""

from __future__ import annotations

from asyncrl.runtime.exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    decode="tokenizer",
    load_stops="stops",
    load_tokenizer="tokenizer",
    text_before="stops",
)
