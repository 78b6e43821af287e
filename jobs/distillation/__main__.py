"""On-policy distillation, end to end, with controls.

    python -m jobs.distillation [--seeds 0,1,2] [--runs teacher,own-weights]
        [--teacher DIRECTORY] [--section.field value …]

The teacher is the model of `python -m jobs.quickstart`, which is run first if it is missing. For
each seed, SFT makes a student that solves about half of the prompts. The student then learns from
the teacher's log-probs of its own completions. The control learns from its own initial weights, and
must stay where it is. The first accuracy of a line is that of the untrained student. Finished runs
are read, not repeated.
"""

import subprocess
import sys
from pathlib import Path

from asyncrl.config import load_config
from asyncrl.rundir import open_run
from jobs.dpo.__main__ import data_of, start_of
from jobs.runs import finish, job_parser, module

CONFIG = Path(__file__).parent / "distillation.yaml"
KINDS = ("teacher", "own-weights")


def main() -> int:
    """Run what is missing, print a table, and return the exit code."""
    parser = job_parser(main.__doc__, KINDS)
    parser.add_argument("--teacher", type=Path, default=None)
    known, overrides = parser.parse_known_args()
    runs = load_config(CONFIG).run_directory.parent
    teacher = known.teacher or runs / "quickstart" / "hf"
    if not teacher.exists():
        module("jobs.quickstart")
    lines = [f"{'run':<28}{'sampled accuracy':>20}{'greedy accuracy':>20}{'of the teacher':>17}"]
    for seed in known.seeds:
        data, student = data_of(seed), start_of(seed)
        best = _teacher_accuracy(teacher, runs / f"distillation-teacher-{seed}.txt", data)
        lines.append(f"{'teacher':<28}{'':>20}{best:>20.1%}")
        for kind in known.runs:
            run = runs / f"distillation-{kind}-{seed}"
            scores = teacher if kind == "teacher" else student
            arguments = [*data, "--model.path", str(student)]
            arguments += ["--algorithm.distillation.teacher", str(scores), *overrides]
            finish("train", CONFIG, run, arguments)
            lines.append(_line(run, best))
    print("\n" + "\n".join(lines))
    return 0


def _teacher_accuracy(teacher: Path, known: Path, data: list[str]) -> float:
    """Greedy accuracy of the teacher on the held-out prompts, in a fresh engine."""
    if not known.exists():
        command = [sys.executable, "-m", "jobs.accuracy", str(CONFIG), str(teacher), *data]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        known.write_text(done.stdout)
    return float(known.read_text())


def _line(run: Path, best: float) -> str:
    evaluations = open_run(run).records("evaluation")
    first, last = evaluations[0], evaluations[-1]
    found = [
        f"{first[f'eval/{name}_accuracy']:.1%} → {last[f'eval/{name}_accuracy']:.1%}"
        for name in ("sampled", "greedy")
    ]
    share = last["eval/greedy_accuracy"] / best if best else 0.0
    return f"{run.name:<28}{found[0]:>20}{found[1]:>20}{share:>17.0%}"


if __name__ == "__main__":
    sys.exit(main())
