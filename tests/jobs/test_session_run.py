"""A run whose trajectories are sessions of three turns, with everything real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audited_runs import audited
from session_turns import sampled_turns, worst_difference

from asyncrl.observe.metric_catalog import known_names
from asyncrl.run import replay_sessions
from asyncrl.rundir import Run
from asyncrl.text.tokenizer import load_tokenizer

STEPS, GROUPS, SAMPLES = 4, 4, 4
REUSED = ("session_reusable", "session_cached")


@pytest.mark.slow  # by default, test_sampled_sessions.py checks what a replica samples
@pytest.mark.timeout(400)
def test_a_run_of_sessions_trains_what_was_sampled(
    start_run: Callable[..., Any], session_task: dict[str, Any], tmp_path: Path
) -> None:
    changes = session_task | {
        "max_steps": STEPS,
        "environment": {"function": "environments_for_runs:three_questions", "processes": 1},
        "rollout.rollout_batch_size": GROUPS,
        "rollout.n_samples_per_prompt": SAMPLES,
        "eval": {"data": str(tmp_path / "held_out.parquet"), "max_prompts": 8},
        "algorithm": {"advantage": {"name": "dr_grpo", "turns": {"coef": 0.01}}},
    }
    started = start_run(changes)
    assert started.wait() == 0, started.output
    run = audited(tmp_path / "runs" / "run")
    steps = [record for record in run.records("step") if record["applied"]]
    assert len(steps) == STEPS
    rows = run.groups().to_pylist()
    assert_log_probs(tmp_path / "model", rows)
    assert_learner_agrees(steps[0])
    assert_chats(tmp_path / "model", rows)
    ends = [end for row in rows for end in row["session_end"]]
    assert set(ends) == {"done", "env_error"}
    assert_turn_advantages(rows)
    for row in rows:
        fails = row["hidden"] % 8 == 0
        assert set(row["status"]) == ({"env_error"} if fails else {"ok"})
        assert fails == ("RuntimeError: this task fails" in row["session_note"][0])
    for step in steps:
        parts = [value for name, value in step.items() if name.startswith("session/tokens_")]
        assert sum(parts) == 2 * step["session/tokens_sampled"]  # the total, and its parts
        assert step["session/tokens_trained"] == step["tokens"]
        # A step before which no new group was scored has no such mean.
        assert step.get("session/overridden", 3) == 3
        assert step.get("session/turn_reward", 1) > 0
        assert {name for name in step if name.startswith("session/")} <= known_names()
    found = {name: sum(map(sum, (row[name] for row in rows))) for name in REUSED}
    print("prefix cache:", found)
    misses = [
        {name: row[name] for name in (*REUSED, "turn_replica", "versions")}
        for row in rows
        if row["session_cached"] != row["session_reusable"]
    ]
    assert found["session_cached"] >= 0.9 * found["session_reusable"] > 0, misses
    trajectories = run.trajectories()
    assert trajectories.num_rows == len(rows) * SAMPLES
    assert set(trajectories["session_end"].to_pylist()) == set(ends)
    assert_replayed(run, rows)
    assert {len(turns) for turns in trajectories["turn_advantage"].to_pylist()} == {3}
    first = run.records("evaluation")[0]
    assert 0 < first["eval/greedy_env"] <= 1 and first["eval/failed_ratio"] == 0


def assert_replayed(run: Run, rows: list[dict[str, Any]]) -> None:
    """A failed and another group are replayed in an environment process, without the model."""
    by_end = {row["session_end"][0]: row["ordinal"] for row in rows}
    for end, ordinal in by_end.items():
        replayed = replay_sessions(run, ordinal)
        assert [(one.turns, one.asked, one.difference) for one in replayed] == [
            (3, 3, "")
        ] * SAMPLES
        assert {one.replayed.end for one in replayed if one.replayed is not None} == {end}


def assert_turn_advantages(rows: list[dict[str, Any]]) -> None:
    """By their formula, in groups whose sessions have three turns each."""
    for row in rows:
        advantages, given = row["advantage"], row["turn_reward"]
        if row["status"][0] != "ok":
            assert set(advantages) == {None} == set(row["turn_advantage"]) == set(given)
            continue
        assert row["turn_trajectory"] == [place // 3 for place in range(3 * SAMPLES)]
        for place, found in enumerate(row["turn_advantage"]):
            siblings = given[place % 3 :: 3]
            term = 0 if place % 3 == 2 else given[place] - sum(siblings) / SAMPLES
            assert found == pytest.approx(advantages[place // 3] + 0.01 * term, abs=1e-5)
        assert set(given[2::3]) == {None}


def assert_log_probs(model_path: Path, rows: list[dict[str, Any]]) -> None:
    """Every turn of version 0 has the log-probs that transformers computes after its tokens."""
    turns = [turn for row in rows for turn in sampled_turns(row) if turn.versions == {0}]
    later = [turn for turn in turns if len(turn.before) > 30]
    assert len(turns) >= 3 * GROUPS * SAMPLES and len(later) >= GROUPS * SAMPLES
    assert worst_difference(model_path, turns) <= 1e-4


def assert_learner_agrees(step: dict[str, Any]) -> None:
    """In the step, generators and learner have the same log-prob of each trained token, and the
    same weights. `kl_k3` is a mean: each token adds half of its squared difference."""
    assert step["staleness/max"] == 0
    difference = (2 * step["tokens"] * step["kl_k3"]) ** 0.5
    print(f"{step['tokens']:.0f} tokens differ between generators and learner by {difference:.1e}")
    assert difference <= 1e-4


def assert_chats(model_path: Path, rows: list[dict[str, Any]]) -> None:
    """The three turns of a session are one row of the template's own tokens, also where the length
    limit cut a turn, and the template closes it."""
    tokenizer: Any = load_tokenizer(str(model_path))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    cut = 0
    first = [row["turn_request_hash"][place] for row in rows for place in range(0, 3 * SAMPLES, 3)]
    assert all(first) and len(set(first)) == len({row["low"] for row in rows})
    for row in rows:
        turns = sampled_turns(row)
        assert len(turns) == 3 * SAMPLES and row["turn_branch_reason"] == [""] * len(turns)
        for place, turn in enumerate(turns):
            parent = row["turn_parent"][place]
            number, closing = 0, ""
            if parent >= 0:
                closing = "\n" if turns[parent].ids[-1] == end else "<|im_end|>\n"
                number = 1 if row["turn_parent"][parent] < 0 else 2
            asked = (str(row["low"]), "higher", "lower")[number]
            wanted = f"{closing}<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
            assert tokenizer.decode(row["turn_context"][place]) == wanted
            cut += turn.ids[-1] != end
    assert cut > 0, "no turn was cut"
