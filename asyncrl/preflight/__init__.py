"""The checks before anything is allocated, and the cluster on which a run allocates."""

from __future__ import annotations

from asyncrl.runtime.exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    HEAD_GRADIENTS="memory_estimate",
    ray_cluster="cluster",
    data_spec="specs",
    learner_spec="specs",
    make_plan="plan",
    model_context="model_limits",
)
