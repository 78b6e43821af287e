"""Recorded groups, and the config of a learner that trains them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from asyncrl.config import Config
from asyncrl.contracts.group_table import groups_to_table, table_to_ipc
from asyncrl.contracts.messages import Scored
from asyncrl.contracts.rows import Completion, Group, Prompt, Trajectory, VersionSpan
from asyncrl.preflight.specs import learner_spec

VOCABULARY = 50


def learner_config(
    model_path: Path,
    world_size: int = 1,
    max_tokens: int = 128,
    algorithm: dict[str, Any] | None = None,
    **learner: Any,
) -> Config:
    """A config for `model_path`. Only the learner's part and `algorithm` matter."""
    tree: dict[str, Any] = {
        "name": "learner-test",
        "runs_root": str(Path(model_path).parent / "runs"),
        "max_steps": 10,
        "placement_timeout_s": 60,
        "model": {"path": str(model_path)},
        "data": {"train": "none.parquet", "max_prompt_length": 32},
        "rollout": {"max_completion_length": 32},
        "reward": {"functions": {"none": {"function": "none:none"}}},
        "weights": {"bucket_bytes": 20_000},
        "learner": {
            "world_size": world_size,
            "max_tokens_per_gpu": max_tokens,
            "learning_rate": 1e-2,
            "num_cpus": 0.25,
            **learner,
        },
    }
    return Config.model_validate(tree | ({"algorithm": algorithm} if algorithm else {}))


def recorded_group(ordinal: int, trajectories: int = 4, poison: bool = False) -> Group:
    """A scored group of random tokens, with log-probs near those of a nearly uniform policy. One
    trajectory is masked by its status."""
    generator = np.random.default_rng(ordinal)
    prompt = Prompt(
        ordinal,
        0,
        "p",
        tuple(int(token) for token in generator.integers(3, VOCABULARY, 2 + ordinal % 5)),
    )
    members = []
    for index in range(trajectories):
        length = int(generator.integers(1, 20))
        ids = tuple(int(token) for token in generator.integers(3, VOCABULARY, length))
        logprobs = tuple(float(value) for value in -4 + 0.3 * generator.standard_normal(length))
        if poison and index == 0:
            logprobs = (float("nan"), *logprobs[1:])
        mask = tuple(int(at % 7 != 3) for at in range(length))
        completion = Completion(ids, logprobs, (VersionSpan(0, 0, length),), "stop")
        usable = index != 3
        members.append(
            Trajectory(
                completion,
                mask,
                1.0,
                {},
                float(generator.standard_normal()) if usable else None,
                "ok" if usable else "over_long",
            )
        )
    return Group(1, prompt, tuple(members), "replica", 0.0, 1.0, 2.0)


def scored(group: Group) -> Scored:
    """The group as the learner gets it: a reference to its row in the object store."""
    return Scored(
        group.ordinal, 0, (ray.put(table_to_ipc(groups_to_table([group]))), 0), 10, (1.0,), {}, 3, 0
    )


def recorded_batch(step: int, groups: int = 8, poison: bool = False) -> list[Scored]:
    return [
        scored(recorded_group(step * groups + number, poison=poison and number == 0))
        for number in range(groups)
    ]


def state_without_model(config: Config) -> Any:
    """The state of rank 0 without an engine, for tests of code around the passes."""
    from asyncrl.learning.engine.state import LearnerState
    from asyncrl.learning.engine.threads import Threads

    return LearnerState(
        rank=0,
        spec=learner_spec(config),
        engine=None,
        sharded=None,
        table=None,
        parameters={},
        adapter={},
        packing="rows",
        own_metrics=(),
        device=torch.device("cpu"),
        learning_rate=1e-3,
        warmup_steps=0,
        threads=Threads(torch.get_num_threads()),
    )
