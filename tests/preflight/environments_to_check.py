"""Environments for `check-env`: a sound one, and some with faults."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from asyncrl.environments import run_tools

NOTE: Any = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Keep a text.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "tags": {"type": "array"}},
            "required": ["text"],
        },
    },
}


async def note(text: str, tags: list[str] | None = None) -> str:
    return f"kept {text}"


def agrees(task: Mapping[str, Any], text: str) -> float:
    return float(text.strip() == task["answer"])


async def ask(task: Mapping[str, Any], model: Any) -> str:
    chat = [{"role": "user", "content": task["prompt"]}]
    answer = await model.chat.completions.create(messages=chat)
    return str(answer.choices[0].message.content)


async def sound(task: Mapping[str, Any], model: Any) -> float:
    return agrees(task, await ask(task, model))


async def with_tool(task: Mapping[str, Any], model: Any) -> float:
    chat = [{"role": "user", "content": task["prompt"]}]
    done = await run_tools(model, chat, {"note": (NOTE, note)}, most_turns=3)
    return agrees(task, done.answer)


async def raises(task: Mapping[str, Any], model: Any) -> float:
    await ask(task, model)
    raise KeyError("no such table")


async def upside_down(task: Mapping[str, Any], model: Any) -> float:
    return 1 - agrees(task, await ask(task, model))


async def rewards_length(task: Mapping[str, Any], model: Any) -> float:
    text = await ask(task, model)
    return agrees(task, text) + len(text) / 100


async def believes(task: Mapping[str, Any], model: Any) -> float:
    """Any text that has the answer's first character counts, and so does the empty one."""
    return float((await ask(task, model))[:1] in task["answer"])


async def gives_nothing(task: Mapping[str, Any], model: Any) -> None:
    await ask(task, model)


async def fails_on_empty(task: Mapping[str, Any], model: Any) -> float:
    text = await ask(task, model)
    return agrees(task, text) + 0 * ord(text[0])


async def blocks(task: Mapping[str, Any], model: Any) -> float:
    try:
        return agrees(task, await ask(task, model))
    except BaseException:
        time.sleep(60)  # noqa: ASYNC251
        raise


async def always_blocks(task: Mapping[str, Any], model: Any) -> float:
    await ask(task, model)
    time.sleep(1e6)  # noqa: ASYNC251
    return 0.0


async def silent(task: Mapping[str, Any], model: Any) -> float:
    return 0.5


def wants_column(completions: list[str], solution: list[str]) -> list[float]:
    return [0.0] * len(completions)


async def too_long(task: Mapping[str, Any], model: Any) -> float:
    """Its first chat has more text than a session may have."""
    return agrees(task, await ask({**task, "prompt": task["prompt"] * 20_000}, model))


async def too_long_at_times(task: Mapping[str, Any], model: Any) -> float:
    """Its first chat is too long for the second of three tasks."""
    times = 20_000 if task["answer"] == "42" else 1
    return agrees(task, await ask({**task, "prompt": task["prompt"] * times}, model))


async def asks_at_times(task: Mapping[str, Any], model: Any) -> float:
    """It never asks the model about the second of three tasks."""
    return 0.0 if task["answer"] == "42" else agrees(task, await ask(task, model))


async def slow_at_times(task: Mapping[str, Any], model: Any) -> float:
    await asyncio.sleep(1.5 if task["answer"] == "42" else 0)
    return agrees(task, await ask(task, model))


async def prints_much(task: Mapping[str, Any], model: Any) -> float:
    print("x" * 100_000)
    return agrees(task, await ask(task, model))


UNWRITABLE: Any = {
    "type": "function",
    "function": {"name": 'kept"', "parameters": {"type": "object", "properties": {}}},
}


async def hands_over(task: Mapping[str, Any], model: Any) -> float:
    """A second agent, with a tool of its own, goes on if the first one calls its tool."""
    chat: list[Any] = [{"role": "user", "content": task["prompt"]}]
    create = model.chat.completions.create
    first = (await create(messages=chat, tools=[NOTE])).choices[0].message
    if not first.tool_calls:
        return agrees(task, first.content)
    second = [{"role": "system", "content": "second"}, *chat]
    await create(messages=second, tools=[NOTE, UNWRITABLE])
    return 0.0
