"""Tokenizes and renders the endpoint's texts with the model's tokenizer and chat template. All
methods run in threads, so they do not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from asyncrl.text.template import render_messages
from asyncrl.text.tokenizer import decode_prompt, encode_prompts, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEFORE = "x"
"""Put before a token to decode, since some decoders drop a space at the start of a text."""


class ModelWords:
    """`asyncrl.serving.answers.Words` for a Hugging Face checkpoint."""

    def __init__(self, model: str) -> None:
        """
        Args:
            model: the checkpoint's directory.
        """
        self._model = model
        self._texts: dict[int, str] = {}

    async def encode(self, text: str, rendered: bool = False) -> list[int]:
        return await asyncio.to_thread(
            lambda: encode_prompts(self._tokenizer, [text], rendered)[0][0]
        )

    async def render(
        self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]
    ) -> str:
        return await asyncio.to_thread(render_messages, self._tokenizer, messages, variables)

    async def decode(self, ids: Sequence[int]) -> str:
        return await asyncio.to_thread(decode_prompt, self._tokenizer, ids)

    async def spell(self, ids: Iterable[int]) -> dict[int, str]:
        return await asyncio.to_thread(lambda: {token: self._text(token) for token in set(ids)})

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._model)

    def _text(self, token: int) -> str:
        """The text of one token, special or not."""
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
