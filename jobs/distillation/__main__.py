"""On-policy distillation, end to end, with controls.

    python -m jobs.distillation [--seeds 0,1,2] [--teacher DIRECTORY] [--section.field value …]

The teacher is the model of `python -m jobs.quickstart`, which is run first if it is missing. For
each seed, SFT makes a student that solves about half of the prompts. The student then learns from
the teacher's log-probs of its own completions. The control learns from its own initial weights, and
must stay where it is. The first accuracy of a line is that of the untrained student. Finished runs
are read, not repeated.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from asyncrl.config import load_offline
from asyncrl.rundir import open_run
from jobs.runs import finished, module
from jobs.sft.__main__ import CONFIG as SFT
from jobs.sft.__main__ import inputs

CONFIG = Path(__file__).parent / "distillation.yaml"
START_STEPS = 190
"""SFT steps of the student, after which it solves about half of the prompts."""


def main() -> int:
    """Run what is missing, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--teacher", type=Path, default=None)
    known, overrides = parser.parse_known_args()
    runs = load_offline(SFT).run_directory.parent
    teacher = known.teacher or runs / "quickstart" / "hf"
    if not teacher.exists() and (code := module("jobs.quickstart")):
        return code
    lines = [f"{'run':<28}{'sampled accuracy':>20}{'greedy accuracy':>20}{'of the teacher':>17}"]
    for seed in map(int, known.seeds.split(",")):
        folder, student = inputs(seed), runs / f"distillation-student-{seed}"
        data = ["--seed", str(seed), "--data.train", str(folder / "train.parquet")]
        data += ["--eval.data", str(folder / "held_out.parquet")]
        model = ["--model.path", str(folder / "model"), "--max_steps", str(START_STEPS)]
        if code := finished("sft", SFT, student, [*data, *model]):
            return code
        best = _teacher_accuracy(teacher, runs / f"distillation-teacher-{seed}.txt", data)
        lines.append(f"{'teacher':<28}{'':>20}{best:>20.1%}")
        for kind, scores in (("teacher", teacher), ("own-weights", student / "hf")):
            run = runs / f"distillation-{kind}-{seed}"
            arguments = [*data, "--model.path", str(student / "hf")]
            arguments += ["--algorithm.distillation.teacher", str(scores), *overrides]
            if code := finished("train", CONFIG, run, arguments):
                return code
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
