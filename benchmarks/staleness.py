"""Compares the seconds of a step at several staleness bounds with the ideal, within one run.

    python -m benchmarks.staleness [--bounds 0,1,2,4,8] [--rounds 3] [--plot FILE]
        [--section.field value …]

The ideal is the time of the slower side alone: generation with an idle learner, or training on
recorded groups with idle generators. The bounds take turns, and each has the median of its
rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from pathlib import Path

from asyncrl.config import Config, ConfigError, load_config
from asyncrl.contracts import State
from asyncrl.control import Coordinator, Schedule, Staleness
from asyncrl.preflight import make_plan
from asyncrl.run import AcrossAttempts, launch_stations
from asyncrl.rundir import RunDirectory
from benchmarks.overlap import (
    TimedRecorder,
    free_name,
    generate_alone,
    timed_parts,
    train_alone,
)
from jobs.quickstart.task import make_inputs

CONFIG = Path(__file__).parent / "placements.yaml"
STEPS, WARM_UP_STEPS = 16, 3


def main(arguments: list[str]) -> int:
    """Run the benchmark and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", allow_abbrev=False)
    parser.add_argument("--bounds", default="0,1,2,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    options, overrides = parser.parse_known_args(arguments)
    bounds = [int(bound) for bound in options.bounds.split(",")]
    try:
        given = [f"--staleness.max_staleness={max(bounds)}", *overrides]
        config = load_config(CONFIG, given)
        make_inputs(config)
        config = free_name(config)
        plan = make_plan(config)
        with RunDirectory(config) as directory:
            speeds = asyncio.run(_measure(config, directory, plan, bounds, options.rounds))
    except ConfigError as error:
        print(f"staleness: {error}", file=sys.stderr)
        return 2
    if options.plot is not None:
        from benchmarks.plots import Axes, draw_lines

        axes = Axes("Speed by staleness bound", "max_staleness, versions", "speed, ideal = 1")
        draw_lines(options.plot, axes, {"measured": list(speeds.items())}, ("ideal", 1.0))
    return 0


async def _measure(config, directory, plan, bounds: list[int], rounds: int) -> dict[float, float]:
    """Measure and print. Returns the speed of each bound, as a share of the ideal."""

    async def nothing(learner) -> None:
        return None

    across = AcrossAttempts()
    seconds: dict[int, list[float]] = {bound: [] for bound in bounds}
    found: dict[int, list[float]] = {bound: [] for bound in bounds}
    in_flight: dict[int, list[float]] = {bound: [] for bound in bounds}
    async with (
        across.attempt(config, directory.state, directory.logs, lambda: 0),
        launch_stations(config, directory, plan.prompts, plan.context, nothing, across) as stations,
    ):
        manifest = await stations.learner.gather(0)
        await stations.weights.push(manifest)
        stations.rollouts.committed(0)
        recorded, generation_s = await generate_alone(config, stations)
        training_s = await train_alone(config, stations, recorded)
        version = 0
        for _ in range(rounds):
            for bound in bounds:
                recorder = await _turn(config, stations, directory.state, bound, version)
                version += warm_up(bound) + STEPS
                times = recorder.times[warm_up(bound) - 1 :]
                seconds[bound].append((times[-1] - times[0]) / STEPS)
                found[bound] += _staleness(recorder, bound)
                in_flight[bound] += _in_flight(recorder)
    ideal = max(generation_s, training_s)
    print(f"generation alone {generation_s:.3f} s a step, training alone {training_s:.3f}")
    for bound, measured in seconds.items():
        spread = (max(measured) - min(measured)) / statistics.median(measured)
        print(
            f"max_staleness {bound}: {statistics.median(measured):.3f} s a step, the ideal is"
            f" {ideal / statistics.median(measured):.2f} of it; spread {spread:.2f}; mean staleness"
            f" {statistics.mean(found[bound]):.2f}; {statistics.mean(in_flight[bound]):.0f}"
            " completions in flight at an update",
            flush=True,
        )
    return {
        float(bound): ideal / statistics.median(measured) for bound, measured in seconds.items()
    }


def warm_up(bound: int) -> int:
    """Steps until a full pipeline. At first, generators may be `bound` steps ahead."""
    return WARM_UP_STEPS + bound


async def _turn(config: Config, stations, state: State, bound: int, version: int) -> TimedRecorder:
    parts = timed_parts(config, stations)
    schedule = Schedule(version + warm_up(bound) + STEPS, Staleness(bound, config.groups_per_step))
    start = State(state.run_id, state.attempt, version, version, 0, (), state.seed)
    await Coordinator(parts, schedule, start).run()
    recorder: TimedRecorder = parts.recorder
    return recorder


def _staleness(recorder: TimedRecorder, bound: int) -> list[float]:
    steps = [metrics for event, _, _, metrics in recorder.records if event == "step"]
    return [metrics["staleness/mean"] for metrics in steps[warm_up(bound) :]]


def _in_flight(recorder: TimedRecorder) -> list[float]:
    """Unfinished completions at each update of the turn."""
    return [
        metrics["weights/in_flight"] for event, _, _, metrics in recorder.records if event == "push"
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
