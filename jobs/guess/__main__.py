"""A small agent, end to end: makes a tiny model and its game, warm-starts it on a mediocre player's
games, and trains it by asynchronous RL over sessions of several turns.

    python -m jobs.guess [--section.field value …]

Settings are those of guess.yaml. The warm start is not repeated if its model exists.
"""

import subprocess
import sys
from pathlib import Path

from asyncrl.config import ConfigError, load_config, load_offline
from asyncrl.run import command_name, run_training
from asyncrl.rundir import open_run
from jobs.runs import finish

HERE = Path(__file__).parent
CONFIG, WARM_START = HERE / "guess.yaml", HERE / "sft.yaml"


def main(overrides: list[str]) -> int:
    """Run the job and return its exit code."""
    try:
        config = load_config(CONFIG, overrides)
        root = ["--runs_root", str(config.run_directory.parent)]
        warm_start = load_offline(WARM_START, root)
        inputs = Path(warm_start.model.path).parent
        if not (inputs / "held_out.parquet").exists():
            subprocess.run([sys.executable, "-m", "jobs.guess.task", str(inputs)], check=True)
        finish("sft", WARM_START, warm_start.run_directory, root)
        command = [command_name(), "train", str(CONFIG), *overrides]
        return run_training(config, command, after=lambda _, summary: _print(summary.directory))
    except ConfigError as error:
        print(f"guess: {error}", file=sys.stderr)
        return 2


def _print(directory: Path) -> None:
    evaluations = open_run(directory).records("evaluation")
    first, last = evaluations[0], evaluations[-1]
    print(
        f"won {first['eval/accuracy']:.1%} of the held-out games before RL, and"
        f" {last['eval/accuracy']:.1%} after it"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
