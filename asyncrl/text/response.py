"""Reads a sampled turn as an assistant's message: text, reasoning and tool calls.

transformers parses it, by the model's own response template (`response_template` in
tokenizer_config.json). A model without one that writes tool calls as Hermes and Qwen do gets
theirs. Any other answer is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.text.template import Message, Schema
from asyncrl.text.tokenizer import decode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PREFIX_TOKENS", "ResponseReader", "in_reasoning", "response_template"]

PREFIX_TOKENS = 64
"""Tokens before the turn that the parser sees: some templates write the turn's first ones."""
REASONING = ("reasoning", "reasoning_content", "thinking")
"""Names that response templates give to reasoning."""
THINKING = re.compile(r"[<\[](?P<end>/?)(?:\w+:)?think(?:ing)?[>\]]", re.IGNORECASE)
"""How templates mark the start and the end of reasoning."""
HERMES: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "repeats": True},
    },
}


class ResponseReader:
    """Reads the turns of one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # Imported here because only rollout workers read turns, and it imports transformers.
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._own = getattr(tokenizer, "response_template", None)
        spec = response_template(tokenizer)
        # Loaded once: to compile its patterns takes longer than to parse a turn.
        self._template: Any = None if spec is None else load_response_template(dict(spec))

    @property
    def text_begins_content(self) -> bool:
        """Whether the content of a message begins with the turn's text, up to the first marker of
        reasoning or of a tool call. With a model's own response template, it need not."""
        return self._template is None or self._own is None

    def _without_end(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The tokens without the special ones at their end."""
        last = len(token_ids)
        while last and token_ids[last - 1] in self._special:
            last -= 1
        return token_ids[:last]

    def read(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        text: str,
        tools: Sequence[Schema] | None,
    ) -> tuple[Message, bool]:
        """The assistant's message of a turn.

        Args:
            text: the turn without special tokens. It is the message's text if the turn cannot be
                parsed.

        Returns:
            The message, and whether the turn could be parsed.
        """
        if self._template is None:
            return _said(text), True
        try:
            parsed: object = self._tokenizer.parse_response(
                decode_prompt(self._tokenizer, self._without_end(token_ids)),
                self._template,
                prefix=decode_prompt(self._tokenizer, prompt_ids[-PREFIX_TOKENS:]),
                tools=None if tools is None else [dict(tool) for tool in tools],
            )
            return _message(parsed, text, len(prompt_ids), tools), True
        except Exception:  # a model can write anything, and parsers raise anything
            return _said(text), False


def in_reasoning(text: str) -> bool:
    """Whether a text ends within reasoning. Some templates begin it for the model, whose first text
    is then no content."""
    marks = THINKING.findall(text)
    return bool(marks) and not marks[-1]


def response_template(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any] | None:
    """How to parse the model's turns; None: they are only text."""
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    written = str(getattr(tokenizer, "chat_template", None))
    return HERMES if "<tool_call>" in written and "<|im_start|>" in written else None


def _said(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def _message(parsed: object, text: str, place: int, tools: object) -> dict[str, object]:
    """The message of what the template found. Raises ValueError for an unusable tool call.

    Args:
        place: tokens before the turn. It makes the ids of a chat's tool calls differ.
    """
    if not isinstance(parsed, Mapping):
        raise ValueError("no message")
    calls = parsed.get("tool_calls") or []
    if calls and not tools:
        return _said(text)  # no tool was offered
    reasoning = next((parsed[name] for name in REASONING if parsed.get(name)), None)
    if not calls and reasoning is None:
        return _said(text)
    content = parsed.get("content") or ""
    # A turn may go on with text after a tool call.
    message = _said("\n".join(map(str, content)) if isinstance(content, list) else str(content))
    if reasoning is not None:
        message["reasoning"] = str(reasoning)
    if calls:
        message["tool_calls"] = [_call(call, place, number) for number, call in enumerate(calls)]
    return message


def _call(call: Any, place: int, number: int) -> dict[str, object]:
    """A tool call as clients get it, with its arguments as JSON text."""
    function = call["function"]
    name, arguments = function["name"], function.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise ValueError("a tool call without a name or arguments")
    written = json.dumps(arguments)
    # Half a surrogate pair is no text.
    json.dumps([name, arguments], ensure_ascii=False).encode()
    return {
        "id": f"call_{place}_{number}",
        "type": "function",
        "function": {"name": name, "arguments": written},
    }
