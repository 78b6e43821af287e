"""The checks before anything is allocated, and the cluster on which a run allocates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.preflight.cluster import ray_cluster as ray_cluster
    from asyncrl.preflight.memory_estimate import HEAD_GRADIENTS as HEAD_GRADIENTS
    from asyncrl.preflight.model_limits import model_context as model_context
    from asyncrl.preflight.plan import make_plan as make_plan
    from asyncrl.preflight.specs import data_spec as data_spec
    from asyncrl.preflight.specs import learner_spec as learner_spec

__getattr__ = lazy_exports(
    __name__,
    HEAD_GRADIENTS="memory_estimate",
    ray_cluster="cluster",
    data_spec="specs",
    learner_spec="specs",
    make_plan="plan",
    model_context="model_limits",
)
