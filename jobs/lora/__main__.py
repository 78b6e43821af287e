"""LoRA beside full training, in SFT and RL, on a second task.

    python -m jobs.lora [--seeds 0,1,2] [--runs sft,rl]

For each seed: SFT on sums makes the model that both start from. SFT then trains differences, with
all weights and with an adapter. RL starts from a model that solves about half of the differences,
and trains them the same two ways. The last column is the adapter's gain as a share of full
training's. Finished runs are read, not repeated.
"""

import sys
from pathlib import Path

from asyncrl.config import load_offline
from asyncrl.rundir import open_run
from jobs.dpo.__main__ import data_of
from jobs.quickstart.task import make_data
from jobs.runs import finish, job_parser
from jobs.sft.__main__ import CONFIG as SUMS, inputs
from jobs.start import start_model

HERE = Path(__file__).parent
SFT, RL = HERE / "sft.yaml", HERE / "rl.yaml"
START_STEPS = 100
"""SFT steps on differences of the first try of RL's start model."""
KINDS = ("sft", "rl")
ADAPTER = ("--lora.r", "16", "--lora.alpha", "32")
SFT_RATE, RL_RATE = "5e-3", "4e-3"
"""Learning rates of the adapters. Full training has those of the YAML files."""


def main() -> int:
    """Run what is missing, print a table, and return the exit code."""
    known = job_parser(main.__doc__, KINDS).parse_args()
    lines = [f"{'run':<24}{'held-out accuracy':>22}{'share of the gain':>20}"]
    runs = load_offline(SFT).run_directory.parent
    for seed in known.seeds:
        task, first = runs / f"differences-inputs-{seed}", runs / f"sft-answers-{seed}"
        if not (task / "held_out.parquet").exists():
            make_data(task, seed, operator="-")
        finish("sft", SUMS, first, ["--model.path", str(inputs(seed) / "model"), *data_of(seed)])
        data = ["--seed", str(seed), "--data.train", str(task / "train.parquet")]
        data += ["--eval.data", str(task / "held_out.parquet")]
        for kind in known.runs:
            full, adapter = (runs / f"lora-{kind}-{of}-{seed}" for of in ("full", "adapter"))
            if kind == "sft":
                command, config, model, rate = "sft", SFT, first / "hf", SFT_RATE
            else:
                command, config, rate = "train", RL, RL_RATE
                model = start_model(
                    "differences-start", SFT, first / "hf", task, seed=seed, steps=START_STEPS
                )
            common = [*data, "--model.path", str(model)]
            finish(command, config, full, common)
            finish(command, config, adapter, [*common, *ADAPTER, "--learner.learning_rate", rate])
            metric = "eval/exact_match" if kind == "sft" else "eval/sampled_accuracy"
            lines += _lines(full, adapter, metric)
    print("\n" + "\n".join(lines))
    return 0


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
