"""The quickstart with three seeds, and once with its rewards shuffled over each step's batch, which must learn nothing. Prints one table.

    python jobs/seeds.py [--section.field value …]

Each run's model, data order, sampling and split of the data have its seed; runs that are finished already are read, not repeated.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from asyncrl.config import load_config
from asyncrl.reading import open_run

CONFIG = ROOT / "jobs" / "quickstart.yaml"
RUNS = {f"seed-{seed}": ["--seed", str(seed)] for seed in (0, 1, 2)} | {"shuffled-0": ["--seed", "0", "--reward.shuffle", "true"]}


def main(overrides: list[str]) -> int:
    """Run what is missing, then print. The exit code is that of the first run that fails."""
    for name, arguments in RUNS.items():
        command = [*arguments, *_inputs(arguments[1]), "--name", name, "--resume", "auto", *overrides]
        directory = load_config(CONFIG, command).run_directory
        if not (directory / "hf").exists():
            code = subprocess.run([sys.executable, str(ROOT / "jobs" / "quickstart.py"), *command]).returncode
            if code:
                return code
    print(f"\n{'run':<12}{'greedy before → after':>24}{'sampled before → after':>26}{'staleness':>20}")
    for name in RUNS:
        print(_row(name, overrides))
    return 0


def _inputs(seed: str) -> list[str]:
    """Every seed has a model and a split of its own."""
    folder = f"{{runs_root}}/quickstart-inputs{'' if seed == '0' else '-' + seed}"
    train, held_out = f"{folder}/train.parquet", f"{folder}/held_out.parquet"
    return ["--model.path", f"{folder}/model", "--data.train", train, "--warm_start.data", train, "--eval.data", held_out]


def _row(name: str, overrides: list[str]) -> str:
    run = open_run(load_config(CONFIG, ["--name", name, *overrides]).run_directory)
    evaluations = run.records("evaluation")
    greedy, sampled = ([evaluation[f"eval/{kind}_accuracy"] for evaluation in (evaluations[0], evaluations[-1])] for kind in ("greedy", "sampled"))
    staleness = [fate["staleness"] for fate in run.fates().to_pylist() if fate["outcome"] == "trained"]
    mean = sum(staleness) / len(staleness)
    return f"{name:<12}{f'{greedy[0]:.1%} → {greedy[1]:.1%}':>24}{f'{sampled[0]:.1%} → {sampled[1]:.1%}':>26}{f'mean {mean:.2f}, max {max(staleness)}':>20}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
