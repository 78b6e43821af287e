"""Advantages, losses and corrections: pure functions of tensors and numbers."""

from __future__ import annotations

from asyncrl.runtime.exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    CHUNK_ELEMENTS="logprobs",
    LIVE_CHUNKS="logprobs",
    supervised_loss="objective",
    token_logprobs="logprobs",
    token_weights="objective",
)
