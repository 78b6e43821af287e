"""The main job, end to end: make a tiny model and its task, warm-start it, train it by asynchronous RL, evaluate, show what was measured.

    python jobs/quickstart.py [--section.field value …]

Everything it does beyond `asyncrl train jobs/quickstart.yaml` is to make the inputs, to choose a free run name, and to print the measurements.
"""

import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Before an installed package: in a submitted job the working directory's copy must be used everywhere.
sys.path.insert(0, str(ROOT))

from asyncrl.config import Config, ConfigError, load_config
from asyncrl.observe.memory import MemoryPeak, MemorySampler
from asyncrl.reading import open_run
from asyncrl.run import Summary, command_name, train

CONFIG = ROOT / "jobs" / "quickstart.yaml"
GIB = 1 << 30


def main(overrides: list[str]) -> int:
    """Run the quickstart and return its exit code."""
    try:
        config = _free_name(load_config(CONFIG, overrides))
        make_inputs(config)
        command = [command_name(), "train", os.path.relpath(CONFIG), *overrides]
        with MemorySampler() as memory:
            return train(
                config, command, after=lambda _, summary: print_measurements(summary, memory.peak)
            )
    except ConfigError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2


def _free_name(config: Config) -> Config:
    """The config under the first name that is not taken: quickstart, quickstart-2, …; a resume keeps its name."""
    name, number = config.name, 1
    while config.resume == "never" and config.run_directory.exists():
        number += 1
        config = config.model_copy(update={"name": f"{name}-{number}"})
    return config


def make_inputs(config: Config) -> None:
    """The model and data that the config names, unless they are there. In a process of its own: it needs torch, which the driver does not."""
    directory = Path(config.data.train).parent
    if (directory / "held_out.parquet").exists() and Path(config.model.path).exists():
        return
    command = [
        sys.executable,
        str(ROOT / "jobs" / "quickstart_task.py"),
        str(directory),
        "--seed",
        str(config.seed),
    ]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise ConfigError(
            f"the quickstart's inputs could not be made in {directory}:\n{made.stderr}"
        )
    print(made.stdout.strip().splitlines()[-1])


def print_measurements(summary: Summary, memory: MemoryPeak) -> None:
    """What the README's table shows, from the run directory and the memory sampler."""
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
    trained = [fate for fate in run.fates().to_pylist() if fate["outcome"] == "trained"]
    late = [fate["staleness"] for fate in trained if fate["trained_at_version"] >= 3]
    steps = run.records("step")
    step_s = statistics.median(
        record["time/step_s"] + record["time/learner_waited_s"] for record in steps
    )
    print("\nmeasured")
    print(f"  wall time            {summary.seconds / 60:.1f} min")
    print(
        f"  memory, peak         {memory.total / GIB:.1f} GiB in {memory.processes} processes, shared memory {memory.shared / GIB:.2f} GiB of it"
    )
    for name, size in list(memory.by_name.items())[:8]:
        print(f"    {name:<34}{size / GIB:6.2f} GiB")
    mean = f"mean {statistics.mean(late):.2f} after step 3, " if late else ""
    print(f"  staleness            {mean}max {max(fate['staleness'] for fate in trained)}")
    print(
        f"  update pause         median {statistics.median(pushes):.3f} s, p95 {pushes[int(0.95 * (len(pushes) - 1))]:.3f} s, max {pushes[-1]:.3f} s "
        f"over {len(pushes)} updates; of an empty update {startup.pop('pause_empty_s'):.3f} s"
    )
    largest = max(record["check/logprob_max_diff"] for record in checks)
    print(
        f"  log-prob difference  at most {largest:.1e} over {len(checks)} checks of {checks[0]['check/tokens']:.0f} tokens"
    )
    print(f"  step time            median {step_s:.2f} s, {len(steps)} steps")
    waited = (
        sum(r["time/learner_waited_s"] for r in steps),
        sum(r["time/generators_waited_s"] for r in steps),
    )
    print(
        f"  waited               learner {waited[0]:.0f} s for groups, generators {waited[1]:.0f} s for the learner"
    )
    print("  start-up seconds")
    for name, value in startup.items():
        print(f"    {name.removesuffix('_s').replace('_', ' '):<34}{value:6.1f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
