"""DPO on a model's own completions, end to end, with controls.

    python -m jobs.dpo [--seeds 0,1,2] [--section.field value …]

For each seed: SFT makes a model that solves about half of the prompts. A run with learning rate 0
samples and scores eight completions of each prompt. DPO then trains the best against the worst of
each group. The controls train the same groups with rewards shuffled within each group, and with
the shorter completion as the better one. Finished runs are read, not repeated.
"""

import argparse
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.config import load_offline
from asyncrl.rundir import open_run
from jobs.runs import finished
from jobs.sft.__main__ import CONFIG as SFT
from jobs.sft.__main__ import inputs

HERE = Path(__file__).parent
DPO, SAMPLES = HERE / "dpo.yaml", HERE / "samples.yaml"
START_STEPS = 190
"""SFT steps after which the start model solves about half of the prompts."""
CONTROLS = ("shuffled", "length_only")
Rewards = Callable[[list[float], list[int], random.Random], list[float]]


def main() -> int:
    """Run what is missing, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", default="0")
    known, overrides = parser.parse_known_args()
    lines = [f"{'run':<24}{'sampled accuracy':>22}{'greedy accuracy':>22}"]
    for seed in map(int, known.seeds.split(",")):
        folder, runs = inputs(seed), load_offline(DPO).run_directory.parent
        start, samples = runs / f"dpo-start-{seed}", runs / f"dpo-samples-{seed}"
        data = ["--seed", str(seed), "--data.train", str(folder / "train.parquet")]
        held_out = ["--eval.data", str(folder / "held_out.parquet")]
        model = ["--model.path", str(folder / "model"), "--max_steps", str(START_STEPS)]
        code = finished("sft", SFT, start, [*data, *held_out, *model])
        sampling = [*data, *held_out, "--model.path", str(start / "hf")]
        code = code or finished("train", SAMPLES, samples, sampling)
        if code:
            return code
        for kind in ("rewards", *CONTROLS):
            run = runs / f"dpo-{kind}-{seed}"
            arguments = ["--seed", str(seed), "--model.path", str(start / "hf")]
            arguments += ["--data.train", groups_for(samples, kind, seed)]
            # Shuffled rewards and equal lengths may choose two equal completions.
            arguments += ["--data.malformed", "drop", *overrides]
            if code := finished("dpo", DPO, run, arguments):
                return code
            lines.append(_line(run, samples, sampling))
    print("\n" + "\n".join(lines))
    return 0


def groups_for(samples: Path, kind: str, seed: int) -> str:
    """The recorded groups, with other rewards for a control."""
    if kind == "rewards":
        return str(samples / "groups" / "*.parquet")
    target = samples / f"groups-{kind}.parquet"
    if not target.exists():
        drawn = random.Random(seed)
        table = open_run(samples).groups()
        rewards = [
            CHANGED[kind](group["reward"], list(map(len, group["completion_ids"])), drawn)
            for group in table.select(["reward", "completion_ids"]).to_pylist()
        ]
        place = table.schema.get_field_index("reward")
        column = pa.array(rewards, table.schema.field("reward").type)
        pq.write_table(table.set_column(place, table.schema.field("reward"), column), target)
    return str(target)


def _shuffled(rewards: list[float], lengths: list[int], drawn: random.Random) -> list[float]:
    return drawn.sample(rewards, len(rewards))


def _shorter_is_better(
    rewards: list[float], lengths: list[int], drawn: random.Random
) -> list[float]:
    return [-float(length) for length in lengths]


CHANGED: dict[str, Rewards] = {"shuffled": _shuffled, "length_only": _shorter_is_better}


def _line(run: Path, samples: Path, sampling: list[str]) -> str:
    before = open_run(samples).records("evaluation")[0]
    found = []
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        after = _accuracy(run, temperature, sampling)
        found.append(f"{before[f'eval/{name}_accuracy']:.1%} → {after:.1%}")
    return f"{run.name:<24}{found[0]:>22}{found[1]:>22}"


def _accuracy(run: Path, temperature: float, sampling: list[str]) -> float:
    """Accuracy of the run's model on the held-out prompts, in a fresh engine."""
    known = run / f"accuracy_{temperature:g}.txt"
    if not known.exists():
        model = sampling.index("--model.path")
        others = [*sampling[:model], *sampling[model + 2 :]]
        command = [sys.executable, "-m", "jobs.accuracy", str(SAMPLES), str(run / "hf")]
        command += ["--temperature", str(temperature), *others]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        known.write_text(done.stdout)
    return float(known.read_text())


if __name__ == "__main__":
    sys.exit(main())
