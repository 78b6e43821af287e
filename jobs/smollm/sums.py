"""Sums in words for an agent with a calculator, and dialogues that show how to call it."""

from __future__ import annotations

import operator
from random import Random
from typing import Any

from asyncrl.environments.ready.arithmetic import CALCULATE

OPERATIONS = {
    "plus": ("+", operator.add),
    "minus": ("-", operator.sub),
    "times": ("*", operator.mul),
}
WORDS = tuple(OPERATIONS)
HELD_OUT = 10
"""Every tenth first number is only in held-out tasks."""


def tasks(seed: int, count: int, held_out: bool) -> list[dict[str, str]]:
    """Distinct tasks with `prompt`, `expression` and `answer`."""
    draw, found = Random(f"{seed} sums {held_out}"), dict[str, dict[str, str]]()
    while len(found) < count:
        left, right, word = (
            draw.randrange(100, 1000),
            draw.randrange(12, 100),
            draw.choice(WORDS),
        )
        if (left % HELD_OUT == 0) == held_out:
            found[f"{left} {word} {right}"] = _task(left, word, right)
    return list(found.values())


def _task(left: int, word: str, right: int) -> dict[str, str]:
    sign, calculated = OPERATIONS[word]
    return {
        "prompt": f"What is {left} {word} {right}? Use the tool, and answer with the number alone.",
        "expression": f"{left} {sign} {right}",
        "answer": str(calculated(left, right)),
    }


def dialogue(task: dict[str, str]) -> dict[str, Any]:
    """A chat that solves a task with one call, and its tool, as a row for SFT."""
    function = {"name": "calculate", "arguments": {"expression": task["expression"]}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": task["prompt"]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "content": task["answer"]},
        {"role": "assistant", "content": task["answer"]},
    ]
    return {"messages": messages, "tools": [CALCULATE]}
