"""LoRA beside full training, in SFT and RL, on a second task.

    python -m jobs.lora [--seeds 0,1,2]

For each seed: SFT on sums makes the model that both start from. SFT then trains differences, with
all weights and with an adapter. RL starts from a model that solves about half of the differences,
and trains them the same two ways. The last column is the adapter's gain as a share of full
training's. Finished runs are read, not repeated.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import load_offline
from asyncrl.rundir import open_run
from jobs.quickstart.task import make_data
from jobs.sft.__main__ import CONFIG as SUMS
from jobs.sft.__main__ import inputs

HERE = Path(__file__).parent
SFT, RL = HERE / "sft.yaml", HERE / "rl.yaml"
START_STEPS = 60
"""SFT steps on differences after which the start model of RL solves about half of them."""
ADAPTER = ("--lora.r", "16", "--lora.alpha", "32")
SFT_RATE, RL_RATE = "5e-3", "4e-3"
"""Learning rates of the adapters. Full training has those of the YAML files."""


@dataclass(frozen=True)
class Step:
    """One run of the job."""

    command: str
    config: Path
    name: str
    model: Path
    task: Path
    """Directory with train.parquet and held_out.parquet."""
    options: Sequence[str] = ()


def main() -> int:
    """Run what is missing, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", default="0")
    lines = [f"{'run':<24}{'held-out accuracy':>22}{'share of the gain':>20}"]
    runs = load_offline(SFT).run_directory.parent
    for seed in map(int, parser.parse_args().seeds.split(",")):
        for step in _steps(runs, seed):
            if code := _run(step, runs, seed):
                return code
        for kind, metric in (("sft", "eval/exact_match"), ("rl", "eval/sampled_accuracy")):
            full, adapter = (runs / f"lora-{kind}-{of}-{seed}" for of in ("full", "adapter"))
            lines += _lines(full, adapter, metric)
    print("\n" + "\n".join(lines))
    return 0


def _steps(runs: Path, seed: int) -> list[Step]:
    """The runs of a seed, in order. Makes the inputs that are missing."""
    sums, differences = inputs(seed), runs / f"differences-inputs-{seed}"
    if not (differences / "held_out.parquet").exists():
        make_data(differences, seed, operator="-")
    first, start = f"sft-answers-{seed}", f"lora-start-{seed}"
    steps = [
        Step("sft", SUMS, first, sums / "model", sums),
        Step(
            *("sft", SFT, start, runs / first / "hf", differences),
            ("--max_steps", str(START_STEPS)),
        ),
    ]
    for kind, command, config, model, rate in (
        ("sft", "sft", SFT, first, SFT_RATE),
        ("rl", "train", RL, start, RL_RATE),
    ):
        adapter = (*ADAPTER, "--learner.learning_rate", rate)
        for of, options in (("full", ()), ("adapter", adapter)):
            name = f"lora-{kind}-{of}-{seed}"
            steps.append(Step(command, config, name, runs / model / "hf", differences, options))
    return steps


def _run(step: Step, runs: Path, seed: int) -> int:
    """Run a step, unless its run is finished. Returns the exit code."""
    if (runs / step.name / "hf").exists():
        return 0
    line = [sys.executable, "-m", "asyncrl.cli", step.command, str(step.config)]
    line += ["--name", step.name, "--seed", str(seed), "--model.path", str(step.model)]
    line += ["--data.train", str(step.task / "train.parquet"), "--resume", "auto"]
    line += ["--eval.data", str(step.task / "held_out.parquet"), *step.options]
    return subprocess.run(line).returncode


def _lines(full: Path, adapter: Path, metric: str) -> list[str]:
    """The table's lines of one pair of runs, whose last evaluations have this metric."""
    lines, gains = [], []
    for run in (full, adapter):
        evaluations = open_run(run).records("evaluation")
        before, after = evaluations[0][metric], evaluations[-1][metric]
        gains.append(after - before)
        share = f"{gains[-1] / gains[0]:.0%}" if run == adapter else ""
        lines.append(f"{run.name:<24}{f'{before:.1%} → {after:.1%}':>22}{share:>20}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
