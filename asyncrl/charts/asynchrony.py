"""How a run's two sides go together: staleness, waits, published versions, speed."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

from asyncrl.charts.drawing import (
    SHARE,
    STEP,
    VERSION,
    WHOLE,
    Axis,
    Chart,
    curves,
    heat_map,
    missing,
    stacked,
    under_one_another,
)
from asyncrl.charts.learning import NO_STEP
from asyncrl.charts.series import points

COLUMNS = 120
"""Columns of a heat map. Neighboring steps share one if there are more."""
SECONDS = Axis("seconds", ",.3~g")
NO_TRAINED = "No trained group is recorded yet."


def staleness(outcomes: pa.Table) -> Chart:
    """How many groups of each staleness a step trained: step × staleness, in versions.

    Args:
        outcomes: `Run.outcomes()`.
    """
    title = "Trained groups by staleness"
    trained = _trained(outcomes, "step")
    if not trained:
        return missing(title, NO_TRAINED)
    steps = [step for step, _ in trained]
    wide = -(-(max(steps) - min(steps) + 1) // COLUMNS)
    counted = Counter((step // wide * wide, stale) for step, stale in trained)
    cells = [(step, stale, count / wide) for (step, stale), count in counted.items()]
    return heat_map(
        title,
        STEP,
        Axis("staleness in versions", WHOLE),
        cells,
        Axis("groups a step", ",.2~f"),
        wide,
    )


def versions(outcomes: pa.Table, last: int = 40) -> Chart:
    """Which version a trained group began with: version that trained it × oldest version that
    generated it, of the last versions.

    Args:
        outcomes: `Run.outcomes()`.
    """
    title = f"Version that trained a group, and its oldest version (last {last})"
    trained = _trained(outcomes, "trained_at_version")
    if not trained:
        return missing(title, NO_TRAINED)
    newest = max(at for at, _ in trained)
    counted = Counter((at, at - stale) for at, stale in trained if at > newest - last)
    cells = [(at, made, float(count)) for (at, made), count in counted.items()]
    return heat_map(
        title,
        Axis("version that trained", WHOLE, zero=False),
        Axis("oldest version that generated", WHOLE),
        cells,
        Axis("groups", WHOLE),
    )


def waits(metrics: pa.Table) -> Chart:
    """Where the time of a step goes: the learner's own work, and its wait for groups. Below it, how
    long the generators waited for the bound on staleness."""
    title = "The learner's time of each step"
    work = points(metrics, "step", "time/step_s")
    if not work:
        return missing(title, NO_STEP)
    waited = points(metrics, "step", "time/learner_waited_s")
    held = points(metrics, "step", "time/generators_waited_s")
    if not waited and not held:
        return curves(title, STEP, SECONDS, {"learner works": work})
    return under_one_another(
        stacked(title, STEP, SECONDS, {"learner works": work, "learner waits for groups": waited}),
        curves(
            "Time in which the generators waited for the learner",
            STEP,
            SECONDS,
            {"generators wait": held},
            height=80,
        ),
    )


def publication(metrics: pa.Table) -> Chart:
    """Seconds of the parts of each version's publication. With several replicas, those of the last
    one."""
    title = "Publication of each version"
    series = {
        "gather": points(metrics, "gather", "weights/gather_s", "version"),
        "fetch, while generation goes on": points(metrics, "push", "weights/fetch_s", "version"),
        "pause of generation": points(metrics, "push", "weights/pause_s", "version"),
        "apply": points(metrics, "push", "weights/apply_s", "version"),
    }
    if not any(series.values()):
        return missing(title, "No version is published yet.")
    return curves(title, VERSION, SECONDS, series)


def throughput(metrics: pa.Table) -> Chart:
    """Tokens per second that the generators make and that the learner trains."""
    made = points(metrics, "step", "rollout/generated_tokens_per_s")
    trained = points(metrics, "step", "tokens_per_s")
    drawn = [
        curves(title, STEP, Axis("tokens per second", ",.3~s"), {title: found}, height=110)
        for title, found in (
            ("Generated tokens per second", made),
            ("Trained tokens per second of the learner's own time", trained),
        )
        if found
    ]
    return under_one_another(*drawn) if drawn else missing("Tokens per second", NO_STEP)


def memory(metrics: pa.Table) -> Chart:
    """Resident memory of the run's parts, and the share of the driver's machine that is in use."""
    title = "Resident memory of the largest process of each part"
    parts = {
        "learner rank": "memory/learner_bytes",
        "replica with its engine": "memory/replica_bytes",
        "driver": "memory/driver_bytes",
        "learner rank, on its GPU": "memory/learner_gpu_bytes",
    }
    series = {
        name: [(at, value / 1e9) for at, value in found]
        for name, metric in parts.items()
        if (found := points(metrics, "step", metric))
    }
    if not series:
        return missing(title, "No memory is recorded: this run has no step yet, or is older.")
    above = curves(title, STEP, Axis("GB"), series)
    used = points(metrics, "step", "memory/node_ratio")
    if not used:
        return above
    below = "Memory of the driver's machine that is in use"
    return under_one_another(above, curves(below, STEP, SHARE, {below: used}, height=80))


def _trained(outcomes: pa.Table, at: str) -> list[tuple[int, int]]:
    """(step or version, staleness) of each trained group."""
    rows = outcomes.select(["outcome", at, "staleness"]).to_pylist()
    return [(row[at], row["staleness"]) for row in rows if row["outcome"] == "trained"]
