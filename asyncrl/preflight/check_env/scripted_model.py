"""A model that says what a script gives, in the tokens of the chat template. It stands behind the
same `Session` as an engine, so that trees, templates and parsers are the real ones."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from asyncrl.contracts.rows import Completion, VersionSpan
from asyncrl.contracts.text_listener import Heard
from asyncrl.sessions.answers import Answer, ChatRequest
from asyncrl.sessions.session import Sampled, Session, SessionTemplate, TurnRequest
from asyncrl.text.chat_messages import Message, MessagesError, Schema
from asyncrl.text.continuation import first_difference, render_chat
from asyncrl.text.response import ResponseReader
from asyncrl.text.tokenizer import decode, decode_prompt, encode_continuations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CALL_ID = "call{:05d}"
"""Name of a tool call. Mistral's templates take only nine letters and digits."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the model says in a turn: a message, or a text as it is sampled."""

    message: Message | None = None
    text: str = ""
    spelled: bool = False
    """Whether special tokens in the text are written by ordinary tokens."""


Script: TypeAlias = "Callable[[Sequence[Message], Sequence[Schema] | None], Said]"
"""What the model says to a chat with these tools."""
_CHAT: ContextVar[tuple[Sequence[Message], Sequence[Schema] | None]] = ContextVar("chat")
"""The request that a session answers. Its generator sees only token ids."""


def call_message(*calls: tuple[str, Mapping[str, object]]) -> dict[str, object]:
    """An assistant's message with these tool calls, as templates read it."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": CALL_ID.format(number),
                "type": "function",
                "function": {"name": name, "arguments": dict(arguments)},
            }
            for number, (name, arguments) in enumerate(calls)
        ],
    }


def turn_text(
    template: SessionTemplate,
    messages: Sequence[Message],
    message: Message,
    tools: Sequence[Schema] | None,
) -> str:
    """What the template writes for a turn, from the first token that the model samples to the end
    of the chat.

    Raises:
        MessagesError: the template refuses the chat.
    """
    variables = template.variables or {}
    start, before = (
        render_chat(template.tokenizer, messages, variables, tools, begins)
        for begins in (True, False)
    )
    whole = render_chat(template.tokenizer, [*messages, message], variables, tools, False)
    if whole.startswith(start):
        return whole[len(start) :]
    # The start of a turn may open the reasoning, which a whole turn without reasoning does not.
    head, opened, _ = start[first_difference(start, before) :].partition("<think>")
    if head and head in whole:
        rest = whole.rpartition(head)[2]
    else:
        ids = [encode_continuations(template.tokenizer, [text])[0] for text in (start, whole)]
        rest = decode_prompt(template.tokenizer, ids[1][first_difference(*ids) :])
    opens = opened and "</think>" not in start[len(before) :]
    return rest if not opens or rest.startswith("</think>") else "\n</think>\n\n" + rest


def next_end(
    template: SessionTemplate,
    messages: Sequence[Message],
    message: Message,
    tools: Sequence[Schema] | None,
) -> int | None:
    """The token that ends a turn after which the template writes nothing: the first one of the next
    message, as in GLM. None: that token is no stop, or the template refuses such a message."""
    calls = bool(message.get("tool_calls"))
    # Without its reasoning, which the template may leave out when messages follow.
    turn: Message = message if calls else {"role": "assistant", "content": "x"}
    follows = {
        "role": "tool" if calls else "user",
        "tool_call_id": CALL_ID.format(0),
        "content": "x",
    }
    chat = [*messages, turn]
    try:
        alone, whole = (
            render_chat(template.tokenizer, one, template.variables or {}, tools, False)
            for one in (chat, [*chat, follows])
        )
    except MessagesError:
        return None
    ids = encode_continuations(template.tokenizer, [whole.removeprefix(alone)])[0]
    return ids[0] if ids and ids[0] in template.ends else None


def writes(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether the tokenizer can write a text exactly."""
    ids = encode_continuations(tokenizer, [text])[0]
    return tokenizer.unk_token_id not in ids and decode_prompt(tokenizer, ids) == text


