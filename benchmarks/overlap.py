"""Measures an asynchronous step as a multiple of the slower side's time, within one run.

    python -m benchmarks.overlap [--section.field value …]

First generation is measured with an idle learner, then training on the recorded groups with
generation paused, and then both together. In all three measurements, generator processes are pinned
to one core and learner processes to another. All other processes are unpinned.

Settings make one side the slower one, such as `--generator.max_num_seqs 32`, or `--learner.packing
none`.
"""

import asyncio
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil

from asyncrl.config import Config, ConfigError, load_config
from asyncrl.contracts import State
from asyncrl.control import Coordinator, Parts, Schedule, Staleness
from asyncrl.observe import descendants, process_name
from asyncrl.preflight import make_plan
from asyncrl.run import AcrossAttempts, concurrency_of, launch_stations
from asyncrl.rundir import RunDirectory
from asyncrl.testing import FakeRecorder
from jobs.quickstart.task import make_inputs

CONFIG = Path(__file__).parent / "overlap.yaml"
GENERATORS, LEARNERS = ("ray::ServeReplica", "VLLM::"), ("ray::RankProcess",)
STEPS, ALONE_STEPS, WARM_UP_STEPS = 32, 15, 3
LEAST_OF_IDEAL = 0.9
"""The ideal is the slower side alone."""


def main(overrides: list[str]) -> int:
    """Run the benchmark and return its exit code."""
    try:
        return overlap(load_config(CONFIG, overrides))
    except ConfigError as error:
        print(f"overlap: {error}", file=sys.stderr)
        return 2


def overlap(config: Config) -> int:
    """Measure and print. The exit code is 0 if the bar is met."""
    if len(os.sched_getaffinity(0)) < 2:
        print(
            "overlap: needs two cores, one for generators and one for the learner; only one is"
            " available",
            file=sys.stderr,
        )
        return 2
    make_inputs(config)
    config = free_name(config)
    plan = make_plan(config)
    with RunDirectory(config) as directory:
        return asyncio.run(_overlap(config, directory, plan))


async def _overlap(config, directory, plan) -> int:
    async def nothing(learner) -> None:
        return None

    across = AcrossAttempts()
    async with (
        across.attempt(config, directory.state, directory.logs, lambda: 0),
        launch_stations(config, directory, plan.prompts, plan.context, nothing, across) as stations,
    ):
        pinned = pin()
        print(f"pinned: {', '.join(f'{name} to core {core}' for name, core in pinned.items())}")
        manifest = await stations.learner.gather(0)
        await stations.weights.push(manifest)
        stations.rollouts.committed(0)
        recorded, generation_s = await generate_alone(config, stations)
        training_s = await train_alone(config, stations, recorded)
        together_s, records, cpu = await _together(
            config, stations, directory.state, frontier=len(recorded)
        )
    larger, smaller = max(generation_s, training_s), min(generation_s, training_s)
    print(f"generation alone   {generation_s:6.2f} s a step")
    print(
        f"training alone     {training_s:6.2f} s a step   (the smaller side takes"
        f" {smaller / larger:.2f} of the larger)"
    )
    print(
        f"one after the other{generation_s + training_s:6.2f} s a step   ="
        f" {(generation_s + training_s) / larger:.2f} x the larger"
    )
    print(
        f"asynchronous       {together_s:6.2f} s a step   = {together_s / larger:.2f} x the larger"
        f" and {larger / together_s:.2f} of the ideal speed (bar {LEAST_OF_IDEAL:g}), over"
        f" {len(records)} steps"
    )
    staleness = statistics.mean(record["staleness/mean"] for record in records)
    gathers = statistics.mean(record["time/learner_waited_s"] for record in records)
    print(f"mean staleness {staleness:.2f}; the learner waited {gathers:.2f} s a step for groups")
    calls, own = (
        statistics.mean(record[name] for record in records) for name in ("time/step_s", "step_s")
    )
    print(f"a call of the learner took {calls:.2f} s, {own:.2f} of them in the learner's process")
    print("CPU seconds a step, spinning included, by process:")
    for name, seconds in sorted(cpu.items(), key=lambda item: -item[1])[:12]:
        print(f"  {name:<36}{seconds / len(records):6.2f}")
    return 0 if larger >= LEAST_OF_IDEAL * together_s else 1


