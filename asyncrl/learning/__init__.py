"""The learner: DeepSpeed ZeRO-3 ranks that train policy and supervised steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.learning.group import LearnerGroup as LearnerGroup
    from asyncrl.learning.offline_examples import (
        examples_with as examples_with,
        pairs_of as pairs_of,
    )
    from asyncrl.learning.rank import LearnerRank as LearnerRank, start_rank as start_rank
    from asyncrl.learning.state import Meeting as Meeting
    from asyncrl.learning.turns import DeviceTurns as DeviceTurns

__getattr__ = lazy_exports(
    __name__,
    DeviceTurns="turns",
    LearnerGroup="group",
    examples_with="offline_examples",
    pairs_of="offline_examples",
    LearnerRank="rank",
    Meeting="state",
    start_rank="rank",
)
