"""The checks before anything is allocated, and the cluster on which a run allocates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.preflight.check_env.tool_round_trip import (
        ToolTurns as ToolTurns,
        tool_turns as tool_turns,
    )
    from asyncrl.preflight.plan.plan import make_plan as make_plan
    from asyncrl.preflight.resources.memory_estimate import (
        HEAD_GRADIENTS as HEAD_GRADIENTS,
        estimate as estimate,
    )
    from asyncrl.preflight.resources.model_limits import model_context as model_context
    from asyncrl.preflight.specs import (
        data_spec as data_spec,
        learner_spec as learner_spec,
        offline_learner_spec as offline_learner_spec,
        offline_reference_spec as offline_reference_spec,
        scoring_spec as scoring_spec,
        worker_spec as worker_spec,
    )

__getattr__ = lazy_exports(
    __name__,
    data_spec="specs",
    estimate="resources.memory_estimate",
    HEAD_GRADIENTS="resources.memory_estimate",
    learner_spec="specs",
    make_plan="plan.plan",
    model_context="resources.model_limits",
    offline_learner_spec="specs",
    offline_reference_spec="specs",
    scoring_spec="specs",
    tool_turns="check_env.tool_round_trip",
    ToolTurns="check_env.tool_round_trip",
    worker_spec="specs",
)
