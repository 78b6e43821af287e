"""Compares the seconds of a step when generators and learner take turns with those when they work
at the same time, on the same cores, within one run.

    python -m benchmarks.placements [--section.field value …]

Each workload starts the parts twice: with one thread for each side, and with as many as there are
cores. Within a start, the placements alternate in blocks of steps, and a ratio compares blocks next
to each other.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import Config, ConfigError, load_config
from asyncrl.contracts import State
from asyncrl.control import Coordinator, Schedule, Staleness
from asyncrl.preflight import make_plan
from asyncrl.run import AcrossAttempts, launch_stations
from asyncrl.rundir import RunDirectory
from benchmarks.overlap import TimedRecorder, free_name, timed_parts
from jobs.quickstart.task import make_inputs

CONFIG = Path(__file__).parent / "placements.yaml"
BLOCKS, STEPS, WARM_UP_STEPS = 4, 12, 3


@dataclass(frozen=True)
class Workload:
    """The completions of a step."""

    name: str
    settings: tuple[str, ...]


WORKLOADS = (
    Workload("short answers, at most 6 tokens", ()),
    Workload(
        "64 tokens each",
        ("--rollout.max_completion_length", "64", "--rollout.ignore_eos", "true"),
    ),
    # The model ends a completion with about the same probability after every token.
    Workload("long tail, at most 240 tokens", ("--rollout.max_completion_length", "240")),
)


@dataclass(frozen=True)
class Mode:
    """One way to use the devices."""

    name: str
    max_staleness: int
    colocate: bool


ASYNCHRONOUS = Mode("at the same time, staleness 2", 2, colocate=False)
SYNCHRONOUS = Mode("at the same time, staleness 0", 0, colocate=False)
TURNS = Mode("in turns (colocate), staleness 0", 0, colocate=True)
MODES = (ASYNCHRONOUS, SYNCHRONOUS, TURNS)


def main(overrides: list[str]) -> int:
    """Run the benchmark and return its exit code."""
    try:
        for workload in WORKLOADS:
            print(f"\n{workload.name}", flush=True)
            for threads in sorted({1, len(os.sched_getaffinity(0))}):
                counts = [f"--{side}.num_threads={threads}" for side in ("generator", "learner")]
                config = load_config(CONFIG, [*workload.settings, *counts, *overrides])
                make_inputs(config)
                seconds, tokens = measure(free_name(config))
                report(seconds, tokens, threads)
    except ConfigError as error:
        print(f"placements: {error}", file=sys.stderr)
        return 2
    return 0


def measure(config: Config) -> tuple[dict[Mode, list[float]], float]:
    """Mode → seconds per step of each block, and tokens per step."""
    plan = make_plan(config)
    with RunDirectory(config) as directory:
        return asyncio.run(_measure(config, directory, plan))


async def _measure(config, directory, plan) -> tuple[dict[Mode, list[float]], float]:
    async def nothing(learner) -> None:
        return None

    across = AcrossAttempts()
    seconds: dict[Mode, list[float]] = {mode: [] for mode in MODES}
    tokens = []
    async with (
        across.attempt(config, directory.state, directory.logs, lambda: 0),
        launch_stations(config, directory, plan.prompts, plan.context, nothing, across) as stations,
    ):
        version = 0
        for _ in range(BLOCKS):
            for mode in MODES:
                recorder = await _block(config, stations, directory.state, mode, version)
                version += WARM_UP_STEPS + STEPS
                seconds[mode].append(
                    (recorder.times[-1] - recorder.times[WARM_UP_STEPS - 1]) / STEPS
                )
                tokens += [
                    metrics["tokens"]
                    for event, _, _, metrics in recorder.records
                    if event == "step"
                ]
    return seconds, statistics.mean(tokens)


async def _block(config: Config, stations, state: State, mode: Mode, version: int) -> TimedRecorder:
    """Train WARM_UP_STEPS + STEPS steps from this version with the shipped coordinator."""
    parts = timed_parts(config, stations)
    schedule = Schedule(
        version + WARM_UP_STEPS + STEPS,
        Staleness(mode.max_staleness, config.groups_per_step),
        colocate=mode.colocate,
    )
    start = State(state.run_id, state.attempt, version, version, 0, (), state.seed)
    await Coordinator(parts, schedule, start).run()
    return parts.recorder


def report(seconds: dict[Mode, list[float]], tokens: float, threads: int) -> None:
    """Print each mode's median, and its ratio to ASYNCHRONOUS."""
    print(f"  threads of each side: {threads}; {tokens:.0f} trained tokens a step")
    for mode, measured in seconds.items():
        ratios = [mine / first for mine, first in zip(measured, seconds[ASYNCHRONOUS], strict=True)]
        print(
            f"    {mode.name:<34}{statistics.median(measured):7.3f} s a step, "
            f"{statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f}) x"
            f" {ASYNCHRONOUS.name}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
