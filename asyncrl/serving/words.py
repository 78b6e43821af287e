"""Text on its way in and out of the endpoint: what the model's tokenizer and chat template make of
it. Everything runs in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncrl.text.template import render_messages
from asyncrl.text.tokenizer import decode_prompt, encode_prompts, load_tokenizer

__all__ = ["ModelWords"]

BEFORE = "x"
"""Stands before a token whose text is asked: at a text's beginning some decoders drop a space."""


class ModelWords:
    """`asyncrl.serving.answers.Words` of a Hugging Face checkpoint."""

    def __init__(self, model: str) -> None:
        """`model` is the checkpoint's directory."""
        self._model = model
        self._texts: dict[int, str] = {}

    async def encode(self, text: str, rendered: bool = False) -> list[int]:
        return await asyncio.to_thread(
            lambda: encode_prompts(self._tokenizer, [text], rendered)[0][0]
        )

    async def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        return await asyncio.to_thread(render_messages, self._tokenizer, messages, variables)

    async def decode(self, ids: Sequence[int]) -> str:
        return await asyncio.to_thread(decode_prompt, self._tokenizer, ids)

    async def spell(self, ids: Iterable[int]) -> dict[int, str]:
        return await asyncio.to_thread(lambda: {token: self._text(token) for token in set(ids)})

    @property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._model)

    def _text(self, token: int) -> str:
        """Of one token, special or not."""
        if token not in self._texts:
            before = self._tokenizer.encode(BEFORE, add_special_tokens=False)
            start, whole = (
                decode_prompt(self._tokenizer, before),
                decode_prompt(self._tokenizer, [*before, token]),
            )
            self._texts[token] = (
                whole.removeprefix(start)
                if whole.startswith(start)
                else decode_prompt(self._tokenizer, [token])
            )
        return self._texts[token]
