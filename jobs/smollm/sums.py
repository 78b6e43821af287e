"""Sums for an agent with a calculator: in plain words, with dialogues that show how to call it, and
in small stories, which no dialogue shows."""

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
STORIES = {
    "plus": (
        "A farm has {left} apples and picks {right} more. How many apples does it have now?",
        "There are {left} books on the shelves, and {right} more arrive. How many are there?",
        "{left} people wait, and {right} others join them. How many people wait now?",
    ),
    "minus": (
        "A shop has {left} pens and sells {right} of them. How many pens are left?",
        "A tank holds {left} liters, and {right} liters leak out. How many liters remain?",
        "{left} birds sit on a roof. Then {right} fly away. How many birds are still there?",
    ),
    "times": (
        "{left} boxes hold {right} nails each. How many nails are there?",
        "A ticket costs {left} cents. How many cents do {right} tickets cost?",
        "A machine makes {left} screws in an hour. How many does it make in {right} hours?",
    ),
}
"""Word → its stories. The last one is only in held-out tasks."""


def tasks(seed: int, count: int, held_out: bool, stories: bool = False) -> list[dict[str, str]]:
    """Distinct tasks with `prompt`, `expression` and `answer`, in plain words or as stories."""
    draw, found = Random(f"{seed} sums {held_out}"), dict[str, dict[str, str]]()
    while len(found) < count:
        left, right, word = (
            draw.randrange(100, 1000),
            draw.randrange(12, 100),
            draw.choice(WORDS),
        )
        if (left % HELD_OUT == 0) == held_out:
            told = STORIES[word] if held_out else STORIES[word][:-1]
            text = draw.choice(told) if stories else f"What is {{left}} {word} {{right}}?"
            asked = text.format(left=left, right=right)
            found[f"{left} {word} {right}"] = _task(left, word, right, asked)
    return list(found.values())


def _task(left: int, word: str, right: int, asked: str) -> dict[str, str]:
    sign, calculated = OPERATIONS[word]
    return {
        "prompt": f"{asked} Use the tool, and answer with the number alone.",
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
