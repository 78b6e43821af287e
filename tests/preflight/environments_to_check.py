"""Environments for `check-env`: a sound one, and some with faults."""

from __future__ import annotations

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


async def silent(task: Mapping[str, Any], model: Any) -> float:
    return 0.5


def wants_column(completions: list[str], solution: list[str]) -> list[float]:
    return [0.0] * len(completions)
