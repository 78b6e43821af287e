"""The start model of the jobs that improve a model: SFT until it solves about half of a task."""

from pathlib import Path

from asyncrl.config import load_offline
from asyncrl.rundir import open_run
from jobs.runs import finish

ENOUGH = 0.54
"""Greedy accuracy on the held-out prompts from which a model is a start model."""
MORE_STEPS = 20
"""SFT steps that each further try has more."""
TRIES = 20


def start_model(name: str, config: Path, model: Path, task: Path, *, seed: int, steps: int) -> Path:
    """The first model of `steps`, `steps` + 20, … SFT steps that is accurate enough.

    Seeds learn at different speeds, so a fixed number of steps would give each another start. Each
    try is a run of its own, `NAME-SEED-STEPS`, with the whole learning rate schedule.

    Args:
        name: Start of the runs' names.
        config: An SFT config.
        model: The model before SFT.
        task: Directory with train.parquet and held_out.parquet.
        seed: Seed of the runs.
        steps: SFT steps of the first try.

    Raises:
        SystemExit: A run failed, or no try was accurate enough.
    """
    runs = load_offline(config).run_directory.parent
    data = ["--seed", str(seed), "--model.path", str(model)]
    data += ["--data.train", str(task / "train.parquet")]
    data += ["--eval.data", str(task / "held_out.parquet")]
    for more in range(TRIES):
        tried = steps + more * MORE_STEPS
        run = runs / f"{name}-{seed}-{tried}"
        finish("sft", config, run, [*data, "--max_steps", str(tried)])
        *_, last = open_run(run).records("evaluation")
        if last["eval/exact_match"] >= ENOUGH:
            return run / "hf"
    raise SystemExit(f"{run.name} solves less than {ENOUGH:.0%} of {task}; begin with more steps")
