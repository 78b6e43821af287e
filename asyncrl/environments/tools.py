"""A loop for agents with tools: ask the model, run the calls of its answer, ask again."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from asyncrl.environments.model import Reply
from asyncrl.runtime.functions import text_of
from asyncrl.sessions.answers import ContextTooLongError
from asyncrl.text.call_texts import arguments_of
from asyncrl.text.chat_messages import Message, Schema, plain_text

Tools: TypeAlias = Mapping[str, tuple[Schema, Callable[..., Awaitable[object]]]]
"""Name → its schema in OpenAI's form, and the async function that gets the call's arguments."""
MOST_CHARACTERS = 8000
"""Characters of a tool's answer that the model gets."""


@dataclass(frozen=True, slots=True)
class ToolsRun:
    """What `run_tools` did."""

    answer: str
    """The text of the last turn, which called no tool. Empty if there is no such turn."""
    ended: Literal["answer", "turns", "length"]
    """`turns`: the last turn still called a tool. `length`: no room was left in the context."""
    messages: Sequence[Message]
    """The whole chat."""
    calls: int
    """Tool calls, those that failed included."""
    failed: int
    """Calls whose answer is an error."""
    cut: bool = False
    """Whether a limit on its length cut the last turn."""

    def parts(self) -> dict[str, float]:
        """What an environment may report beside its reward."""
        return {"calls": float(self.calls), "failed_calls": float(self.failed)}


async def run_tools(
    model: Any, messages: Sequence[Message | Reply], tools: Tools, most_turns: int = 8
) -> ToolsRun:
    """Ask the model, run the tool calls of its answer in their order, and go on until an answer
    calls no tool.

    A failed call does not end the session: one of an unknown tool, one with other arguments than
    the function's, or one whose function raises. The model gets a text that begins with "error:".

    Args:
        model: behaves as `openai.AsyncOpenAI()`.
        messages: the chat so far. It is not changed.
        most_turns: turns after which the loop ends, even if the last one calls a tool.

    Raises:
        ValueError: `most_turns` is below 1.
        ContextTooLongError: there is no room for the first turn.
        Any other error of the model.
    """
    if most_turns < 1:
        raise ValueError(f"most_turns = {most_turns}: give at least 1")
    chat: list[Any] = list(messages)
    schemas = [schema for schema, _ in tools.values()]
    calls = failed = 0

    def done(
        answer: str, ended: Literal["answer", "turns", "length"], cut: bool = False
    ) -> ToolsRun:
        return ToolsRun(answer, ended, chat, calls, failed, cut)

    for turn in range(most_turns):
        try:
            completion = await model.chat.completions.create(
                model="policy", messages=chat, tools=schemas
            )
        except ContextTooLongError:
            if not turn:
                raise
            return done("", "length")
        choice = completion.choices[0]
        message = choice.message
        chat.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return done(str(plain_text(message.content)), "answer", was_cut(choice))
        for call in message.tool_calls:
            text, worked = await _called(tools, call.function.name, call.function.arguments)
            calls, failed = calls + 1, failed + (not worked)
            chat.append({"role": "tool", "tool_call_id": call.id, "content": text})
    return done("", "turns")


def was_cut(choice: Any) -> bool:
    """Whether a limit on its length cut the turn of a completion's choice."""
    return bool(getattr(choice, "finish_reason", None) == "length")


async def _called(tools: Tools, name: str, written: object) -> tuple[str, bool]:
    """What the model gets for a call, and whether the tool worked."""
    if name not in tools:
        return f"error: there is no tool {name!r}; the tools are: {', '.join(tools)}", False
    _, function = tools[name]
    try:
        arguments = arguments_of(written)
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError, RecursionError) as error:
        return f"error: {name} cannot be called with these arguments: {error}", False
    try:
        return _text(await function(**arguments)), True
    except Exception as error:  # a tool's own code may raise anything
        return _cut(f"error: {type(error).__name__}: {text_of(str, error)}"), False


def _text(result: object) -> str:
    if isinstance(result, str):
        return _cut(result)
    return _cut(json.dumps(result, ensure_ascii=False, default=str))


def _cut(text: str) -> str:
    more = len(text) - MOST_CHARACTERS
    text = text if more <= 0 else f"{text[:MOST_CHARACTERS]}… ({more} more characters)"
    return text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair is no text
