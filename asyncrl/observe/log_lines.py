"""Formats the lines of driver.log: one for each record that a person would look for."""

from __future__ import annotations

from collections.abc import Mapping

QUIET = ("push", "gather", "commit", "memory", "error", "stall", "failed_sessions")
"""Events without a line: they come several times per version, or another line logs them."""

STEP_METRICS = {
    "reward": "reward/mean",
    "loss": "loss",
    "gradient": "grad_norm",
    "learning rate": "learning_rate",
    "mean staleness": "staleness/mean",
    "max staleness": "staleness/max",
    "masked as stale": "stale/masked_ratio",
    "without a fresh token": "stale/empty_ratio",
    "tokens": "tokens",
    "waited": "time/learner_waited_s",
}
"""Word in a step's line → metric."""


def record_line(
    event: str, step: int, version: int, metrics: Mapping[str, object], max_steps: int = 0
) -> str | None:
    """Format a record as one line; None for a QUIET event."""
    if event in QUIET:
        return None
    if event == "step":
        skipped = "" if metrics.get("applied", 1) else " skipped"
        parts = {
            name.removeprefix("reward/"): value
            for name, value in metrics.items()
            if name.startswith("reward/") and name.count("/") == 1
        }
        values = {word: metrics.get(name) for word, name in STEP_METRICS.items()} | {
            f"reward {name}": value for name, value in parts.items() if name != "mean"
        }
        line = f"step {step}/{max_steps}{skipped}: version {version}, {_values(values)}"
        return line.removesuffix(", ")
    if event == "evaluation":
        return (
            f"evaluation of version {version}:"
            f" {_values({name.removeprefix('eval/'): value for name, value in metrics.items()})}"
        )
    return f"{event} at step {step}, version {version}: {_values(metrics)}".removesuffix(": ")


def _values(values: Mapping[str, object]) -> str:
    """`name value` of each value that is known, on one line."""
    known = {
        name: f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
        for name, value in values.items()
        if value is not None
    }
    return ", ".join(f"{name} {text}" for name, text in known.items() if text != "nan")
