"""Compares what a model learns under `staleness.on_stale: mask` with what it learns under `wait`.

    python -m benchmarks.stale_learning [--seeds 0,1,2] [--policies wait,mask]
        [--section.field value …]

The task is in `benchmarks.countdown`: its completions are long-tailed, and the first part of a long
one needs what no short one teaches. All runs begin with one warm start, which is made first, and
take the same number of steps. A seed fixes the order of the prompts and the sampling. Finished runs
are read, not repeated.

The tables have, for each run, and as the mean of the seeds with its spread (highest minus lowest):

- the share of the trained groups' tokens that were masked, seconds of a step, and their ratio to
  those of `wait` with the same seed;
- the held-out reward before and after, sampled: of all prompts, of the quarters with the shortest
  and the longest answers, and of the first and last parts of the longest quarter;
- the reward of the trained groups by quarter of the steps, and that of their first parts.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from asyncrl.config import Config, ConfigError, load_config, load_offline
from asyncrl.rundir import Run, open_run
from jobs.runs import finish, module

HERE = Path(__file__).parent
CONFIG, WARM_START = HERE / "stale_learning.yaml", HERE / "stale_learning_sft.yaml"
POLICIES = ("wait", "mask")
QUARTERS = (1, 2, 3, 4)
SKIPPED = 5
"""First steps, whose time does not count."""
HELD_OUT = {
    "all": "eval/all_letters_right",
    "short": "eval/short_letters_right",
    "long": "eval/long_letters_right",
    "long, first": "eval/long_letters_right/first_part",
    "long, last": "eval/long_letters_right/last_part",
}
"""Column → metric."""
CURVES = {"reward": "reward/mean", "first parts": "reward/letters_right/first_part"}
Figures: TypeAlias = Mapping[str, float]
"""Column → figure of a run."""


def main(arguments: list[str]) -> int:
    """Run what is missing, print the tables, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stale_learning", allow_abbrev=False)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--policies", default=",".join(POLICIES))
    options, overrides = parser.parse_known_args(arguments)
    found: dict[str, dict[int, Figures]] = {policy: {} for policy in options.policies.split(",")}
    try:
        warm_start()
        for seed in map(int, options.seeds.split(",")):
            for policy, of_policy in found.items():
                of_policy[seed] = figures(trained(policy, seed, overrides))
    except ConfigError as error:
        print(f"stale_learning: {error}", file=sys.stderr)
        return 2
    print("\n" + "\n".join(tables(found)))
    return 0


def warm_start() -> None:
    """Make the inputs and the model that every run begins with, unless they exist."""
    config = load_offline(WARM_START, [])
    inputs = Path(config.model.path).parent
    if not (inputs / "long.parquet").exists():
        module("benchmarks.countdown", str(inputs))
    finish("sft", WARM_START, config.run_directory, [])


def trained(policy: str, seed: int, overrides: Sequence[str]) -> Run:
    """The run of this policy and seed, which is made unless it is finished.

    Raises:
        ConfigError: the finished run has other settings.
    """
    arguments = ["--seed", str(seed), "--staleness.on_stale", policy, *overrides]
    wanted = load_config(CONFIG, [*arguments, "--name", f"stale-learning-{policy}-{seed}"])
    finish("train", CONFIG, wanted.run_directory, arguments)
    run = open_run(wanted.run_directory)
    if _deciding(run.config) != _deciding(wanted):
        raise ConfigError(
            f"{wanted.run_directory} was made with other settings; remove it, or set another"
            " runs_root"
        )
    return run


def _deciding(config: Config) -> dict[str, Any]:
    """The settings that decide what a run gives."""
    return config.model_dump(exclude={"resume"})


def figures(run: Run) -> Figures:
    """The figures of a finished run."""
    steps = [record for record in run.records("step") if record["applied"]]
    first, *_, last = run.records("evaluation")
    times = [record["time"] for record in steps[SKIPPED:]]
    tokens = [record["tokens"] for record in steps]
    shares = [record.get("stale/masked_ratio", 0.0) for record in steps]
    found = {
        "steps": float(len(steps)),
        "masked": masked_share(tokens, shares),
        "s/step": (times[-1] - times[0]) / (len(times) - 1),
    }
    for column, metric in HELD_OUT.items():
        found[f"{column}, before"], found[column] = first[metric], last[metric]
    for column, metric in CURVES.items():
        curve = by_quarter([step.get(metric) for step in steps])
        found |= {f"{column} {quarter}": of for quarter, of in zip(QUARTERS, curve, strict=True)}
    return found


def masked_share(kept: Sequence[float], shares: Sequence[float]) -> float:
    """Share of all tokens that were masked, from each step's kept tokens and its masked share."""
    whole = [tokens / (1 - share) for tokens, share in zip(kept, shares, strict=True)]
    return 1 - sum(kept) / sum(whole)


def by_quarter(values: Sequence[float | None]) -> list[float]:
    """Means of the quarters of a run, without None: a step may have no long completion. NaN where
    a quarter has no value."""
    edges = [len(values) * quarter // len(QUARTERS) for quarter in (0, *QUARTERS)]
    found = [[of for of in values[start:end] if of is not None] for start, end in pairwise(edges)]
    return [fmean(of) if of else math.nan for of in found]


def tables(found: Mapping[str, Mapping[int, Figures]]) -> Iterator[str]:
    """The lines of both tables.

    Args:
        found: policy → seed → figures.
    """
    rows = [
        (policy, label, row)
        for policy, by_seed in found.items()
        for label, row in rows_of(by_seed, found.get("wait", {}))
    ]
    yield f"{'':<13}{'steps':>6}{'masked':>8}{'s/step':>8}{'of wait':>8}" + "".join(
        f"{column:>16}" for column in HELD_OUT
    )
    for policy, label, row in rows:
        held_out = "".join(f"{row[f'{c}, before']:8.3f} → {row[c]:.3f}" for c in HELD_OUT)
        yield (
            f"{policy:<5}{label:<8}{row['steps']:6.0f}{row['masked']:8.1%}{row['s/step']:8.2f}"
            f"{row['of wait']:8.2f}{held_out}"
        )
    columns = [f"{column} {quarter}" for column in CURVES for quarter in QUARTERS]
    yield ""
    yield f"{'':<13}" + "".join(f"{column:>15}" for column in columns)
    for policy, label, row in rows:
        yield f"{policy:<5}{label:<8}" + "".join(f"{row[column]:15.3f}" for column in columns)


def rows_of(
    by_seed: Mapping[int, Figures], wait: Mapping[int, Figures]
) -> list[tuple[str, Figures]]:
    """A row for each seed, with its time relative to `wait`, and the mean and spread of them."""
    rows: list[tuple[str, Figures]] = []
    for seed, row in by_seed.items():
        ratio = row["s/step"] / wait[seed]["s/step"] if seed in wait else math.nan
        rows.append((f"seed {seed}", {**row, "of wait": ratio}))
    values = {name: [row[name] for _, row in rows] for name in rows[0][1]}
    mean = {name: fmean(of) for name, of in values.items()}
    return [*rows, ("mean", mean), ("spread", {n: max(of) - min(of) for n, of in values.items()})]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
