"""The losses of the policy gradient, each with its settings. A new one is a file here and a name in
`Loss`."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from asyncrl.algorithms.losses.cispo import Cispo
from asyncrl.algorithms.losses.clip_cov import ClipCov
from asyncrl.algorithms.losses.dppo import Dppo
from asyncrl.algorithms.losses.gmpo import Gmpo
from asyncrl.algorithms.losses.gspo import Gspo
from asyncrl.algorithms.losses.kl_cov import KlCov
from asyncrl.algorithms.losses.own_loss import OwnLoss
from asyncrl.algorithms.losses.ppo import Ppo
from asyncrl.algorithms.losses.reinforce import Reinforce
from asyncrl.algorithms.losses.sapo import Sapo
from asyncrl.algorithms.losses.vespo import Vespo
from asyncrl.contracts.section import ByName

__all__ = ["Loss"]

Loss: TypeAlias = Annotated[
    Ppo | ClipCov | KlCov | Gspo | Gmpo | Vespo | Cispo | Sapo | Dppo | Reinforce | OwnLoss,
    ByName("ppo"),
]
