"""What the plan says about sessions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config import Config
from asyncrl.environments.pool import GUARD_S
from asyncrl.preflight.plan.sections import algorithm_text, environment_text

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "environments.md"


def config(staleness: dict[str, Any], algorithm: dict[str, Any], **environment: Any) -> Config:
    return Config.model_validate(
        {
            "name": "agent",
            "max_steps": 1,
            "model": {"path": "m"},
            "data": {"train": "t", "max_prompt_length": 8, "max_length": 1024},
            "environment": {"function": "my_env:solve", **environment},
            "rollout": {
                "max_completion_length": 8,
                "rollout_batch_size": 8,
                "n_samples_per_prompt": 4,
            },
            "staleness": staleness,
            "algorithm": algorithm,
        }
    )


def text(staleness: dict[str, Any], **environment: Any) -> str:
    (section,) = environment_text(config(staleness, {}, **environment))
    return section


def test_the_plan_says_how_long_a_step_can_wait_for_a_session() -> None:
    found = text({"max_staleness": 2}, deadline_s=100, block_s=20)
    assert (
        f"waves 1 x (deadline_s 100 + block_s 20 + {GUARD_S:g} to end it) = {120 + GUARD_S:g} s\n"
        "    less the time of max_staleness 2 step(s)"
    ) in found
    assert "more sessions may start" not in found


def test_no_session_of_the_first_example_waits_for_a_place() -> None:
    (example,) = re.findall(r"# sums\.yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (section,) = environment_text(Config.model_validate(yaml.safe_load(example)))
    assert "waves 1 x" in section


def test_sessions_that_wait_for_a_place_count() -> None:
    """(2 + 1) x 8 groups of 4 sessions, of which 2 x 16 run at once."""
    found = text({"max_staleness": 2}, deadline_s=100, processes=2, concurrency=16)
    assert f"waves 3 x (deadline_s 100 + block_s 10 + {GUARD_S:g} to end it) = " in found
    assert f"= {3 * (110 + GUARD_S):g} s" in found and "environment.concurrency" in found


def test_the_plan_names_the_limits_of_a_session() -> None:
    assert "at most 16 turns and 300 s, its tools included\n" in text({})
    limited = text({}, turn_s=60, tool_s=20)
    assert "300 s, its tools included; turn: 60 s; tools after an answer: 20 s\n" in limited


def test_other_bounds_say_something_else() -> None:
    assert "less the time" not in text({"max_staleness": 0})
    assert "waits for its oldest session" not in text({"max_staleness": 2, "on_stale": "drop"})


@pytest.mark.parametrize(
    ("algorithm", "experimental"),
    [
        ({"advantage": {"turns": {"coef": 1.0}}}, False),
        ({"advantage": {"turns": {"coef": 1.0, "gamma": 0.5}}}, True),
        ({"advantage": {"turns": {"coef": 1.0}}, "loss": "gspo"}, True),
    ],
)
def test_rewards_of_turns_have_a_run_in_the_evidence(
    algorithm: dict[str, Any], experimental: bool
) -> None:
    found = algorithm_text(config({}, algorithm))
    assert "each turn" in found and ("experimental" in found) is experimental
