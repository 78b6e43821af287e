"""Groups of sessions that have ended, from the nodes that they have made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from asyncrl.contracts.nodes import Node
from asyncrl.contracts.rows import Group, Prompt
from asyncrl.environments.running import Ended
from asyncrl.rewards.pool import GroupRewards
from asyncrl.rewards.score import attach_rewards
from asyncrl.rollout.prefixes import PrefixCounter
from asyncrl.rollout.session_groups import Played, session_table

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@dataclass(frozen=True)
class EndedSession:
    """What a session's table reads of a `Session`."""

    nodes: Sequence[Node]
    chat_so_far = CHAT
    unseen_tools = 0


def rewarded_table(
    sessions: Sequence[tuple[Sequence[Node], Ended]],
    rewards: Sequence[float | None],
    prompt_ids: tuple[int, ...] = (1,),
) -> pa.Table:
    """One group with raw rewards, as the rollout workers and the reward functions leave it."""
    made: list[Any] = [EndedSession(nodes) for nodes, _ in sessions]
    played = [
        Played(session, ended, load=None, unparsed=0, prefixes=PrefixCounter())
        for session, (_, ended) in zip(made, sessions, strict=True)
    ]
    trajectories = tuple(one.trajectory() for one in played)
    group = Group(0, Prompt(3, 0, "p", prompt_ids), trajectories, "r", 1.0, 2.0)
    return attach_rewards(
        session_table(group, played), GroupRewards({"environment": list(rewards)})
    )
