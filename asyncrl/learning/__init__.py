"""The learner: DeepSpeed ZeRO-3 ranks that train policy and supervised steps."""

from __future__ import annotations

from asyncrl.runtime.exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    LearnerRank="rank",
    Meeting="state",
    start_rank="rank",
)
