"""The program that plays tasks of verifiers. verifiers needs an environment of its own, so these
are tests of the parts that need none."""

from __future__ import annotations

import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from asyncrl.rewards.builtin import printed_reward
from jobs.recipes.verifiers_agent import chosen, environment_settings, last_line, task_at

PROGRAM = Path(__file__).parents[2] / "jobs" / "recipes" / "verifiers_agent.py"


@pytest.mark.parametrize(
    ("given", "agents", "expected"),
    [
        ({}, {"agent": None}, {"agent": {"harness": {"id": "null"}}}),
        ({}, {"agent": "compact"}, {"agent": {"harness": {"id": "compact"}}}),
        ({}, {"a": None, "b": None}, {name: {"harness": {"id": "null"}} for name in "ab"}),
        (
            {"agent": {"harness": {"id": "bash"}}, "max_concurrent_agents": 2},
            {"agent": None},
            {"agent": {"harness": {"id": "bash"}}, "max_concurrent_agents": 2},
        ),
    ],
)
def test_agents_run_here_and_cannot_run_commands_unless_that_is_asked_for(
    given: dict[str, Any], agents: dict[str, str | None], expected: dict[str, Any]
) -> None:
    found = environment_settings("glossary", given, agents)
    assert found.pop("taskset") == {"id": "glossary"}
    assert [found[name].pop("runtime") for name in agents] == [{"type": "subprocess"}] * len(agents)
    assert found == expected


def test_settings_of_the_user_win() -> None:
    given = {"taskset": {"size": 3}, "agent": {"runtime": {"type": "docker"}}}
    found = environment_settings("glossary", given, {"agent": None})
    assert found == {
        "taskset": {"size": 3, "id": "glossary"},
        "agent": {"runtime": {"type": "docker"}, "harness": {"id": "null"}},
    }


def test_a_task_is_found_by_its_number_also_where_they_never_end() -> None:
    assert task_at(count(10), 3) == 13
    with pytest.raises(ValueError, match="no task 2; the taskset has 2, counted from 0"):
        task_at("ab", 2)
    with pytest.raises(ValueError, match="no task -1; tasks are counted from 0"):
        task_at(count(), -1)


def test_one_agent_has_the_reward_of_the_session() -> None:
    assert chosen(["agent"], None) == 0
    assert chosen(["player0", "player1"], "player1") == 1
    with pytest.raises(ValueError, match=r"player0, player1 have traces.*with --agent"):
        chosen(["player0", "player1"], None)
    with pytest.raises(ValueError, match="--agent judge has 0 of the traces of player0"):
        chosen(["player0"], "judge")
    with pytest.raises(ValueError, match="--agent solver has 2 of the traces"):
        chosen(["solver", "solver"], "solver")


def test_the_last_line_is_a_reward_with_its_parts() -> None:
    line = last_line(0.75, {"right": 1.0, "short": 0.5, "judged": None}, {"turns": 3.0})
    assert printed_reward(session_output=["log\n" + line + "\n"], session_end=["done"]) == {
        "reward": [0.75],
        "right": [1.0],
        "short": [0.5],
        "turns": [3.0],
    }


def test_a_failure_is_the_last_line_of_the_errors() -> None:
    done = subprocess.run(
        [sys.executable, "-S", PROGRAM, "glossary", "0"],  # -S: no installed packages
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "glossary 0: ModuleNotFoundError: No module named 'verifiers'\n"
