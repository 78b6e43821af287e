"""Asynchronous online DPO, end to end, with controls.

    python -m jobs.online_dpo [--seeds 0,1,2] [--runs stale,synchronous,…] [--section.field value …]

For each seed: SFT makes the start model, as in jobs.dpo. Online DPO then trains right completions
of each group against wrong ones, with `max_staleness` 2 and 0. The controls shuffle the rewards of
each step, and prefer shorter completions. Finished runs are read, not repeated.
"""

import sys
from pathlib import Path
from statistics import fmean

from asyncrl.config import load_config
from asyncrl.rundir import Run, open_run
from jobs.dpo.__main__ import data_of, start_of
from jobs.runs import finish, job_parser

CONFIG = Path(__file__).parent / "online_dpo.yaml"
EXACT = "--reward.functions.exact_match.weight"
KINDS: dict[str, list[str]] = {
    "stale": [],
    "synchronous": ["--staleness.max_staleness", "0"],
    "shuffled": ["--reward.shuffle", "true"],
    "length_only": [
        *(EXACT, "0"),
        *("--reward.functions.short.function", "jobs.online_dpo.rewards:shorter"),
        *("--reward.functions.short.weight", "1"),
        # After about 30 steps all completions have the same length, and no pair is left.
        *("--max_steps", "20"),
    ],
}


def main() -> int:
    """Run what is missing, print a table, and return the exit code."""
    parser = job_parser(main.__doc__, tuple(KINDS))
    known, overrides = parser.parse_known_args()
    lines = [f"{'run':<24}{'sampled':>18}{'greedy':>18}{'mean staleness':>16}"]
    runs = load_config(CONFIG).run_directory.parent
    for seed in known.seeds:
        start = ["--model.path", str(start_of(seed)), *data_of(seed)]
        for kind in known.runs:
            run = runs / f"online-dpo-{kind}-{seed}"
            finish("train", CONFIG, run, [*start, *KINDS[kind], *overrides])
            lines.append(_line(open_run(run)))
    print("\n" + "\n".join(lines))
    return 0


def _line(run: Run) -> str:
    first, *_, last = run.records("evaluation")
    figures = [
        f"{first[name]:.1%} → {last[name]:.1%}"
        for name in ("eval/sampled_exact_match", "eval/greedy_exact_match")
    ]
    trained = [
        outcome["staleness"]
        for outcome in run.outcomes().to_pylist()
        if outcome["outcome"] == "trained" and outcome["trained_at_version"] >= 3
    ]
    return f"{run.directory.name:<24}{figures[0]:>18}{figures[1]:>18}{fmean(trained):>16.2f}"


if __name__ == "__main__":
    sys.exit(main())
