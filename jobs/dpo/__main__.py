"""DPO on a model's own completions, end to end, with controls.

    python -m jobs.dpo [--seeds 0,1,2] [--runs rewards,shuffled,…] [--section.field value …]

For each seed: SFT makes a model that solves about half of the prompts. A run with learning rate 0
samples and scores eight completions of each prompt. DPO then trains the best against the worst of
each group, and KTO the same completions as single rows with labels. The controls of both train the
same groups with rewards shuffled within each group, and with the shorter completion as the better
one. Finished runs are read, not repeated.
"""

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.config import load_offline
from asyncrl.rundir import open_run
from jobs.runs import finish, job_parser
from jobs.sft.__main__ import CONFIG as SFT, inputs
from jobs.start import start_model

HERE = Path(__file__).parent
DPO, SAMPLES = HERE / "dpo.yaml", HERE / "samples.yaml"
START_STEPS = 190
"""SFT steps of the first try of a start model."""
CONTROLS = ("shuffled", "length_only")
KINDS = ("rewards", *CONTROLS, "kto", *(f"kto-{control}" for control in CONTROLS))
KTO = ["--objective.loss", "kto", "--batch_size", "128"]  # two rows are one pair of the others
Rewards = Callable[[list[float], list[int], random.Random], list[float]]


def main() -> int:
    """Run what is missing, print a table, and return the exit code."""
    parser = job_parser(main.__doc__, KINDS)
    known, overrides = parser.parse_known_args()
    lines = [f"{'run':<24}{'sampled accuracy':>22}{'greedy accuracy':>22}"]
    for seed in known.seeds:
        start, samples = start_of(seed), samples_of(seed)
        for kind in known.runs:
            run = samples.parent / f"dpo-{kind}-{seed}"
            arguments = ["--seed", str(seed), "--model.path", str(start)]
            rewards = kind.removeprefix("kto").removeprefix("-") or "rewards"
            arguments += ["--data.train", groups_for(samples, rewards, seed)]
            arguments += KTO if kind.startswith("kto") else []
            # Shuffled rewards and equal lengths may choose two equal completions.
            arguments += ["--data.malformed", "drop", *overrides]
            finish("dpo", DPO, run, arguments)
            lines.append(_line(run, samples, seed))
    print("\n" + "\n".join(lines))
    return 0


def start_of(seed: int) -> Path:
    """The seed's start model on sums, which is made if it is missing."""
    task = inputs(seed)
    return start_model("start", SFT, task / "model", task, seed=seed, steps=START_STEPS)


def samples_of(seed: int) -> Path:
    """The run that sampled and scored completions of the start model. Makes what is missing."""
    samples = load_offline(DPO).run_directory.parent / f"dpo-samples-{seed}"
    finish("train", SAMPLES, samples, ["--model.path", str(start_of(seed)), *data_of(seed)])
    return samples


def data_of(seed: int) -> list[str]:
    """Arguments of a run on the seed's prompts."""
    data = ["--seed", str(seed), "--data.train", str(inputs(seed) / "train.parquet")]
    return [*data, "--eval.data", str(inputs(seed) / "held_out.parquet")]


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


def _line(run: Path, samples: Path, seed: int) -> str:
    before = open_run(samples).records("evaluation")[0]
    found = []
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        after = _accuracy(run, temperature, seed)
        found.append(f"{before[f'eval/{name}_accuracy']:.1%} → {after:.1%}")
    return f"{run.name:<24}{found[0]:>22}{found[1]:>22}"


def _accuracy(run: Path, temperature: float, seed: int) -> float:
    """Accuracy of the run's model on the held-out prompts, in a fresh engine."""
    known = run / f"accuracy_{temperature:g}.txt"
    if not known.exists():
        command = [sys.executable, "-m", "jobs.accuracy", str(SAMPLES), str(run / "hf")]
        command += ["--temperature", str(temperature), *data_of(seed)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        known.write_text(done.stdout)
    return float(known.read_text())


if __name__ == "__main__":
    sys.exit(main())
