"""What a chat template writes between a turn that was sampled and the next one."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from asyncrl.contracts.nodes import CUT, DRIFT
from asyncrl.text.chat_messages import (
    REASONING_FIELDS,
    Message,
    MessagesError,
    Schema,
    template_messages,
)
from asyncrl.text.template import render_messages
from asyncrl.text.tokenizer import (
    decode_prompt,
    encode_continuations,
    encode_prompts,
    special_tokens,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = f"asyncrl-probe-{secrets.token_hex(8)}"
"""Stands for the text of the sampled turn. No message contains it."""
THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
"""Reasoning, which many templates strip from earlier turns."""


class ContinuationError(ValueError):
    """The template does not prove what follows a turn. The message is one line and says why.

    Args:
        branch: the class of the branch that follows.
    """

    def __init__(self, message: str, branch: str = DRIFT) -> None:
        super().__init__(message)
        self.branch = branch


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    variables: Mapping[str, object],
    tools: Sequence[Schema] | None,
    generation_prompt: bool = True,
) -> str:
    """Render a chat as clients send it. The arguments of tool calls are values, or JSON text if the
    template refuses values.

    Raises:
        MessagesError: the template refuses the chat.
    """
    (text,) = _rendered_chats(
        tokenizer, [(len(messages), generation_prompt)], messages, variables, tools
    )
    return text


def _rendered_chats(
    tokenizer: PreTrainedTokenizerBase,
    wanted: Sequence[tuple[int, bool]],
    messages: Sequence[Message],
    variables: Mapping[str, object],
    tools: Sequence[Schema] | None,
) -> list[str]:
    """Some beginnings of a chat, rendered: (number of messages, whether the next turn begins).

    Raises:
        MessagesError: the template refuses the chat.
    """

    thought = any(message.get(name) for message in messages for name in REASONING_FIELDS)
    names = [name for name in REASONING_FIELDS if thought and _reads(tokenizer, name)]

    def rendered(values: bool) -> list[str]:
        chat = template_messages(messages, values, names)
        return [
            render_messages(tokenizer, chat[:count], variables, tools, begins)
            for count, begins in wanted
        ]

    try:
        return rendered(values=True)
    except MessagesError as error:
        if not any(message.get("tool_calls") for message in messages):
            raise
        try:
            return rendered(values=False)
        except MessagesError:
            raise error from None


def continuation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    added: Sequence[Message],
    end: int | None,
    variables: Mapping[str, object],
    tools: Sequence[Schema] | None = None,
) -> list[int]:
    """Return the token ids that follow a sampled turn, up to the start of the next turn.

    The turn keeps the tokens that were sampled. The template renders the chat twice, with a probe
    instead of the turn's text: as a chat that ends with this turn, and with the added messages.
    Both must have the same text before it, apart from reasoning. What both have after it, up to
    `end`, belongs to the turn. The rest is new.

    Args:
        messages: the chat so far. The last message is the turn's.
        added: the messages after it.
        end: the last sampled token, if it is one that ends a turn. None: the turn was cut, and the
            result begins with the tokens that close it.
        variables: of the template.

    Raises:
        ContinuationError: the template refuses the chat, writes the turn or what is before it in
            another way when messages follow, or does not write `end` after the turn; or the turn
            was cut after a tool call.
    """
    turn = _probed(messages[-1], PROBE, cut=end is None)
    try:
        return _follows(tokenizer, [*messages[:-1], turn], added, end, variables, tools)
    except ContinuationError:
        if not turn.get("tool_calls") or end is None or messages[-1].get("content"):
            raise
        # Some templates write the text of a turn after the answers of its tools. It has none.
        quiet = {**turn, "content": ""}
        return _follows(tokenizer, [*messages[:-1], quiet], added, end, variables, tools)


def _follows(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    added: Sequence[Message],
    end: int | None,
    variables: Mapping[str, object],
    tools: Sequence[Schema] | None,
) -> list[int]:
    """See `continuation`. The last of the messages has the probe as its text, or no text."""
    probe, turn = PROBE, messages[-1]
    calls = bool(turn.get("tool_calls"))
    if calls and end is None:
        raise ContinuationError("the turn was cut after a tool call", CUT)
    chat = [*messages, *added]
    wanted = [(len(messages), False), (len(chat), True)]
    try:
        alone, whole = _rendered_chats(tokenizer, wanted, chat, variables, tools)
    except MessagesError as error:
        raise ContinuationError(f"the template refuses the chat: {error}") from None
    before = ""
    if not calls or probe in alone or probe in whole:
        if alone.count(probe) != 1 or whole.count(probe) != 1:
            raise ContinuationError("the template does not write the text of the turn once")
        before, _, alone = alone.partition(probe)
        other, _, whole = whole.partition(probe)
        if (
            before != other
            and (offset := first_difference(*(THINKING.sub("", text) for text in (before, other))))
            is not None
        ):
            raise ContinuationError(
                "the template writes the messages before the turn in another way when messages"
                f" follow, from character {offset} on"
            )
    # Otherwise the template writes tool calls without the turn's text, so whole chats are compared.
    if end is None:
        return encode_continuations(tokenizer, [whole])[0]
    try:
        return _after_end(tokenizer, alone, whole, end, calls)
    except ContinuationError:
        if not added or alone.strip() != decode_prompt(tokenizer, [end]):
            raise
        (closed,) = _rendered_chats(tokenizer, [(len(chat), False)], chat, variables, tools)
        follows = _after_another_end(tokenizer, whole, closed)
        if follows is None:
            raise
        return follows


def _reads(tokenizer: PreTrainedTokenizerBase, field: str) -> bool:
    """Whether a chat template reads this field of messages."""
    written = str(getattr(tokenizer, "chat_template", None))
    return re.search(rf"[.'\"]{field}\b", written) is not None


def _probed(message: Message, probe: str, cut: bool) -> dict[str, object]:
    """The turn's message with the probe as its text. A turn that was cut in its reasoning has the
    probe there, because no text came yet."""
    reasoning = next((name for name in REASONING_FIELDS if message.get(name)), None)
    turn = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    if cut and reasoning is not None and not message.get("content"):
        return {**turn, "content": "", reasoning: probe}
    return {**turn, "content": probe}


def _after_end(
    tokenizer: PreTrainedTokenizerBase, alone: str, whole: str, end: int, calls: bool
) -> list[int]:
    """The ids of what the chat has after the turn's end.

    Args:
        alone: what the template writes after the turn's text if no message follows.
        whole: what it writes if messages follow.
        calls: whether the turn has tool calls, which both contain.
    """
    closing = decode_prompt(tokenizer, [end])
    shared = alone[: first_difference(alone, whole)]
    offset = shared.rfind(closing) if closing else -1
    if offset < 0 and closing and shared == alone and whole[len(shared) :].startswith(closing):
        offset = len(shared)  # the start of the next message ends the turn, as in GLM
    elif offset < 0 or offset != alone.rfind(closing) or (not calls and shared[:offset].strip()):
        raise ContinuationError(
            f"the turn ended with {closing!r}, and the template writes {alone[-40:]!r} there, or"
            " changes it when messages follow"
        )
    # With its end, because some tokenizers read a text after a special token in another way.
    (ids,), _ = encode_prompts(tokenizer, [whole[offset:]], rendered=True)
    if ids[:1] != [end]:
        raise ContinuationError(f"{closing!r} is not one token where the template writes it")
    return ids[1:]


def _after_another_end(
    tokenizer: PreTrainedTokenizerBase, whole: str, closed: str
) -> list[int] | None:
    """The ids after a turn's end, for templates such as gpt-oss's: they end the last turn of a chat
    as it was sampled, and all others with another token. None: that is not proven.

    Args:
        whole: what the template writes after the turn's text if messages follow.
        closed: the chat with these messages, and without the start of the next turn. The other
            token must end it: otherwise it may begin the next message.
    """
    (ids, last), _ = encode_prompts(tokenizer, [whole, closed.rstrip()], rendered=True)
    other = ids[0] if ids else None
    return ids[1:] if other in special_tokens(tokenizer).values() and last[-1:] == ids[:1] else None


def first_difference(first: Sequence[object], second: Sequence[object]) -> int | None:
    """The first index at which two texts, or two sequences of token ids, differ. It can be the end
    of the shorter one. None if they are equal."""
    if first == second:
        return None
    same, most = 0, min(len(first), len(second))
    while same < most:  # slices are compared in C, and most chats differ only at their end
        middle = (same + most + 1) // 2
        same, most = (middle, most) if first[:middle] == second[:middle] else (same, middle - 1)
    return same
