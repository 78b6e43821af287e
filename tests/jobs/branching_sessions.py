"""An environment of whole runs, whose sessions have two branches and a choice that is not taken."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


async def branches(task: Mapping[str, Any], model: Any) -> float:
    """Asks, takes the second of two answers to the next question, and goes on. Then asks something
    else after the first answer. The reward is the share of digits in the answers."""
    create = model.chat.completions.create
    start: list[Any] = [{"role": "user", "content": str(task["low"])}]
    first = (await create(messages=start)).choices[0].message
    start.append(first)
    chat = [*start, {"role": "user", "content": "higher"}]
    second = (await create(messages=chat, n=2)).choices[1].message
    chat += [second, {"role": "user", "content": "right"}]
    third = (await create(messages=chat)).choices[0].message
    other = [*start, {"role": "user", "content": "lower"}]
    fourth = (await create(messages=other)).choices[0].message
    text = "".join(answer.content for answer in (first, second, third, fourth))
    return len(re.findall(r"\d", text)) / max(1, len(text))
