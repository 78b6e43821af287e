"""Draws what generators and learner did over time, from the records of runs.

    python -m benchmarks.timeline OUT.svg RUN_DIRECTORY [RUN_DIRECTORY …]

The picture of docs/how_to/placements.md shows runs of benchmarks/placements.yaml:

    for placement in decoupled share colocate; do asyncrl train benchmarks/placements.yaml \\
        --placement $placement --name $placement --max_steps 30 \\
        --rollout.max_completion_length 64 --rollout.ignore_eos true; done
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from asyncrl.rundir import open_run

SKIPPED_STEPS, SHOWN_STEPS = 10, 6
COLORS = {"generation": "#4878a8", "steps": "#d1783a", "publishing": "#6a9f58"}


@dataclass(frozen=True)
class Timeline:
    """Spans of a run in seconds (start, length), from the first shown step on."""

    title: str
    length: float
    groups: list[tuple[float, float]]
    steps: list[tuple[float, float]]
    publishing: list[tuple[float, float]]


def timeline(directory: Path) -> Timeline:
    """The spans of a run, from its step SKIPPED_STEPS on. `length` is the time of SHOWN_STEPS."""
    run = open_run(directory)
    steps = run.records("step")[SKIPPED_STEPS:]
    begin, end = steps[0]["time"], steps[SHOWN_STEPS]["time"]
    groups = [
        (row["started_at"] - begin, row["finished_at"] - row["started_at"])
        for row in run.groups().to_pylist()
        if begin < row["finished_at"] and row["started_at"] < end
    ]
    gathered = {record["version"]: record["time"] for record in run.records("gather")}
    committed = {record["version"]: record["time"] for record in run.records("commit")}
    config = run.config
    return Timeline(
        f"placement: {config.placement}, max_staleness: {config.staleness.max_staleness}",
        end - begin,
        groups,
        [(step["time"] - begin - step["time/step_s"], step["time/step_s"]) for step in steps],
        [
            (gathered[version] - begin, committed[version] - gathered[version])
            for version in committed
            if version in gathered
        ],
    )


def draw(timelines: Sequence[Timeline], out: Path) -> None:
    """Write the picture: for each run, the groups in generation, the steps and the publishing."""
    figure, axes = plt.subplots(
        len(timelines), 1, figsize=(9, 2.3 * len(timelines)), sharex=True, squeeze=False
    )
    length = min(run.length for run in timelines)
    for axis, run in zip(axes[:, 0], timelines, strict=True):
        edges = sorted(
            [(start, 1) for start, _ in run.groups]
            + [(start + seconds, -1) for start, seconds in run.groups]
        )
        times, counts, running = [0.0], [0], 0
        for at, change in edges:
            running += change
            times.append(at)
            counts.append(running)
        top = max(count for at, count in zip(times, counts, strict=True) if 0 <= at <= length)
        heights = [2.2 + 0.8 * count / top for count in counts]
        axis.fill_between(times, 2.2, heights, step="post", color=COLORS["generation"])
        axis.broken_barh(run.steps, (1.2, 0.8), facecolors=COLORS["steps"])
        axis.broken_barh(run.publishing, (0.2, 0.8), facecolors=COLORS["publishing"])
        axis.set_yticks(
            [0.6, 1.6, 2.6], ["publishing", "steps", f"groups generated\n(up to {top})"]
        )
        axis.set_ylim(0, 3.2)
        axis.set_xlim(0, length)
        axis.set_title(run.title, loc="left", fontsize=10)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def main(arguments: list[str]) -> int:
    """Draw the runs and return the exit code."""
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    out, *directories = map(Path, arguments)
    draw([timeline(directory) for directory in directories], out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
