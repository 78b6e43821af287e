"""Groups with rewards, as the learner gets them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
from recorded import VOCABULARY

from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.rows import Completion, Group, Prompt, Trajectory, VersionSpan

VERSION = 5
Rewards = tuple[float | None, ...]


def scored_group(ordinal: int, rewards: Rewards, **changes: Any) -> pa.Table:
    """The row of a scored group with random tokens. A reward of None masks the trajectory.
    `versions` are the spans' versions of each trajectory, `reasons` the finish reasons."""
    generator = np.random.default_rng(ordinal)
    versions = changes.get("versions", [[VERSION]] * len(rewards))
    reasons = changes.get("reasons", ["stop"] * len(rewards))
    prompt = tuple(generator.integers(3, VOCABULARY, 2 + ordinal % 4).tolist())
    members = []
    for index, value in enumerate(rewards):
        length = int(generator.integers(6, 20))
        ends = np.linspace(0, length, len(versions[index]) + 1).astype(int).tolist()
        completion = Completion(
            tuple(generator.integers(3, VOCABULARY, length).tolist()),
            tuple((-4 + 0.05 * generator.standard_normal(length)).tolist()),
            tuple(
                VersionSpan(version, start, end)
                for version, (start, end) in zip(
                    versions[index], itertools.pairwise(ends), strict=True
                )
            ),
            reasons[index],
        )
        members.append(
            Trajectory(
                completion,
                tuple(int(at % 5 != 3) for at in range(length)),
                value,
                {},
                None,
                "unscored" if value is None else "ok",
                tuple((-4 + 0.05 * generator.standard_normal(length)).tolist()),
            )
        )
    return groups_to_table(
        [Group(0, Prompt(ordinal, 0, "p", prompt), tuple(members), "r", 0, 1, 2)]
    )
