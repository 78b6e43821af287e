"""Runs the quickstart with three seeds, and once with rewards shuffled over each step's batch,
which must learn nothing. Prints one table.

    python -m jobs.quickstart.seeds [--section.field value …]

A run's seed applies to its model, data order, sampling and data split. Finished runs are read, not
repeated.
"""

import subprocess
import sys
from pathlib import Path

from asyncrl.config import Config, ConfigError
from asyncrl.rundir import open_run
from jobs.seeds import evaluated, finished, trained_staleness

CONFIG = Path(__file__).parent / "quickstart.yaml"
LEAST_AFTER, LEAST_GAIN, MOST_BY_CHANCE = 0.92, 0.20, 0.05
RUNS = {f"seed-{seed}": ["--seed", str(seed)] for seed in (0, 1, 2)} | {
    "shuffled-0": ["--seed", "0", "--reward.shuffle", "true"]
}


def main(overrides: list[str]) -> int:
    """Run what is missing, then print. Returns 0 if every bar is met, 1 if one is missed, or else
    the exit code of a run that failed."""
    rows, missed = [], []
    for name, arguments in RUNS.items():
        command = [*arguments, *_inputs(arguments[1]), "--name", name, *overrides]
        try:
            config = finished(["jobs.quickstart"], CONFIG, command)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        except subprocess.CalledProcessError as error:
            return error.returncode
        row, greedy = _row(name, config)
        rows.append(row)
        gain = greedy[1] - greedy[0]
        held = (
            gain <= MOST_BY_CHANCE
            if config.reward.shuffle
            else greedy[1] >= LEAST_AFTER and gain >= LEAST_GAIN
        )
        missed += [] if held else [name]
    print(
        f"\n{'run':<12}{'greedy before → after':>24}{'sampled before → after':>26}{'staleness':>20}"
    )
    print("\n".join(rows))
    print(
        f"bars: {LEAST_AFTER:.0%} after and {100 * LEAST_GAIN:.0f} points gained; with shuffled"
        f" rewards at most {100 * MOST_BY_CHANCE:.0f} points"
    )
    print(f"missed by {', '.join(missed)}" if missed else "all bars met")
    return 1 if missed else 0


def _inputs(seed: str) -> list[str]:
    """Overrides that give each seed its own model and data split."""
    folder = f"{{runs_root}}/quickstart-inputs{'' if seed == '0' else '-' + seed}"
    train, held_out = f"{folder}/train.parquet", f"{folder}/held_out.parquet"
    return [
        "--model.path",
        f"{folder}/model",
        "--data.train",
        train,
        "--warm_start.data",
        train,
        "--eval.data",
        held_out,
    ]


def _row(name: str, config: Config) -> tuple[str, tuple[float, float]]:
    """The run's line, and its greedy accuracies before and after."""
    run = open_run(config.run_directory)
    greedy, sampled = (evaluated(run, f"eval/{kind}_accuracy") for kind in ("greedy", "sampled"))
    staleness = trained_staleness(run)
    mean = sum(staleness) / len(staleness)
    gains = [f"{before:.1%} → {after:.1%}" for before, after in (greedy, sampled)]
    stale = f"mean {mean:.2f}, max {max(staleness)}"
    return f"{name:<12}{gains[0]:>24}{gains[1]:>26}{stale:>20}", greedy


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
