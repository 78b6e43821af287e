"""The learner: DeepSpeed ZeRO-3 ranks that train policy and supervised steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.learning.rank import LearnerRank as LearnerRank
    from asyncrl.learning.rank import start_rank as start_rank
    from asyncrl.learning.state import Meeting as Meeting

__getattr__ = lazy_exports(
    __name__,
    LearnerRank="rank",
    Meeting="state",
    start_rank="rank",
)
