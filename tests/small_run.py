"""Writes a small run directory with the package's own writers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.outcomes import Outcome
from asyncrl.contracts.rows import (
    TRAINED_COLUMNS,
    Completion,
    Group,
    Prompt,
    Trajectory,
    VersionSpan,
)
from asyncrl.learning.trained_files import TrainedFiles
from asyncrl.rundir.metrics import MetricsWriter
from asyncrl.rundir.outcomes import OutcomesWriter

CONFIG = {
    "name": "small",
    "max_steps": 6,
    "model": {"path": "model"},
    "data": {"train": "train.parquet", "max_prompt_length": 16},
    "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_completion_length": 8},
    "reward": {
        "functions": {
            "exact": {"function": "rewards:exact"},
            "scorer": {"function": "rewards:scorer", "weight": 0.0},
        }
    },
}


def small_group(ordinal: int, version: int, attempt: int = 0) -> Group:
    """A group of two trajectories. The first is right. The second begins at `version` and ends one
    version later."""
    prompt = Prompt(ordinal, 0, f"{ordinal} + 1 =", (5, 6, 7), {"answer": str(ordinal + 1)})
    whole = Completion(
        (8, 2), (-0.1, -0.2), (VersionSpan(version, 0, 2),), "stop", str(ordinal + 1)
    )
    crossed = Completion(
        (9, 9, 2),
        (-0.3, -0.4, -0.5),
        (VersionSpan(version, 0, 1), VersionSpan(version + 1, 1, 3)),
        "stop",
        "99",
    )
    trajectories = (
        Trajectory(
            whole, (1, 1), reward=1.0, reward_parts={"exact": 1.0, "scorer": 1.0}, advantage=1.0
        ),
        Trajectory(
            crossed,
            (1, 1, 1),
            reward=0.0,
            reward_parts={"exact": 0.0, "scorer": 0.25},
            advantage=-1.0,
        ),
    )
    return Group(
        attempt,
        prompt,
        trajectories,
        "replica-1",
        10.0 + ordinal,
        11.0 + ordinal,
        scored_at=12.0 + ordinal,
        admitted_at=9.5 + ordinal,
        generated=((10.1 + ordinal, 10.4 + ordinal), (10.2 + ordinal, 11.0 + ordinal)),
    )


def trained_rows(groups: Sequence[Group], version: int) -> pa.Table:
    """What the learner computed at each token: 0.1 nats more than the generator, and the last token
    of each completion is clipped."""
    rows = [
        {
            "attempt": group.attempt,
            "ordinal": group.ordinal,
            "index": index,
            "version": version,
            "positions": None,
            "logprobs": [0.1 + value for value in one.completion.logprobs],
            "weights": [1.25] * len(one.loss_mask),
            "advantages": [one.advantage] * len(one.loss_mask),
            "clipped": [False] * (len(one.loss_mask) - 1) + [True],
            "masked": [False] * len(one.loss_mask),
        }
        for group in groups
        for index, one in enumerate(group.trajectories)
    ]
    return pa.Table.from_pylist(rows, pa.schema([*TRAINED_COLUMNS.items()]).remove(3))


def write_small_run(directory: Path, steps: int = 6) -> Path:
    """Write steps of two groups each, generated one version before they are trained. One more group
    is dropped, and one is waiting."""
    (directory / "groups").mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    outcomes, noise = OutcomesWriter(directory / "outcomes", attempt=0), random.Random(0)
    trained = TrainedFiles(directory, attempt=0, rank=0)
    with MetricsWriter(directory) as metrics:
        metrics.write("evaluation", 0, 0, {"eval/accuracy": 0.5, "eval/greedy_accuracy": 0.5})
        for step in range(1, steps + 1):
            born = max(0, step - 2)
            groups = [small_group(2 * step + place, born) for place in range(2)]
            pq.write_table(
                groups_to_table(groups), directory / "groups" / f"attempt_0-{step:06d}.parquet"
            )
            trained.write(trained_rows(groups, step - 1))
            outcomes.write(
                [
                    Outcome(0, group.ordinal, "trained", "", step, step - 1, step - 1 - born)
                    for group in groups
                ]
            )
            values = {
                "reward/mean": 0.5 + 0.05 * step + noise.uniform(-0.02, 0.02),
                "reward/exact": 0.5,
                "staleness/mean": float(step - 1 - born),
                "staleness/max": step - 1 - born,
                "time/started_at": 14.0 + 2 * step,
                "time/step_s": 0.5,
            }
            applied = {"weights/paused_at": 10.5 + 2 * step, "weights/applied_at": 10.6 + 2 * step}
            push = {"replica": "replica-1", "weights/pause_s": 0.2, **applied}
            metrics.write("push", step, step - 1, push)
            metrics.write("step", step, step, values)
            metrics.write("commit", step, step, {"weights/replicas": 1})
        pq.write_table(
            groups_to_table([small_group(100, 3), small_group(101, 3)]),
            directory / "groups" / "attempt_0-000099.parquet",
        )
        outcomes.write([Outcome(0, 100, "dropped", "stale", steps)])
        outcomes.flush()
        trained.flush()
        metrics.write(
            "evaluation", steps, steps, {"eval/accuracy": 0.9, "eval/greedy_accuracy": 0.9}
        )
    return directory
