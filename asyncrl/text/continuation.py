"""What a chat template writes between a turn that was sampled and the next one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from asyncrl.text.template import Message, MessagesError, Schema, render_messages
from asyncrl.text.tokenizer import decode_prompt, encode_continuations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ContinuationError", "continuation", "first_difference"]

PROBE = "asyncrl-probe"
"""Stands for the text of the sampled turn. No chat may contain it."""


class ContinuationError(ValueError):
    """The template does not prove what follows a turn. The message is one line and says why."""


def continuation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    added: Sequence[Message],
    end: int | None,
    variables: Mapping[str, object],
    tools: Sequence[Schema] | None = None,
) -> list[int]:
    """Return the token ids that follow a sampled turn, up to the start of the next turn.

    The turn keeps the tokens that were sampled. The template renders the chat twice, with PROBE in
    place of the turn's text: as a chat that ends with this turn, and with the added messages. What
    both have after the text, up to `end`, belongs to the turn. The rest is new.

    Args:
        messages: the chat so far. The last message is the turn's.
        added: the messages after it.
        end: the last sampled token, if it is one that ends a turn. None: the turn was cut, and the
            result begins with the tokens that close it.
        variables: of the template.

    Raises:
        ContinuationError: the template refuses the chat, changes what it writes for the turn, or
            does not write `end` after it; or the turn was cut after a tool call.
    """
    turn = {**messages[-1], "content": PROBE}
    for name in ("reasoning", "reasoning_content"):
        turn.pop(name, None)
    chat = [_with_values(message) for message in (*messages[:-1], turn, *added)]
    try:
        alone = render_messages(tokenizer, chat[: len(messages)], variables, tools, False)
        whole = render_messages(tokenizer, chat, variables, tools)
    except MessagesError as error:
        raise ContinuationError(f"the template refuses the chat: {error}") from None
    calls = bool(turn.get("tool_calls"))
    if calls and PROBE not in alone and PROBE not in whole:
        written, after = alone, whole  # a template may write a turn's tool calls without its text
    elif alone.count(PROBE) == whole.count(PROBE) == 1:
        written, after = alone.partition(PROBE)[2], whole.partition(PROBE)[2]
    else:
        raise ContinuationError("the template does not write the text of the turn once")
    shared = written[: first_difference(written, after)]
    if end is not None:
        closing = decode_prompt(tokenizer, [end])
        place = shared.rfind(closing)
        if place < 0 or place != written.rfind(closing):
            raise ContinuationError(
                f"the turn ended with {closing!r}, and the template writes {written[-40:]!r} there,"
                " or changes it when messages follow"
            )
        after = after[place + len(closing) :]
    elif calls:
        raise ContinuationError("the turn was cut after a tool call")
    return encode_continuations(tokenizer, [after])[0]


def first_difference(first: Sequence[object], second: Sequence[object]) -> int | None:
    """The first place where two texts, or two sequences of token ids, differ. It can be the end of
    the shorter one. None: they are equal."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return None if len(first) == len(second) else min(len(first), len(second))


def _with_values(message: Message) -> dict[str, object]:
    """The message with the arguments of its tool calls as values. Many templates read them so, and
    clients send JSON text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    return {**message, "tool_calls": [_call_with_values(call) for call in calls]}


def _call_with_values(call: object) -> object:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call
    return {**call, "function": {**function, "arguments": arguments}}
