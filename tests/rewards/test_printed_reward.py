"""The reward that an agent program prints."""

from __future__ import annotations

import json

import pytest

from asyncrl.rewards import builtin


@pytest.mark.parametrize(
    ("output", "reward", "part"),
    [
        ("0.5\n", 0.5, None),
        ("log\n1\n\n", 1.0, None),
        ('working\n{"reward": -2, "steps": 3, "note": "x", "a/b": 1}', -2.0, 3.0),
        ('{"steps": 3}', None, 3.0),
        ('{"reward": 1.0, "steps": 3, "note": "a\u2028b"}', 1.0, 3.0),
        ('{"reward": 1, "steps": 3, "": 2, "\\ud800": 2, "a\\nb": 2}', 1.0, 3.0),
        ("nan", None, None),
        ("1e400", None, None),
        ("good", None, None),
        ("[" * 100_000, None, None),
        ("", None, None),
    ],
)
def test_the_reward_that_a_program_printed(
    output: str, reward: float | None, part: float | None
) -> None:
    found = builtin.printed_reward([output, ""])
    assert found["reward"] == [reward, None]
    assert found.get("steps", [None, None]) == [part, None]


def test_a_program_names_only_some_numbers() -> None:
    many = json.dumps({"reward": 1.0, **{f"n{number}": number for number in range(1000)}})
    assert len(builtin.printed_reward([many])) == 32
