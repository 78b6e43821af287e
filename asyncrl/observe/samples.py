"""Whole trajectories of a run as text: for a person to read what the model writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from asyncrl.runtime.redact import shown

__all__ = ["choose_samples", "samples_text"]

ORDERS = {
    "newest": ("finished_at", "descending"),
    "best": ("reward", "descending"),
    "worst": ("reward", "ascending"),
}
"""Which trajectories come first: by which column, in which direction. A reward that is missing
comes last."""


def choose_samples(
    trajectories: pa.Table, count: int, order: str = "newest", version: int | None = None
) -> list[dict[str, Any]]:
    """So many rows of `Run.trajectories()`.

    Args:
        order: one of ORDERS.
        version: only trajectories whose oldest token is of this policy version.
    """
    if version is not None:
        trajectories = trajectories.filter(pc.equal(trajectories["oldest_version"], version))
    places = pc.sort_indices(
        trajectories,
        [
            (*ORDERS[order], "at_end"),
            ("ordinal", "ascending", "at_end"),
            ("index", "ascending", "at_end"),
        ],
    )
    rows: list[dict[str, Any]] = trajectories.take(places[:count]).to_pylist()
    return rows


def samples_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows one below the other, each prompt and completion in full and indented, without
    anything that moves a terminal."""
    return "\n\n".join(_sample_text(row) for row in rows)


def _sample_text(row: Mapping[str, Any]) -> str:
    parts = {
        name.removeprefix("reward/"): value
        for name, value in row.items()
        if name.startswith("reward/")
    }
    said = [
        f"prompt {row['ordinal']}, completion {row['index']}",
        _named("version", row["oldest_version"], row["newest_version"]),
        f"staleness {_known(row['staleness'])}",
        f"{row['tokens']} tokens, ended by {row['finish_reason']}",
        row["status"],
        row["outcome"] or "not trained yet",
    ]
    reward = f"reward {_known(row['reward'])}" + (
        f" ({', '.join(f'{name} {_known(value)}' for name, value in parts.items())})"
        if parts
        else ""
    )
    return "\n".join(
        [
            f"── {', '.join(said)}",
            f"── {reward}",
            "prompt:",
            _indented(row["prompt_text"]),
            "completion:",
            _indented(row["completion"]),
        ]
    )


def _named(name: str, first: int | None, last: int | None) -> str:
    return f"{name} {_known(first)}" if first == last else f"{name}s {first} to {last}"


def _known(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _indented(text: str | None) -> str:
    """No line of what a model wrote can pass for a line of ours."""
    return "\n".join(f"  │ {line}" for line in shown(text or "").split("\n"))
