"""What driver.log says of the training: one line for each record that a person would look for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["record_line"]

QUIET = ("push", "gather", "commit", "memory", "error", "stall")
"""Events without a line: several come with each version, or the log has their words already."""

OF_A_STEP = {
    "reward": "reward/mean",
    "loss": "loss",
    "gradient": "grad_norm",
    "learning rate": "learning_rate",
    "mean staleness": "staleness/mean",
    "max staleness": "staleness/max",
    "tokens": "tokens",
    "waited": "time/learner_waited_s",
}
"""Word in a step's line → metric."""


def record_line(
    event: str, step: int, version: int, metrics: Mapping[str, Any], max_steps: int = 0
) -> str | None:
    """One line for the record; None for an event that is told elsewhere or too often."""
    if event in QUIET:
        return None
    if event == "step":
        skipped = "" if metrics.get("applied", 1) else " skipped"
        parts = {
            name.removeprefix("reward/"): value
            for name, value in metrics.items()
            if name.startswith("reward/") and name.count("/") == 1
        }
        told = {word: metrics.get(name) for word, name in OF_A_STEP.items()} | {
            f"reward {name}": value for name, value in parts.items() if name != "mean"
        }
        return f"step {step}/{max_steps}{skipped}: version {version}, {_values(told)}".removesuffix(
            ", "
        )
    if event == "evaluation":
        return (
            f"evaluation of version {version}:"
            f" {_values({name.removeprefix('eval/'): value for name, value in metrics.items()})}"
        )
    return f"{event} at step {step}, version {version}: {_values(metrics)}".removesuffix(": ")


def _values(values: Mapping[str, Any]) -> str:
    """`name value` of what is known, on one line."""
    known = {
        name: f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
        for name, value in values.items()
        if value is not None
    }
    return ", ".join(f"{name} {text}" for name, text in known.items() if text != "nan")
