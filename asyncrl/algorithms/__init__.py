"""Advantages, losses and corrections: pure functions of tensors and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.algorithms.logit_chunks import (
        CHUNK_ELEMENTS as CHUNK_ELEMENTS,
        LIVE_CHUNKS as LIVE_CHUNKS,
        chunk_elements as chunk_elements,
    )
    from asyncrl.algorithms.logprobs import token_logprobs as token_logprobs
    from asyncrl.algorithms.objective import (
        supervised_loss as supervised_loss,
        token_weights as token_weights,
    )

__getattr__ = lazy_exports(
    __name__,
    chunk_elements="logit_chunks",
    CHUNK_ELEMENTS="logit_chunks",
    LIVE_CHUNKS="logit_chunks",
    supervised_loss="objective",
    token_logprobs="logprobs",
    token_weights="objective",
)
