"""A learner whose rank died, with fake ranks: every caller gets the error that starts a new
attempt."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError
from small_config import small_config

from asyncrl.contracts.errors import PartDiedError
from asyncrl.learning import group as group_module
from asyncrl.learning.group import LearnerDiedError, LearnerGroup
from asyncrl.preflight.specs import learner_spec


@pytest.mark.timeout(20)
def test_a_call_that_waited_while_a_rank_died_raises_the_death_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Either of the two errors may end the run."""

    async def dies() -> None:
        raise RayActorError

    monkeypatch.setattr(ray, "kill", lambda rank, no_restart: None)
    monkeypatch.setattr(group_module, "remove_placement_group", lambda placement: None)
    rank: Any = SimpleNamespace(call=SimpleNamespace(remote=lambda *call: dies()))

    async def both() -> list[Any]:
        learner = LearnerGroup(learner_spec(small_config()), None, [rank])  # type: ignore[arg-type]
        return await asyncio.gather(learner.step([]), learner.logprobs([]), return_exceptions=True)

    errors = asyncio.run(both())
    assert [type(error) for error in errors] == [LearnerDiedError, LearnerDiedError] and isinstance(
        errors[1], PartDiedError
    )
    assert str(errors[0]) == str(errors[1])
