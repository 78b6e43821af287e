"""The main job, end to end: makes a tiny model and its task, warm-starts it, trains it by
asynchronous RL, evaluates it, and prints measurements.

    python -m jobs.quickstart [--section.field value …]

In addition to `asyncrl train jobs/quickstart/quickstart.yaml`, it makes the inputs, chooses a free
run name, and prints the measurements.
"""

import math
import os
import statistics
import sys
import time
from pathlib import Path

from asyncrl.config import Config, ConfigError, load_config
from asyncrl.observe import MemoryPeak, MemorySampler
from asyncrl.run import Summary, command_name, run_training
from asyncrl.rundir import open_run
from jobs.quickstart.task import make_inputs
from jobs.runs import module

CONFIG = Path(__file__).parent / "quickstart.yaml"
GIB = 1 << 30


def main(overrides: list[str]) -> int:
    """Run the quickstart and return its exit code."""
    asked = time.monotonic()
    try:
        config = _free_name(load_config(CONFIG, overrides))
        make_inputs(config)
        command = [command_name(), "train", os.path.relpath(CONFIG), *overrides]
        with MemorySampler() as memory:
            return run_training(
                config,
                command,
                after=lambda _, summary: finish(summary, memory.peak),
                asked=asked,
            )
    except ConfigError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2


def _free_name(config: Config) -> Config:
    """The config with the first free name of quickstart, quickstart-2, …; a resume keeps its
    name."""
    name, number = config.name, 1
    while config.resume == "never" and config.run_directory.exists():
        number += 1
        config = config.model_copy(update={"name": f"{name}-{number}"})
    return config


def finish(summary: Summary, memory: MemoryPeak) -> None:
    """Print the README's figures, and write the run's page."""
    print_measurements(summary, memory)
    print()
    module("asyncrl.cli", "report", str(summary.directory))


def print_measurements(summary: Summary, memory: MemoryPeak) -> None:
    """Print the README's figures, from the run directory and the memory sampler."""
    run = open_run(summary.directory)
    pushes = sorted(
        record["weights/pause_s"] for record in run.records("push") if record["version"] > 0
    )
    checks = run.records("logprob_check")
    startup = {
        name.removeprefix("startup/"): value
        for name, value in run.records("startup")[-1].items()
        if name.startswith("startup/") and not name.endswith("caches_removed")
    }
    trained = [outcome for outcome in run.outcomes().to_pylist() if outcome["outcome"] == "trained"]
    late = [outcome["staleness"] for outcome in trained if outcome["trained_at_version"] >= 3]
    steps = run.records("step")
    step_s = statistics.median(
        record["time/step_s"] + record["time/learner_waited_s"] for record in steps
    )
    print("\nmeasured")
    print(f"  wall time            {summary.seconds / 60:.1f} min")
    print(
        f"  memory, peak         {memory.total / GIB:.1f} GiB in {memory.processes} processes,"
        f" including {memory.shared / GIB:.2f} GiB of shared memory"
    )
    for name, size in list(memory.by_name.items())[:8]:
        print(f"    {name:<34}{size / GIB:6.2f} GiB")
    p95 = pushes[math.ceil(0.95 * len(pushes)) - 1]
    mean = f"mean {statistics.mean(late):.2f} after step 3, " if late else ""
    print(f"  staleness            {mean}max {max(outcome['staleness'] for outcome in trained)}")
    print(
        f"  update pause         median {statistics.median(pushes):.3f} s, p95 {p95:.3f} s, max"
        f" {pushes[-1]:.3f} s over {len(pushes)} updates; an update without weights"
        f" pauses {startup.pop('pause_empty_s'):.3f} s"
    )
    largest = max(record["check/logprob_max_diff"] for record in checks)
    print(
        f"  log-prob difference  at most {largest:.1e} over {len(checks)} checks of"
        f" {checks[0]['check/tokens']:.0f} tokens"
    )
    print(f"  step time            median {step_s:.2f} s, {len(steps)} steps")
    waited = (
        sum(r["time/learner_waited_s"] for r in steps),
        sum(r["time/generators_waited_s"] for r in steps),
    )
    print(
        f"  waited               learner {waited[0]:.0f} s for groups, generators {waited[1]:.0f} s"
        " for the learner"
    )
    print("  start-up seconds")
    for name, value in startup.items():
        print(f"    {name.removesuffix('_s').replace('_', ' '):<34}{value:6.1f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
