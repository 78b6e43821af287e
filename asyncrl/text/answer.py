"""Finds the answer part of a completion: its text without its reasoning.

Most models write the marks of their reasoning as text. `text_after_reasoning` reads those. Where a
model has special tokens for them, the text of a completion does not show them. Then `AnswerReader`
reads the tokens, by the model's own turn format.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from asyncrl.text.chat_messages import REASONING_FIELDS
from asyncrl.text.tokenizer import (
    TokenizerError,
    decode,
    decode_prompt,
    load_tokenizer,
    special_tokens,
)

if TYPE_CHECKING:
    from asyncrl.text.response import ResponseReader
    from asyncrl.text.template import Message

__all__ = [
    "MARKS",
    "OPENED",
    "AnswerFormat",
    "AnswerReader",
    "answer_format",
    "has_reasoning_marks",
    "opens_reasoning",
    "text_after_reasoning",
]

logger = logging.getLogger(__name__)

PROMPT_END = 200
"""Characters at a prompt's end in which a template may open the reasoning."""
WORDS = r"(?:\w{1,32}:)?(?:think|thinking|thoughts?|reasoning|analysis|scratch_?pad)"
PAIRS = (
    (rf"<{WORDS}>|\[think\]|◁think▷", rf"</{WORDS}>|\[/think\]|◁/think▷"),
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
    (r"<\|channel\|?>(?:analysis|thought)\n?(?:<\|message\|>)?", r"<\|end\|>|<channel\|>"),
)
"""How models open and close their reasoning."""
MARKS = re.compile(
    "|".join(f"(?P<open{n}>{first})|(?P<close{n}>{last})" for n, (first, last) in enumerate(PAIRS)),
    re.IGNORECASE,
)
OPENED = re.compile(rf"(?:{'|'.join(first for first, _ in PAIRS)})\s*\Z", re.IGNORECASE)
AROUND_ANSWER = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)[^<\n]{0,64}<\|message\|>"
    r"|<\|(?:return|start\|>assistant|(?:begin|end)_of_solution|(?:START|END)_(?:RESPONSE|TEXT))\|>"
)
"""What models write around an answer."""
RESPONSE = re.compile(r"\s*<response>(.*?)(?:</response>\s*)?", re.DOTALL)
"""What some write around an answer after reasoning. Elsewhere, it may be a part of the answer."""
WORD, CHANNEL = "0", str(len(PAIRS) - 1)
"""Numbers of the pair that a sentence may name, and of that whose end also ends other things."""
LINE_START = re.compile(r"(?:\A|\n)[^\S\n]*\Z")
"""The end of what is before the first mark of a line."""
LINE_PART = 500
"""Characters of a line around a mark that may show its quotes."""
BACKTICKS = re.compile("``+")
VISIBLE = re.compile(r"\S")
ANY_TOOL = ({"type": "function", "function": {"name": "any", "parameters": {}}},)
"""Without a tool, a reader takes a turn with a call for text, reasoning included."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What finding answers needs to know of a model. Small, because reward processes get it."""

    model: str | None = None
    """Directory of its tokenizer, if a completion's text does not show where its reasoning ends."""
    parsed: bool = True
    """Whether the messages of its sessions have their reasoning apart."""


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends with the start of reasoning, which its template opened for the
    model."""
    return OPENED.search(prompt[-PROMPT_END:]) is not None


def text_after_reasoning(text: str, opened: bool = False, read: bool = False) -> str | None:
    """The text without its reasoning. None: there is nothing else, such as in reasoning that never
    ends.

    A mark of an end without a start ends reasoning that began before the text. A mark in quotes is
    text, and so is the first one if it is a word in tags that begins no line and has no end.

    Args:
        opened: whether the text begins within reasoning.
        read: whether reasoning before the text was read already.
    """
    parts: list[str] = []
    inside: str | None = "" if opened else None
    """Number of the pair whose reasoning is open. "": that of the prompt, which any mark ends."""
    begin, seen = 0, opened or read
    marks = [mark for mark in MARKS.finditer(text) if not _is_quoted(text, mark)]
    has_end = any(mark.lastgroup == f"close{WORD}" for mark in marks)
    for mark in marks:
        kind = str(mark.lastgroup)
        number = kind.removeprefix("open").removeprefix("close")
        if kind.startswith("open"):
            if number == WORD and not (seen or has_end or _begins_line(text, mark)):
                continue
            if inside is None:
                parts.append(text[begin : mark.start()])
                inside = number
        elif inside is not None:
            if inside in ("", number):
                inside, begin = None, mark.end()
        elif number == CHANNEL:
            continue
        elif not seen or VISIBLE.search(text, mark.end()):
            parts.clear()
            begin = mark.end()
        else:  # one too many, at the end
            parts.append(text[begin : mark.start()])
            begin = mark.end()
        seen = True
    if inside is None:
        parts.append(text[begin:])
    if not seen:
        return AROUND_ANSWER.sub("", text)
    answer = "\n".join(filter(str.strip, (AROUND_ANSWER.sub("", part) for part in parts)))
    within = RESPONSE.fullmatch(answer)
    return (within[1] if within else answer) or None


def has_reasoning_marks(text: str) -> bool:
    """Whether a turn has a mark of reasoning."""
    return any(mark.lastgroup != f"close{CHANNEL}" for mark in MARKS.finditer(text))


def _begins_line(text: str, mark: re.Match[str]) -> bool:
    return LINE_START.search(text, max(0, mark.start() - LINE_PART), mark.start()) is not None


def _is_quoted(text: str, mark: re.Match[str]) -> bool:
    """Whether a mark is in quotes on its line, as in code that reads the marks."""
    if text[mark.start() - 1 : mark.start()] == "'" == text[mark.end() : mark.end() + 1]:
        return True
    before = text[max(0, mark.start() - LINE_PART) : mark.start()].rpartition("\n")[2]
    after = text[mark.end() : mark.end() + LINE_PART].partition("\n")[0]
    before, after = (BACKTICKS.sub("", part) for part in (before, after))
    return any(before.count(quote) % 2 and quote in after for quote in ('"', "`"))


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
