"""A learner whose rank died, with fake ranks: every caller gets the error that starts a new
attempt."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import ray
from fake_actors import FakeActor, FakeMethod
from ray.exceptions import RayActorError, RayTaskError
from small_config import small_config

from asyncrl.contracts.errors import PartDiedError
from asyncrl.learning import driver as group_module
from asyncrl.learning.driver import LearnerDiedError, LearnerError, RayLearner
from asyncrl.preflight.specs import learner_spec


@pytest.mark.timeout(20)
async def test_a_call_that_waited_while_a_rank_died_raises_the_death_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Either of the two errors may end the run."""

    async def dies() -> None:
        raise RayActorError

    monkeypatch.setattr(ray, "kill", lambda rank, no_restart: None)
    monkeypatch.setattr(group_module, "remove_placement_group", lambda placement: None)
    rank: Any = FakeActor(call=lambda *call: dies())

    learner = RayLearner(learner_spec(small_config()), None, [rank])  # type: ignore[arg-type]
    errors = await asyncio.gather(learner.step([]), learner.logprobs([]), return_exceptions=True)
    assert [type(error) for error in errors] == [LearnerDiedError, LearnerDiedError] and isinstance(
        errors[1], PartDiedError
    )
    assert str(errors[0]) == str(errors[1])


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("message", "kind", "named"),
    [
        ("Connection closed by peer [192.0.2.7]:1234", LearnerDiedError, "rank 1 failed in step"),
        ("a NaN", LearnerError, "rank 0 failed in step: RuntimeError: a NaN"),
    ],
)
async def test_a_peer_that_lost_its_connection_waits_for_the_death_of_a_node(
    monkeypatch: pytest.MonkeyPatch, message: str, kind: type[Exception], named: str
) -> None:
    """Ray reports the death of a node later than that of a process."""
    monkeypatch.setattr(ray, "kill", lambda rank, no_restart: None)
    monkeypatch.setattr(group_module, "remove_placement_group", lambda placement: None)
    monkeypatch.setattr(group_module, "DEATH_KNOWN_S", 0.01)
    survivor_ended = asyncio.Event()

    async def loses_its_peer() -> None:
        survivor_ended.set()
        raise RayTaskError("step", "", RuntimeError(message))

    async def dies_with_its_node() -> None:
        await survivor_ended.wait()
        await asyncio.sleep(0.3)  # longer than DEATH_KNOWN_S
        raise RayActorError

    ranks: list[Any] = [
        FakeActor(call=lambda *call, fails=fails: fails())
        for fails in (loses_its_peer, dies_with_its_node)
    ]

    learner = RayLearner(learner_spec(small_config()), None, ranks)  # type: ignore[arg-type]
    with pytest.raises(LearnerError, match=named) as raised:
        await learner.step([])
    assert type(raised.value) is kind


@pytest.mark.timeout(20)
async def test_a_rank_that_dies_between_two_calls_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver may wait for generators that can never fetch the dead rank's weights."""
    ended: list[Any] = []
    monkeypatch.setattr(ray, "kill", lambda rank, no_restart: ended.append(rank))
    monkeypatch.setattr(group_module, "remove_placement_group", lambda placement: None)
    monkeypatch.setattr(group_module, "WATCH_EVERY_S", 0.01)

    class Rank:
        def __init__(self, answers: int) -> None:
            self.left, self.node_address = answers, FakeMethod(self.answer)

        async def answer(self) -> str:
            if not self.left:
                raise RayActorError
            self.left -= 1
            return "127.0.0.1"

    ranks: list[Any] = [Rank(9), Rank(3)]

    learner = RayLearner(learner_spec(small_config()), None, ranks)  # type: ignore[arg-type]
    with pytest.raises(LearnerDiedError, match="rank 1 failed in a look between two calls"):
        await learner.watch()
    with pytest.raises(LearnerDiedError, match="rank 1 failed"):
        await learner.step([])
    assert ended == [*ranks] and learner.answered == 0, "a look is not progress"
    assert ranks[0].left == 5


@pytest.mark.timeout(20)
async def test_a_rank_that_hangs_between_two_calls_ends_the_calls_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "kill", lambda rank, no_restart: None)
    monkeypatch.setattr(group_module, "remove_placement_group", lambda placement: None)
    monkeypatch.setattr(group_module, "WATCH_EVERY_S", 0.01)
    asked = asyncio.Event()

    async def hangs(*call: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    rank: Any = FakeActor(node_address=hangs)
    spec = learner_spec(small_config())
    spec = replace(spec, learner=spec.learner.model_copy(update={"call_timeout_s": 0.3}))

    learner = RayLearner(spec, None, [rank])  # type: ignore[arg-type]
    watching = asyncio.create_task(learner.watch())
    await asked.wait()
    errors = await asyncio.gather(watching, learner.step([]), return_exceptions=True)
    assert [type(error) for error in errors] == [LearnerDiedError, LearnerDiedError]
    assert str(errors[0]) == str(errors[1])
    assert "rank 0 did not answer a look between two calls within" in str(errors[0])


@pytest.mark.timeout(20)
async def test_the_end_of_a_watch_leaves_the_ranks_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends its watch, then exports the last version."""
    asked = asyncio.Event()
    monkeypatch.setattr(group_module, "WATCH_EVERY_S", 0.01)

    async def hangs() -> str:
        asked.set()
        await asyncio.Event().wait()
        return ""

    rank: Any = FakeActor(
        node_address=hangs, call=lambda *call: asyncio.sleep(0, {"learning_rate": 1.0})
    )

    learner = RayLearner(learner_spec(small_config()), None, [rank])  # type: ignore[arg-type]
    watching = asyncio.create_task(learner.watch())
    await asked.wait()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    found = (await learner._all("state"))[0]
    assert found == {"learning_rate": 1.0}
