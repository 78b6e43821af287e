"""SFT, end to end: makes a tiny model and its task, trains on the answers, and compares the model
with three controls.

    python -m jobs.sft [--seeds 0,1,2] [--runs answers,…] [--section.field value …]

The controls are the untrained model, answers shuffled between the prompts, and random digits of the
same length. Finished runs are read, not repeated.
"""

import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.config import OfflineConfig, load_config, load_offline
from asyncrl.rundir import open_run
from jobs.quickstart.task import make_inputs
from jobs.runs import finish, job_parser

CONFIG = Path(__file__).parent / "sft.yaml"
TASK = Path(__file__).parents[1] / "quickstart" / "quickstart.yaml"
KINDS = ("answers", "shuffled", "length_only")


def main() -> int:
    """Run what is missing, print a table, and return the exit code."""
    parser = job_parser(main.__doc__, KINDS)
    known, overrides = parser.parse_known_args()
    rows = [f"{'run':<24}{'held-out loss':>20}{'exact match':>20}"]
    for seed in known.seeds:
        for kind in known.runs:
            config = load_offline(CONFIG, [*_arguments(seed, kind), *overrides])
            finish("sft", CONFIG, config.run_directory, [*_arguments(seed, kind), *overrides])
            rows.append(_row(config))
    print("\n" + "\n".join(rows))
    return 0


def inputs(seed: int) -> Path:
    """Folder of the seed's model and data, which is made if it is missing."""
    folder = f"{{runs_root}}/quickstart-inputs{'' if seed == 0 else f'-{seed}'}"
    arguments = ["--seed", str(seed), "--model.path", f"{folder}/model"]
    arguments += ["--data.train", f"{folder}/train.parquet"]
    arguments += ["--eval.data", f"{folder}/held_out.parquet"]
    arguments += ["--warm_start.data", f"{folder}/train.parquet"]
    config = load_config(TASK, arguments)
    make_inputs(config)
    return Path(config.model.path).parent


def _arguments(seed: int, kind: str) -> list[str]:
    folder = inputs(seed)
    train = folder / ("train.parquet" if kind == "answers" else f"train-{kind}.parquet")
    if not train.exists():
        _make_control(folder / "train.parquet", train, kind, seed)
    return [
        *("--seed", str(seed), "--name", f"sft-{kind}-{seed}"),
        *("--model.path", str(folder / "model"), "--data.train", str(train)),
        *("--eval.data", str(folder / "held_out.parquet")),
    ]


def _make_control(source: Path, target: Path, kind: str, seed: int) -> None:
    """The same prompts with answers of other prompts, or with random digits of the same length."""
    table = pq.read_table(source)
    answers, drawn = table["answer"].to_pylist(), random.Random(seed)
    if kind == "shuffled":
        drawn.shuffle(answers)
    else:
        answers = ["".join(drawn.choices("0123456789", k=len(answer))) for answer in answers]
    place = table.schema.get_field_index("answer")
    pq.write_table(table.set_column(place, "answer", pa.array(answers)), target)


def _row(config: OfflineConfig) -> str:
    evaluations = open_run(config.run_directory).records("evaluation")
    first, last = evaluations[0], evaluations[-1]
    loss = f"{first['eval/loss']:.3f} → {last['eval/loss']:.3f}"
    match = f"{first['eval/exact_match']:.1%} → {last['eval/exact_match']:.1%}"
    return f"{config.name:<24}{loss:>20}{match:>20}"


if __name__ == "__main__":
    sys.exit(main())
