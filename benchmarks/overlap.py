"""How much of the slower side's time an asynchronous step takes, as a ratio of one run's own
measurements.

    python -m benchmarks.overlap [--section.field value …]

Generation is measured with the learner idle, training on the groups so recorded with generation
paused, then both together. Generator processes are pinned to one core and learner processes to
another in all three measurements; everything else is unpinned.
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
from asyncrl.preflight import make_plan, ray_cluster
from asyncrl.run import concurrency_of, launch_stations
from asyncrl.rundir import RunDirectory
from asyncrl.testing import FakeRecorder
from jobs.quickstart.task import make_inputs

CONFIG = Path(__file__).parent / "overlap.yaml"
GENERATORS, LEARNERS = ("ray::ServeReplica", "VLLM::"), ("ray::RankProcess",)
STEPS, ALONE_STEPS, WARM_UP_STEPS = 32, 15, 3
BAR = 1.25


def main(overrides: list[str]) -> int:
    """Run the benchmark and return its exit code."""
    try:
        return overlap(load_config(CONFIG, overrides))
    except ConfigError as error:
        print(f"overlap: {error}", file=sys.stderr)
        return 2


def overlap(config: Config) -> int:
    """Measure, print, and say by the exit code whether the bar holds."""
    if len(os.sched_getaffinity(0)) < 2:
        print(
            "overlap: pins generators and learner to a core each, and this machine gives us one",
            file=sys.stderr,
        )
        return 2
    make_inputs(config)
    config = _free_name(config)
    plan = make_plan(config)
    with RunDirectory(config) as directory, ray_cluster(config):
        return asyncio.run(_overlap(config, directory, plan))


async def _overlap(config, directory, plan) -> int:
    async def nothing(learner) -> None:
        return None

    async with launch_stations(config, directory, plan.prompts, plan.context, nothing) as stations:
        pinned = pin()
        print(f"pinned: {', '.join(f'{name} to core {core}' for name, core in pinned.items())}")
        manifest = await stations.learner.gather(0)
        await stations.weights.push(manifest)
        stations.rollouts.committed(0)
        recorded, generation_s = await _generate_alone(config, stations)
        training_s = await _train_alone(config, stations, recorded)
        together_s, records, cpu = await _together(
            config, stations, directory.state, frontier=len(recorded)
        )
    larger, smaller = max(generation_s, training_s), min(generation_s, training_s)
    print(f"generation alone   {generation_s:6.2f} s a step")
    print(
        f"training alone     {training_s:6.2f} s a step   (the smaller side takes"
        f" {smaller / larger:.2f} of the larger; at least 0.75 wanted)"
    )
    print(
        f"one after the other{generation_s + training_s:6.2f} s a step   ="
        f" {(generation_s + training_s) / larger:.2f} x the larger"
    )
    print(
        f"asynchronous       {together_s:6.2f} s a step   = {together_s / larger:.2f} x the larger"
        f" (bar {BAR:g}), over {len(records)} steps"
    )
    staleness = statistics.mean(record["staleness/mean"] for record in records)
    gathers = statistics.mean(record["time/learner_waited_s"] for record in records)
    print(
        f"staleness {staleness:.2f} in the mean; the learner waited {gathers:.2f} s a step for"
        " groups"
    )
    print("CPU seconds a step, spinning included, by process:")
    for name, seconds in sorted(cpu.items(), key=lambda item: -item[1])[:12]:
        print(f"  {name:<36}{seconds / len(records):6.2f}")
    return 0 if together_s <= BAR * larger and smaller >= 0.75 * larger else 1


def pin() -> dict[str, int]:
    """Every thread of generators on the first core that is ours, of learners on the second."""
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


async def _generate_alone(config, stations) -> tuple[list, float]:
    """Scored groups of some steps, and seconds per step: as many groups outstanding as in
    training."""
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
    """From the last arrival of the warm-up to the last of all, per `groups` arrivals: groups come
    in waves, so an interval ends where it began in one."""
    skipped = WARM_UP_STEPS * groups
    return (times[-1] - times[skipped - 1]) / (len(times) - skipped) * groups


async def _train_alone(config, stations, recorded) -> float:
    """Median seconds of a step on recorded groups, the first ones left out."""
    groups, seconds = config.groups_per_step, []
    for at in range(0, len(recorded), groups):
        began = time.monotonic()
        await stations.learner.step(recorded[at : at + groups])
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds[WARM_UP_STEPS:])


async def _together(config, stations, state, frontier: int) -> tuple[float, list, dict[str, float]]:
    """Seconds per step of the shipped coordinator, its step records, and CPU seconds by process."""

    class Recorder(FakeRecorder):
        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def record(self, event, step, version, metrics) -> None:
            super().record(event, step, version, metrics)
            if event == "step":
                self.times.append(time.monotonic())

    recorder = Recorder()
    parts = Parts(
        stations.prompts,
        stations.rollouts,
        stations.scores,
        stations.learner,
        stations.weights,
        recorder,
    )
    parts.concurrency = concurrency_of(config, stations.kv_cache_tokens)
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


def _free_name(config: Config) -> Config:
    number = 1
    while config.run_directory.exists():
        number += 1
        config = config.model_copy(update={"name": f"overlap-{number}"})
    return config


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
