"""Formats whole trajectories of a run as text, for a person to read what the model writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NotRequired, TypedDict

import pyarrow as pa
import pyarrow.compute as pc

from asyncrl.observe.metric_values import number
from asyncrl.runtime.redact import shown
from asyncrl.text.transcript import transcript

ORDERS = {
    "newest": ("finished_at", "descending"),
    "best": ("reward", "descending"),
    "worst": ("reward", "ascending"),
}
"""Name of an order → the column to sort by, and its direction. Missing rewards come last."""


class SampleRow(TypedDict):
    """The columns of `Run.trajectories()` that are shown. A row also has `reward/NAME` for each
    reward function."""

    ordinal: int
    index: int
    oldest_version: int | None
    newest_version: int | None
    staleness: int | None
    tokens: int
    finish_reason: str
    status: str
    outcome: str | None
    reward: float | None
    attempt: NotRequired[int]
    step: NotRequired[int | None]
    """The step that trained it."""
    advantage: NotRequired[float | None]
    prompt_text: str | None
    completion: str | None
    baseline_reward: NotRequired[float | None]
    """Reward of the prompt's greedy completion, in runs that have one."""
    session_messages: NotRequired[str | None]
    """The chat of a session as JSON, in runs with an environment, as are the following columns."""
    session_end: NotRequired[str | None]
    session_note: NotRequired[str | None]
    turn_reward: NotRequired[Sequence[float | None] | None]
    """The reward of each turn of a session."""
    turn_advantage: NotRequired[Sequence[float | None] | None]


def choose_samples(
    trajectories: pa.Table, count: int, order: str = "newest", version: int | None = None
) -> list[SampleRow]:
    """Choose `count` rows of `Run.trajectories()`.

    Args:
        order: one of ORDERS.
        version: choose only trajectories whose oldest token is of this policy version.
    """
    if version is not None:
        trajectories = trajectories.filter(pc.equal(trajectories["oldest_version"], version))
    indices = pc.sort_indices(
        trajectories,
        [
            (*ORDERS[order], "at_end"),
            ("ordinal", "ascending", "at_end"),
            ("index", "ascending", "at_end"),
        ],
    )
    rows: list[SampleRow] = trajectories.take(indices[:count]).to_pylist()
    return rows


def samples_text(rows: Sequence[SampleRow]) -> str:
    """Format the rows one below the other, with full, indented prompts and completions. Control
    characters are replaced, so the text cannot act on a terminal."""
    return "\n\n".join(_sample_text(row) for row in rows)


def _sample_text(row: SampleRow) -> str:
    parts = {
        name.removeprefix("reward/"): number(row, name)
        for name in row
        if name.startswith("reward/")
    }
    facts = [
        f"prompt {row['ordinal']}, completion {row['index']}",
        _named("version", row["oldest_version"], row["newest_version"]),
        f"staleness {_known(row['staleness'])}",
        f"{row['tokens']} tokens, ended by {row['finish_reason']}",
        row["status"],
        _outcome(row),
    ]
    reward = f"reward {_known(row['reward'])}" + (
        f" ({', '.join(f'{name} {_known(value)}' for name, value in parts.items())})"
        if parts
        else ""
    )
    if row.get("baseline_reward") is not None:
        reward += f", greedy completion {_known(row['baseline_reward'])}"
    if row.get("advantage") is not None:
        reward += f", advantage {_known(row['advantage'])}"
    head = [f"── {', '.join(facts)}", f"── {reward}", *_turn_lines(row)]
    head.append(f"── {page_link(row)}")
    messages = row.get("session_messages")
    if messages is None:
        shown_texts = [("prompt:", row["prompt_text"]), ("completion:", row["completion"])]
    else:
        shown_texts = [
            (f"session, which ended: {row.get('session_end')}", transcript(json.loads(messages)))
        ]
    if row.get("session_note"):
        shown_texts.append(("note:", row.get("session_note")))
    texts = [line for title, text in shown_texts for line in (title, _indented(text))]
    return "\n".join([*head, *texts])


def page_link(row: SampleRow) -> str:
    """Where the page of the run (`asyncrl report`) shows a trajectory."""
    step = "" if row.get("step") is None else f"/step/{row['step']}"
    attempt = f"@{row['attempt']}" if row.get("attempt") else ""
    return f"report.html#{step}/group/{row['ordinal']}{attempt}/{row['index']}"


def _outcome(row: SampleRow) -> str:
    known = row["outcome"] or "not trained yet"
    return known if row.get("step") is None else f"{known} by step {row['step']}"


def _turn_lines(row: SampleRow) -> list[str]:
    """Rewards and advantages of the turns of a session, if the environment gave rewards to them."""
    values = {"rewards": row.get("turn_reward"), "advantages": row.get("turn_advantage")}
    rewarded = any(value is not None for value in values["rewards"] or ())
    return [
        f"── {name} of turns: {', '.join(map(_known, of_turns))}"
        for name, of_turns in values.items()
        if rewarded and of_turns
    ]


def _named(name: str, first: int | None, last: int | None) -> str:
    return f"{name} {_known(first)}" if first == last else f"{name}s {first} to {last}"


def _known(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _indented(text: str | None) -> str:
    """Mark each line, so that no line of model output looks like a line of asyncrl."""
    return "\n".join(f"  │ {line}" for line in shown(text or "").split("\n"))
