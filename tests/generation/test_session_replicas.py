"""Sessions on two real Serve replicas around stub engines: each stays with one, and goes on at the
other when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from stub_replicas import Application, stub_application

from asyncrl.contracts.messages import Generated, GenerateRequest
from asyncrl.generation.app import ServeGenerate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SESSIONS = [f"s{number}" for number in range(24)]


@pytest.fixture(scope="module")
def two(ray_cluster: Any) -> Iterator[Application]:
    """Two replicas: their `handle` and their version `registry`."""
    with stub_application(ray_cluster, "stubs-with-sessions", replicas=2) as application:
        yield application


def turn(session: str, tokens: int = 2) -> GenerateRequest:
    return GenerateRequest((1,), 1, tokens, 1.0, session=session, deadline_s=60)


async def everywhere(generate: ServeGenerate, tokens: int = 2) -> list[str]:
    """The replica of a turn of each session, all at once."""
    answers: list[Generated] = await asyncio.gather(
        *(generate.generate(turn(session, tokens)) for session in SESSIONS)
    )
    return [answer.replica for answer in answers]


async def test_a_session_stays_with_its_replica_and_survives_its_death(
    two: Application,
) -> None:
    lost: list[GenerateRequest] = []
    generate = ServeGenerate(two.handle, lambda request, error: lost.append(request))

    async with asyncio.timeout(150):
        pids = {status.replica: status.pid for status in await generate.statuses()}
        assert len(pids) == 2
        await everywhere(generate)  # the router learns its replicas with the first call
        of = await everywhere(generate)
        assert min(of.count(replica) for replica in pids) >= 6
        another = ServeGenerate(two.handle)
        for client in (generate, another, generate):
            assert await everywhere(client) == of
        victim = of[0]
        running = asyncio.create_task(everywhere(generate, tokens=2000))
        while not all(  # noqa: ASYNC110
            status.tokens_generated > 500 for status in await generate.statuses()
        ):
            await asyncio.sleep(0.05)
        os.kill(pids[victim], signal.SIGKILL)
        after = await running
        for before, now in zip(of, after, strict=True):
            assert (now == before) == (before != victim)
        # One turn of each of its sessions, and no other.
        mine = {name for name, replica in zip(SESSIONS, of, strict=True) if replica == victim}
        assert sorted(request.session or "" for request in lost) == sorted(mine)
