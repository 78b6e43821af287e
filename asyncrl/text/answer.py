"""Finds the answer part of a completion: its text without its reasoning.

Most models write the marks of their reasoning as text. `text_after_reasoning` reads those. Where a
model has special tokens for them, the text of a completion does not show them. Then `AnswerReader`
reads the tokens, by the model's own turn format.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from asyncrl.text.chat_messages import REASONING_FIELDS
from asyncrl.text.reasoning import OPENED, opens_reasoning, text_after_reasoning
from asyncrl.text.tokenizer import (
    TokenizerError,
    decode,
    decode_prompt,
    load_tokenizer,
    special_tokens,
)

if TYPE_CHECKING:
    from asyncrl.text.chat_messages import Message
    from asyncrl.text.response import ResponseReader

logger = logging.getLogger(__name__)

ANY_TOOL = ({"type": "function", "function": {"name": "any", "parameters": {}}},)
"""Without a tool, a reader takes a turn with a call for text, reasoning included."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What finding answers needs to know of a model. Small, because reward processes get it."""

    model: str | None = None
    """Directory of its tokenizer, if a completion's text does not show where its reasoning ends."""
    parsed: bool = True
    """Whether the messages of its sessions have their reasoning apart."""


@lru_cache(maxsize=4)
def answer_format(model: str) -> AnswerFormat:
    """The format of the model in this directory. Whoever loads its tokenizer for more than that
    reports that it cannot be loaded."""
    from asyncrl.text.response import ResponseReader

    try:
        tokenizer = load_tokenizer(model)
    except TokenizerError:
        return AnswerFormat()
    try:
        reader = ResponseReader(tokenizer)
    except Exception as error:  # of the model's own response template, which only sessions need
        logger.warning(
            "model.path = %r: its response_template cannot be read (%s: %s), so rewards find"
            " answers by the marks of reasoning in the text",
            model,
            type(error).__name__,
            error,
        )
        return AnswerFormat()
    shown = reader.text_begins_content and not any(map(OPENED.search, special_tokens(tokenizer)))
    return AnswerFormat(None if shown else model, reader.reads_turns)


class AnswerReader:
    """Finds the answers of one model's completions."""

    def __init__(self, known: AnswerFormat) -> None:
        self._known = known
        self._reader: ResponseReader | None = None
        """Made for the first completion that needs it: it loads the tokenizer."""

    def of_completion(self, prompt: str, token_ids: Sequence[int], text: str) -> str | None:
        """The answer part of a completion; None if it has none.

        Args:
            prompt: as the model saw it, with special tokens.
            text: the completion without special tokens, up to its stop string.
        """
        if self._known.model is None:
            return text_after_reasoning(text, opens_reasoning(prompt))
        tokenizer = load_tokenizer(self._known.model)
        if self._reader is None:
            from asyncrl.text.response import ResponseReader

            self._reader = ResponseReader(tokenizer)
        message, _ = self._reader.read_after(prompt, token_ids, text, ANY_TOOL)
        content = str(message["content"])
        if message.get("reasoning") is None and content == text:
            marked = decode_prompt(tokenizer, token_ids)
            whole = decode(tokenizer, token_ids)
            if whole != text and whole.startswith(text):  # a stop string was cut off
                marked = marked[: marked.rfind(whole[len(text) :].rstrip())]
            answer = text_after_reasoning(marked, opens_reasoning(prompt))
            return None if answer is None else _without(answer, special_tokens(tokenizer))
        return text_after_reasoning(content, read=True) if content.strip() else None

    def of_session(self, prompt: str, text: str, message: Message) -> str | None:
        """The answer part of a session's last message; None if it has none.

        Args:
            prompt: of the session, whose end is that of the prompt of any turn.
            text: of the message.
        """
        read = any(message.get(name) for name in REASONING_FIELDS)
        opened = not self._known.parsed and opens_reasoning(prompt)
        answer = text_after_reasoning(text, opened, read)
        return answer if answer and answer.strip() else None


def _without(text: str, tokens: Sequence[str] | dict[str, int]) -> str:
    for token in tokens:
        text = text.replace(token, "")
    return text
