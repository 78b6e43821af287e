"""A tool call through one chat template: what the template writes is read, its answer is added, and
then a text. It needs a tokenizer, and no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl.preflight.check_env.scripted_model import call_message, next_end, turn_text
from asyncrl.sessions.session import SessionTemplate
from asyncrl.text.chat_messages import Message, MessagesError, Schema
from asyncrl.text.continuation import ContinuationError, first_difference
from asyncrl.text.response import ResponseReader, format_name
from asyncrl.text.tokenizer import decode, decode_prompt, encode_continuations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOL: Schema = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A town."},
                "days": {"type": "integer", "description": "Days from today."},
                "spot": {
                    "type": "object",
                    "description": "Where exactly.",
                    "properties": {"height": {"type": "number", "description": "In meters."}},
                },
                "unit": {
                    "description": "Of the answer.",
                    "anyOf": [{"type": "string"}, {"type": "null"}],
                },
            },
            "required": ["place", "days"],
        },
    },
}
ARGUMENTS: Mapping[str, object] = {
    "place": "Grüß Gott, Österreich",
    "days": 3,
    "spot": {"height": 1.5},
    "unit": None,
}
QUESTION: Message = {"role": "user", "content": "What is the weather?"}
RESULT = "sunny, 21 degrees"
ANSWER: Message = {"role": "assistant", "content": "It is sunny."}
NEXT: Message = {"role": "user", "content": "And tomorrow?"}
YES, NO_FORMAT = "yes", "no format is known for this template"


@dataclass(frozen=True, slots=True)
class ToolTurns:
    """What became of a tool call. Each of the last four is "yes", or says why not."""

    format: str
    """What the turns are read by."""
    call: str
    """Whether the call came back as it was written."""
    result: str
    """Whether the tool's answer continues the sampled tokens."""
    text: str
    """Whether a user's message after the model's last text does."""
    template: str
    """Whether the template would write the same tokens in one go."""


def tool_turns(
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
    variables: Mapping[str, object] | None = None,
) -> ToolTurns:
    """Play a user's question, a tool call, the tool's answer, a text and another question.

    Args:
        ends: tokens that end a turn.
        variables: of the chat template.
    """
    name = format_name(tokenizer)
    template = SessionTemplate(tokenizer, frozenset(ends), 1 << 20, variables=variables)
    if name is None:
        return ToolTurns(NO_FORMAT, *["no"] * 4)
    try:
        return ToolTurns(name, *_played(template, ResponseReader(tokenizer)))
    except MessagesError as error:
        return ToolTurns(name, *[f"the template refuses the chat: {error}"] * 4)


def _played(template: SessionTemplate, reader: ResponseReader) -> tuple[str, str, str, str]:
    """The last four fields of `ToolTurns`. Raises MessagesError."""
    chat: list[Message] = [QUESTION]
    path = template.render(chat, [TOOL])
    given = call_message((str(TOOL["function"]["name"]), ARGUMENTS))  # type: ignore[index]
    sampled = _sampled(template, chat, given)
    written = decode_prompt(template.tokenizer, sampled)
    if str(TOOL["function"]["name"]) not in written:  # type: ignore[index]
        return "the template does not write tool calls", *["no"] * 3  # type: ignore[return-value]
    message, _ = reader.read(path, sampled, decode(template.tokenizer, sampled), [TOOL])
    calls: Any = message.get("tool_calls") or []
    functions = [call["function"] for call in calls]
    back = [[one["name"], json.loads(one["arguments"])] for one in functions]
    if back != [["get_weather", ARGUMENTS]]:
        return f"{written!r} comes back as {back or message['content']!r}", *["no"] * 3  # type: ignore[return-value]
    answered = {"role": "tool", "tool_call_id": calls[0]["id"], "content": RESULT}
    chat, known = [*chat, message, answered], 2
    path += sampled
    result = _continues(template, path, chat, known)
    if result != YES:
        path = template.render(chat, [TOOL])
    sampled = _sampled(template, chat, ANSWER)
    said, _ = reader.read(path, sampled, decode(template.tokenizer, sampled), [TOOL])
    if str(said["content"]).strip() != ANSWER["content"]:
        return YES, result, f"the text comes back as {said['content']!r}", "no"
    path += sampled
    chat, known = [*chat, said, NEXT], len(chat) + 1
    text = _continues(template, path, chat, known)
    return YES, result, text, _as_rendered(template, path, chat) if text == YES else "no"


def _sampled(template: SessionTemplate, chat: Sequence[Message], message: Message) -> list[int]:
    """The tokens of a turn as the template writes them, up to one that ends it."""
    text = turn_text(template, chat, message, [TOOL])
    ids = encode_continuations(template.tokenizer, [text])[0]
    stop = next((stop for stop, token in enumerate(ids) if token in template.ends), None)
    if stop is not None:
        return ids[: stop + 1]
    end = next_end(template, chat, message, [TOOL])
    return ids if end is None else [*ids, end]


def _continues(
    template: SessionTemplate, path: list[int], chat: Sequence[Message], known: int
) -> str:
    """Whether the messages after the first `known` ones continue `path`, which then has them."""
    try:
        path += template.continued(path, chat, known, [TOOL])
    except ContinuationError as error:
        return str(error)
    added = str(chat[-1]["content"])
    return YES if added in decode_prompt(template.tokenizer, path) else f"without {added!r}"


def _as_rendered(template: SessionTemplate, path: Sequence[int], chat: Sequence[Message]) -> str:
    rendered = template.render(chat, [TOOL])
    begin = first_difference(path, rendered)
    if begin is None:
        return YES
    ours, its = (
        repr(decode_prompt(template.tokenizer, ids[begin : begin + 24])) for ids in (path, rendered)
    )
    return f"it writes {its} where {ours} was"
