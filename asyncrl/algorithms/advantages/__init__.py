"""The advantages of trajectories, each with its settings. A new one is a file here and a name in
`Advantage`."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from asyncrl.algorithms.advantages.dr_grpo import DrGrpo
from asyncrl.algorithms.advantages.gae import Gae
from asyncrl.algorithms.advantages.gdpo import Gdpo
from asyncrl.algorithms.advantages.group_advantage import GroupInputs, group_advantages
from asyncrl.algorithms.advantages.grpo import Grpo
from asyncrl.algorithms.advantages.grpo_batch_std import GrpoBatchStd
from asyncrl.algorithms.advantages.maxrl import MaxRl
from asyncrl.algorithms.advantages.opo import Opo
from asyncrl.algorithms.advantages.own_advantage import OwnAdvantage
from asyncrl.algorithms.advantages.pass_at_k import PassAtK
from asyncrl.algorithms.advantages.reinforce_plus_plus import (
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
)
from asyncrl.algorithms.advantages.remax import ReMax
from asyncrl.algorithms.advantages.rloo import Rloo
from asyncrl.contracts.section import ByName

__all__ = ["Advantage", "GroupInputs", "group_advantages"]

Advantage: TypeAlias = Annotated[
    Grpo
    | GrpoBatchStd
    | Gdpo
    | DrGrpo
    | Rloo
    | ReMax
    | Opo
    | MaxRl
    | PassAtK
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | Gae
    | OwnAdvantage,
    ByName("grpo"),
]