def pin() -> dict[str, int]:
    """Pin every thread of generators to the first available core, and of learners to the second.
    Returns process name → core."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    pinned = {}
    for process in descendants(psutil.Process()):
        name = process_name(process)
        for names, core in ((GENERATORS, cores[0]), (LEARNERS, cores[-1])):
            if name.startswith(names):
                for thread in Path(f"/proc/{process.pid}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), {core})
                pinned[name] = core
    return pinned


async def generate_alone(config, stations) -> tuple[list, float]:
    """Scored groups of ALONE_STEPS steps, and seconds per step. As many groups are outstanding as
    in training."""
    wanted = ALONE_STEPS * config.groups_per_step
    room = asyncio.Semaphore(config.max_outstanding)
    scored, arrivals = [], []

    async def rollouts() -> None:
        async with asyncio.TaskGroup() as groups:
            for _ in range(wanted):
                await room.acquire()
                groups.create_task(stations.rollouts.rollout(await stations.prompts.next(), 0))

    making = asyncio.create_task(rollouts())
    making.add_done_callback(
        lambda task: task.exception() and stations.scores.fail(task.exception())
    )
    while len(scored) < wanted:
        arrived = await stations.scores.next()
        await stations.rollouts.ack([group.ordinal for group in arrived])
        for group in arrived:
            room.release()
            arrivals.append(time.monotonic())
            scored.append(group)
    await making
    return scored, _seconds_per_step(arrivals, config.groups_per_step)


def _seconds_per_step(times: list[float], groups: int) -> float:
    """Seconds per `groups` arrivals, from the last arrival of the warm-up to the last of all.
    Groups arrive in waves, so both ends are at the same place of a wave."""
    skipped = WARM_UP_STEPS * groups
    return (times[-1] - times[skipped - 1]) / (len(times) - skipped) * groups


async def train_alone(config, stations, recorded) -> float:
    """Median seconds of a step on recorded groups, without the warm-up steps."""
    groups, seconds = config.groups_per_step, []
    for at in range(0, len(recorded), groups):
        began = time.monotonic()
        await stations.learner.step(recorded[at : at + groups])
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds[WARM_UP_STEPS:])


async def _together(config, stations, state, frontier: int) -> tuple[float, list, dict[str, float]]:
    """Seconds per step of the shipped coordinator, its step records, and CPU seconds by process."""
    parts = timed_parts(config, stations)
    recorder = parts.recorder
    schedule = Schedule(
        WARM_UP_STEPS + STEPS, Staleness(config.staleness.max_staleness, config.groups_per_step)
    )
    before = cpu_seconds()
    began = time.monotonic()
    await Coordinator(
        parts, schedule, State(state.run_id, state.attempt, 0, 0, frontier, (), state.seed)
    ).run()
    scale = (recorder.times[-1] - recorder.times[WARM_UP_STEPS - 1]) / (time.monotonic() - began)
    cpu = {
        name: scale * (seconds - before.get(name, 0.0)) for name, seconds in cpu_seconds().items()
    }
    records = [metrics for event, step, _, metrics in recorder.records if event == "step"][
        WARM_UP_STEPS:
    ]
    return (recorder.times[-1] - recorder.times[WARM_UP_STEPS - 1]) / STEPS, records, cpu


class TimedRecorder(FakeRecorder):
    """Also keeps the time of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def record(self, event, step, version, metrics) -> None:
        super().record(event, step, version, metrics)
        if event == "step":
            self.times.append(time.monotonic())


def timed_parts(config, stations) -> Parts:
    """The parts of a coordinator that only trains, with a TimedRecorder."""
    return Parts(
        stations.prompts,
        stations.rollouts,
        stations.scores,
        stations.learner,
        stations.weights,
        TimedRecorder(),
        concurrency=concurrency_of(config, stations.kv_cache_tokens),
    )


def cpu_seconds() -> dict[str, float]:
    """User and system seconds of this process and its descendants, by name."""
    found: dict[str, float] = defaultdict(float)
    for process in descendants(psutil.Process()):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        found[process_name(process)] += times.user + times.system
    return found


def free_name(config: Config) -> Config:
    number = 1
    while config.run_directory.exists():
        number += 1
        config = config.model_copy(update={"name": f"overlap-{number}"})
    return config


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
