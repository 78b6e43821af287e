"""The game: find a hidden number among 63 with at most six guesses. Each guess is a tool call, and
the tool answers "higher" or "lower". A perfect player halves the range and always wins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH = 63
"""Numbers of the range. Six halvings find each of them."""
GUESSES = 6
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Guess the number.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "integer"}},
                "required": ["number"],
            },
        },
    }
]


def question(low: int) -> str:
    """The user's message: the range."""
    return f"{low}..{low + WIDTH - 1}"


def answer(guess: int, hidden: int) -> str:
    """What the tool says about a guess."""
    return "right" if guess == hidden else "higher" if hidden > guess else "lower"


def call(number: int) -> dict[str, Any]:
    """A tool call with this guess, as chat templates read it."""
    return {"type": "function", "function": {"name": "guess", "arguments": {"number": number}}}


async def play(task: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Play one game. The reward of a turn says how evenly its guess divides what is left: 1 if it
    halves it, and -1 if it is none of it. The reward of the game is their mean. Neither depends on
    luck, as a win does.

    Args:
        task: `low`, the first number of the range, and `hidden`.
        model: behaves as `openai.AsyncOpenAI()`.
    """
    messages: list[Any] = [{"role": "user", "content": question(task["low"])}]
    first, last = task["low"], task["low"] + WIDTH - 1
    evenness: list[float] = []
    while len(evenness) < GUESSES:
        completion = await model.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS
        )
        message = completion.choices[0].message
        number = guessed(message.tool_calls)
        if number is None:
            return _ended([*evenness, -1.0], 0.0)
        evenness.append(even(number, first, last))
        said = answer(number, task["hidden"])
        if said == "right":
            return _ended(evenness, 1.0)
        reply = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": said}
        messages += [message.model_dump(exclude_none=True), reply]
        if said == "higher":
            first = max(first, number + 1)
        else:
            last = min(last, number - 1)
    return _ended(evenness, 0.0)


def _ended(evenness: list[float], won: float) -> dict[str, Any]:
    return {"reward": sum(evenness) / len(evenness), "turns": evenness, "won": won}


def even(number: int, first: int, last: int) -> float:
    """How evenly a guess divides the numbers from `first` to `last`: 1 = into halves, 0 = not at
    all, -1 = it is none of them."""
    if not first <= number <= last:
        return -1.0
    smaller, half = min(number - first, last - number), (last - first) // 2
    return smaller / half if half else 1.0


def won(session_parts: Sequence[Mapping[str, float]], **_: object) -> list[float | None]:
    """Whether each game was won, as a reward function that is only reported."""
    return [parts.get("won") for parts in session_parts]


def guessed(calls: Sequence[Any] | None) -> int | None:
    """The number of the only tool call; None if there is no such call."""
    if not calls or len(calls) > 1 or calls[0].function.name != "guess":
        return None
    number = json.loads(calls[0].function.arguments).get("number")
    return number if isinstance(number, int) else None
