"""Tokenizes, renders and reads the endpoint's texts with the model's tokenizer and chat template.
All methods run in threads, so they do not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from asyncrl.api.streamed_content import StreamedContent
from asyncrl.text.chat_messages import Message, Schema, refuse_unencodable
from asyncrl.text.continuation import render_chat
from asyncrl.text.response import PREFIX_TOKENS, ResponseReader, in_reasoning
from asyncrl.text.tokenizer import decode_prompt, encode_prompts, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEFORE = "x"
"""Put before a token to decode, since some decoders drop a space at the start of a text."""


class ModelTokenizer:
    """`asyncrl.serving.answers.ChatTokenizer` for a Hugging Face checkpoint."""

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
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object],
        tools: Sequence[Schema] | None,
    ) -> str:
        refuse_unencodable(messages, tools)
        return await asyncio.to_thread(render_chat, self._tokenizer, messages, variables, tools)

    async def content_filter(self, prompt_ids: Sequence[int], tools: bool) -> Callable[[str], str]:
        return await asyncio.to_thread(self._content_filter, prompt_ids, tools)

    def _content_filter(self, prompt_ids: Sequence[int], tools: bool) -> Callable[[str], str]:
        if not self._reader.reads_turns:
            return str
        prompt = decode_prompt(self._tokenizer, prompt_ids[-PREFIX_TOKENS:])
        if in_reasoning(prompt) or not self._reader.begins_content(tools):
            return lambda text: ""
        return StreamedContent(tools).add

    async def read(
        self,
        prompt_ids: Sequence[int],
        ids: Sequence[int],
        text: str,
        tools: Sequence[Schema] | None,
    ) -> Message:
        message, _ = await asyncio.to_thread(self._reader.read, prompt_ids, ids, text, tools)
        return message

    async def decode(self, ids: Sequence[int]) -> str:
        return await asyncio.to_thread(decode_prompt, self._tokenizer, ids)

    async def spell(self, ids: Iterable[int]) -> dict[int, str]:
        return await asyncio.to_thread(lambda: {token: self._text(token) for token in set(ids)})

    @cached_property
    def _reader(self) -> ResponseReader:
        return ResponseReader(self._tokenizer)

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