@dataclass(frozen=True, slots=True)
class TimedTemplate(SessionTemplate):
    """A template that adds up the CPU seconds of its work."""

    spent: Counter[str] = field(default_factory=Counter)

    def render(self, messages: Sequence[Message], tools: Sequence[Schema] | None) -> list[int]:
        began = time.thread_time()
        try:
            return SessionTemplate.render(self, messages, tools)
        finally:
            self.spent["render"] += time.thread_time() - began  # type: ignore[assignment]

    def continued(
        self,
        path: Sequence[int],
        messages: Sequence[Message],
        known: int,
        tools: Sequence[Schema] | None,
    ) -> list[int]:
        began, before = time.thread_time(), self.spent["render"]
        try:
            return SessionTemplate.continued(self, path, messages, known, tools)
        finally:  # it may have rendered
            self.spent["render"] = before + time.thread_time() - began  # type: ignore[assignment]


class ScriptedModel:
    """A `TurnGenerator` that samples what a script says, up to the first token that ends a turn.

    Args:
        most_tokens: tokens of a turn, at most.
        latency_s: seconds of a turn.
    """

    def __init__(
        self,
        template: SessionTemplate,
        script: Script,
        most_tokens: int,
        latency_s: float = 0.0,
    ) -> None:
        self._template, self._script = template, script
        self._most, self._latency_s = most_tokens, latency_s
        self.texts: list[str] = []
        """What each turn says, with its special tokens."""
        self.cpu_s = 0.0
        """CPU seconds of the script itself."""

    async def generate(self, request: TurnRequest, heard: Heard | None = None) -> Sequence[Sampled]:
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        began = time.thread_time()
        answers = [self._sampled(request) for _ in range(request.n)]
        self.cpu_s += time.thread_time() - began
        return answers

    def _sampled(self, request: TurnRequest) -> Sampled:
        tokenizer = self._template.tokenizer
        ids, text = self._ids()
        most = min(request.max_tokens, self._most)
        kept = tuple(ids[:most])
        ended = len(kept) == len(ids)
        self.texts.append(text if ended else decode_prompt(tokenizer, kept))
        completion = Completion(
            kept,
            (-1.0,) * len(kept),
            (VersionSpan(0, 0, len(kept)),),
            "stop" if ended else "length",
            decode(tokenizer, kept),
        )
        return Sampled(completion, "script", 0.0, 0.0)

    def _ids(self) -> tuple[list[int], str]:
        """The tokens of what the script says, with the one that ends the turn, and their text."""
        messages, tools = _CHAT.get()
        said = self._script(messages, tools)
        tokenizer, ends = self._template.tokenizer, self._template.ends
        text = (
            said.text
            if said.message is None
            else turn_text(self._template, messages, said.message, tools)
        )
        if said.spelled:
            found = tokenizer(
                text, add_special_tokens=False, split_special_tokens=True, verbose=False
            )
            ids = [token for token in found["input_ids"] if token not in ends]
        else:
            ids = encode_continuations(tokenizer, [text])[0]
        stop = next((stop for stop, token in enumerate(ids) if token in ends), None)
        if stop is None:
            usual: Message = {"role": "assistant", "content": text}
            end = next_end(self._template, messages, said.message or usual, tools)
            end = min(ends) if end is None else end
            return [*ids, end], text + decode_prompt(tokenizer, [end])
        after = decode_prompt(tokenizer, ids[stop + 1 :])
        return ids[: stop + 1], text.removesuffix(after) if after else text


class ScriptedSession:
    """A session whose turns are answered by a script."""

    def __init__(
        self, template: SessionTemplate, reader: ResponseReader, model: ScriptedModel
    ) -> None:
        self.model = model
        self.session = Session(template, model, self._read)
        self.requests: list[tuple[Sequence[Message], Sequence[Schema] | None]] = []
        """The messages and tools of each request."""
        self.unparsed = 0
        self.read_s = 0.0
        """CPU seconds of reading turns."""
        self._reader = reader

    def abandon(self, nodes: Sequence[int]) -> None:
        """See `Session.abandon`."""
        self.session.abandon(nodes)

    async def chat(self, request: ChatRequest, heard: Heard | None = None) -> list[Answer]:
        """See `Session.chat`."""
        self.requests.append((request.messages, request.tools))
        _CHAT.set((request.messages, request.tools))
        return await self.session.chat(request, heard)

    def _read(
        self, prompt_ids: Sequence[int], completion: Completion, tools: Sequence[Schema] | None
    ) -> Message:
        began = time.thread_time()
        message, parsed = self._reader.read(
            prompt_ids, completion.token_ids, completion.text, tools
        )
        self.read_s += time.thread_time() - began
        self.unparsed += not parsed
        return message
