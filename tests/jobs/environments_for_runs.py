"""Environments of whole runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from asyncrl.environments.ready import calculator, python, reasoning_gym


async def three_questions(task: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Asks three times, whatever the model answers. The first of each eight tasks fails. The reward
    is the share of digits in the answers. The reward of a turn is the length of its text, and the
    last one has none."""
    messages: list[Any] = [{"role": "user", "content": str(task["low"])}]
    text, lengths = "", list[int]()
    for question in ("higher", "lower", "right"):
        answer = await model.chat.completions.create(messages=messages, temperature=0.5)
        message = answer.choices[0].message
        text += message.content
        lengths.append(len(message.content))
        messages += [message, {"role": "user", "content": question}]
    if task["hidden"] % 8 == 0:
        raise RuntimeError("this task fails")
    reward = len(re.findall(r"\d", text)) / max(1, len(text))
    return {"reward": reward, "turns": [*lengths[:2], None]}


async def ready(task: Mapping[str, Any], model: Any, level: str) -> dict[str, float]:
    """The ready environment that the task's row names."""
    match task["kind"]:
        case "calculator":
            return await calculator(task, model)
        case "python":
            return await python(task, model, level=level, limits={"wall_s": 5})
    return await reasoning_gym(task, model, tries=2)
