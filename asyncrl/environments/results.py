"""Reads what an environment returned: a reward, its parts, a text, and rewards of turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.runtime.functions import short, text_of
from asyncrl.runtime.single_precision import FLOAT32_MAX

REWARD = "reward"
TURNS = "turns"
"""The keys of the reward and of the turns' rewards in a dict that an environment returns. Other
keys are its parts."""
OUTPUT = "output"
"""The key of a text that reward functions get."""
MOST_OUTPUT = 1 << 16
"""Characters of that text that are kept, from its end."""


@dataclass(frozen=True, slots=True)
class EnvironmentResult:
    """What an environment returned."""

    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    output: str = ""
    turns: Sequence[tuple[int, float]] = ()
    """Pairs of a turn's node and its reward."""
    turns_at_url: Sequence[float | None] | None = None
    """Rewards of turns that were taken at the URL: one item for each turn."""


NOTHING = EnvironmentResult()


def result_of(result: object, taken: Sequence[Sequence[int]] | None) -> EnvironmentResult:
    """What an environment returned: the reward, its parts, a text, and rewards of the turns taken,
    each of which has the nodes in `taken`. None: the turns were taken elsewhere.

    Raises:
        TypeError, ValueError: it is nonsense.
    """
    if result is None:
        return NOTHING
    values = dict(result) if isinstance(result, Mapping) else {REWARD: result}
    given = _turn_numbers(values.pop(TURNS)) if TURNS in values else None
    turns = () if given is None or taken is None else turn_rewards_of(given, taken)
    output = values.pop(OUTPUT, "")
    if not isinstance(output, str):
        shown = short(text_of(repr, output))
        raise TypeError(f"{OUTPUT} is {shown} ({type(output).__name__}), not a text")
    # Half of a surrogate pair is no text.
    output = output[-MOST_OUTPUT:].encode("utf-8", "backslashreplace").decode()
    for name in values:
        if not isinstance(name, str) or not _is_name(name):
            shown = repr(str(name)[:80])
            raise TypeError(f"{shown} is no name of a reward: a short line without '/'")
    found = {name: _number(name, value) for name, value in values.items()}
    at_url = given if taken is None else None
    return EnvironmentResult(found.pop(REWARD, None), found, output, turns, at_url)


def _is_name(name: str) -> bool:
    """Whether a reward may have this name."""
    return bool(name) and "/" not in name and name.isprintable() and name == short(name)


def _turn_numbers(given: object) -> list[float | None]:
    """The rewards of turns. Raises TypeError for nonsense."""
    plain = given.tolist() if hasattr(given, "tolist") else given  # of numpy or torch
    if not isinstance(plain, Sequence) or isinstance(plain, str | bytes):
        raise TypeError(
            f"{TURNS} is {text_of(str, given)[:80]!r} ({type(given).__name__}), not a list with a"
            " number or None for each turn"
        )
    return [
        None if value is None else _number(f"{TURNS}[{index}]", value)
        for index, value in enumerate(plain)
    ]


def turn_rewards_of(
    rewards: Sequence[float | None], taken: Sequence[Sequence[int]]
) -> list[tuple[int, float]]:
    """Pairs of a node and its reward.

    Args:
        taken: the nodes of each turn that the agent got.

    Raises:
        ValueError: the rewards are not one for each turn.
    """
    if len(rewards) != len(taken):
        raise ValueError(
            f"{TURNS} has {len(rewards)} rewards, and the session took {len(taken)} turns; give a"
            " number or None for each turn, in their order"
        )
    return [
        (node, value)
        for nodes, value in zip(taken, rewards, strict=True)
        if value is not None
        for node in nodes
    ]


def _number(name: str, value: object) -> float:
    plain = value.item() if hasattr(value, "item") else value  # of numpy or torch
    if isinstance(plain, bool | int | float) and abs(plain) <= FLOAT32_MAX:
        return float(plain)
    raise TypeError(
        f"{name} is {text_of(str, value)[:80]!r} ({type(value).__name__}), not a finite number"
    )
