"""Runs the job with three seeds, its controls, and other ways to train. Prints one table.

    python -m jobs.smollm.seeds [RUN …] [--section.field value …]

RUN is one of RUNS, and all without one. A run's seed applies to its data order and its sampling.
The controls must gain little: `shuffled` permutes the rewards over each step's batch, and `length`
rewards the number of words alone. Finished runs are read, not repeated.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.config import Config, ConfigError
from asyncrl.rundir import Run, open_run
from jobs.seeds import evaluated, finished, trained_staleness

HERE = Path(__file__).parent
LEAST_GAIN, MOST_BY_CHANCE = 0.20, 0.10
SYNCHRONOUS = ["--staleness.max_staleness", "0"]
LENGTH = ["--reward.functions.strict.weight", "0"]
LENGTH += ["--reward.functions.length.function", "jobs.smollm.task:length"]
RUNS = {
    "seed-0": ["--seed", "0"],
    "seed-1": ["--seed", "1"],
    "seed-2": ["--seed", "2"],
    "shuffled": ["--reward.shuffle", "true"],
    "length": LENGTH,
    "synchronous": SYNCHRONOUS,
    "lora": [],
}
CONTROLS = ("shuffled", "length")
METRICS = {
    "held out": "eval/greedy_accuracy",
    "held-out pairs": "eval/pairs_accuracy",
    "sampled": "eval/sampled_accuracy",
}


def main(arguments: list[str]) -> int:
    """Run what is missing, then print the finished runs. Returns 0 if every bar is met, 1 if one is
    missed, 2 for arguments that cannot be used, or else the exit code of a run that failed."""
    first = next((i for i, one in enumerate(arguments) if one.startswith("-")), len(arguments))
    names, overrides = arguments[:first] or [*RUNS], arguments[first:]
    if unknown := [name for name in names if name not in RUNS]:
        print(
            f"seeds: {', '.join(unknown)}: no such run; choose from {', '.join(RUNS)}",
            file=sys.stderr,
        )
        return 2
    runs: dict[str, Run] = {}
    code = 0
    for name in names:
        try:
            runs[name] = open_run(_run(name, overrides).run_directory)
        except ConfigError as error:
            print(f"seeds: {error}", file=sys.stderr)
            code = 2
            break
        except subprocess.CalledProcessError as error:
            code = error.returncode
            break
    missed = [name for name, run in runs.items() if not _met(name, run)]
    if runs:
        _print_table(runs, missed)
    return code or (1 if missed else 0)


def _print_table(runs: Mapping[str, Run], missed: Sequence[str]) -> None:
    print(
        f"\n{'run':<12}" + "".join(f"{title:>20}" for title in (*METRICS, "staleness", "minutes"))
    )
    print("\n".join(_row(name, run) for name, run in runs.items()))
    print(
        f"bars: {100 * LEAST_GAIN:.0f} points gained on held-out prompts, and more than before on"
        f" held-out pairs; controls at most {100 * MOST_BY_CHANCE:.0f} points"
    )
    print(f"missed by {', '.join(missed)}" if missed else "all bars met")


def _run(name: str, overrides: list[str]) -> Config:
    """The config of a finished run. Runs the job if it is not finished."""
    job = "lora" if name == "lora" else "smollm"
    command = [*RUNS[name], "--name", f"smollm-{name}", *overrides]
    return finished(["jobs.smollm", job], HERE / f"{job}.yaml", command)


def _met(name: str, run: Run) -> bool:
    """Whether a run meets its bars."""
    gain, of_pairs = (
        after - before
        for before, after in (
            evaluated(run, METRICS[one]) for one in ("held out", "held-out pairs")
        )
    )
    if name in CONTROLS:
        return gain <= MOST_BY_CHANCE
    return gain >= LEAST_GAIN and of_pairs > 0


def _row(name: str, run: Run) -> str:
    staleness = trained_staleness(run)
    times = [record["time"] for record in run.records()]
    cells = [
        f"{before:.1%} → {after:.1%}"
        for before, after in (evaluated(run, one) for one in METRICS.values())
    ]
    cells += [
        f"mean {sum(staleness) / len(staleness):.2f}, max {max(staleness)}",
        f"{(times[-1] - times[0]) / 60:.0f}",
    ]
    return f"{name:<12}" + "".join(f"{cell:>20}" for cell in cells)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
