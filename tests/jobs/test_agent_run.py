"""A run whose sessions are played by a program at a URL, with everything real."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audited_runs import audited

STEPS, GROUPS, SAMPLES = 3, 3, 3
PROGRAM = Path(__file__).parent / "agent_program.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_program_that_knows_nothing_of_asyncrl_is_trained(
    start_run: Callable[..., Any], session_task: dict[str, Any], tmp_path: Path
) -> None:
    changes = session_task | {
        "max_steps": STEPS,
        "environment": {
            "command": [sys.executable, str(PROGRAM), "{low}", "{hidden}"],
            "processes": 1,
            "concurrency": 16,
        },
        "reward": {
            "functions": {"printed": {"function": "asyncrl.rewards.builtin:printed_reward"}},
            "processes": 1,
        },
        "rollout.rollout_batch_size": GROUPS,
        "rollout.n_samples_per_prompt": SAMPLES,
        "eval": {"data": str(tmp_path / "held_out.parquet"), "max_prompts": 4},
    }
    started = start_run(changes)
    assert started.wait() == 0, started.output
    run = audited(tmp_path / "runs" / "run")
    rows = run.groups().to_pylist()
    assert len(rows) >= STEPS * GROUPS
    for row in rows:
        fails = row["hidden"] % 8 == 0
        assert set(row["session_end"]) == ({"agent_error"} if fails else {"done"})
        assert set(row["status"]) == ({"agent_error"} if fails else {"ok"})
        # Three turns in two APIs are one row, and a program that fails has taken one.
        assert row["turn_branch_reason"] == [""] * (SAMPLES if fails else 3 * SAMPLES)
        assert row["session_overridden"] == [1 if fails else 2] * SAMPLES  # temperature
        if fails:
            assert row["session_note"][0].endswith("ended with exit code 1: this task fails")
        else:
            assert row["reward"] == [1.0] * SAMPLES
            assert all(output.startswith("log\n{") for output in row["session_output"])
        assert all(seconds > 0 for seconds in row["session_model_s"])
    # The held-out tasks that do not fail have the reward 1, and the others none.
    evaluated = run.records("evaluation")[0]
    assert evaluated["eval/greedy_printed"] == 1.0
    steps = [record for record in run.records("step") if record["applied"]]
    assert len(steps) == STEPS
    for step in steps:
        parts = [value for name, value in step.items() if name.startswith("session/tokens_")]
        assert sum(parts) == 2 * step["session/tokens_sampled"]
        assert step["reward/printed/tokens"] > 0
