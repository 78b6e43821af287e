"""The checks before anything is allocated, and the cluster on which a run allocates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.preflight.cluster import (
        ray_cluster as ray_cluster,
        shut_down_ray as shut_down_ray,
        start_local_ray as start_local_ray,
    )
    from asyncrl.preflight.memory_estimate import (
        HEAD_GRADIENTS as HEAD_GRADIENTS,
        estimate as estimate,
    )
    from asyncrl.preflight.model_limits import model_context as model_context
    from asyncrl.preflight.plan import make_plan as make_plan
    from asyncrl.preflight.specs import (
        data_spec as data_spec,
        learner_spec as learner_spec,
        offline_learner_spec as offline_learner_spec,
        offline_reference_spec as offline_reference_spec,
        scoring_spec as scoring_spec,
        worker_spec as worker_spec,
    )
    from asyncrl.preflight.tool_round_trip import ToolTurns as ToolTurns, tool_turns as tool_turns

__getattr__ = lazy_exports(
    __name__,
    estimate="memory_estimate",
    scoring_spec="specs",
    worker_spec="specs",
    start_local_ray="cluster",
    shut_down_ray="cluster",
    offline_learner_spec="specs",
    offline_reference_spec="specs",
    HEAD_GRADIENTS="memory_estimate",
    ray_cluster="cluster",
    data_spec="specs",
    learner_spec="specs",
    make_plan="plan",
    model_context="model_limits",
    tool_turns="tool_round_trip",
    ToolTurns="tool_round_trip",
)
