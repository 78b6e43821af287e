"""How sessions at a URL end, as a program learns it that asks after the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

from asyncrl.config import EnvironmentConfig
from asyncrl.contracts.heard import Heard
from asyncrl.rollout.player import Player
from asyncrl.sessions.answers import Answer, ChatRequest

LATE = {"messages": [{"role": "user", "content": "late"}]}
ENDS = {
    "none": "done",
    "raises": "env_error",
    "nonsense": "reward_error",
    "catches": "turns",
    "asks at its URL": "turns",
    "waits long": "deadline",
    "agent fails": "agent_error",
}
"""What an environment does, and how its session ends."""


class Answers:
    """Answers each request, except that of a broken model or of a canceled session."""

    def __init__(self, fault: str) -> None:
        self.fault, self.asked = fault, asyncio.Event()

    def abandon(self, nodes: Sequence[int]) -> None:
        pass

    async def chat(self, request: ChatRequest, heard: Heard | None = None) -> list[Answer]:
        self.asked.set()
        if self.fault == "canceled":
            await asyncio.Event().wait()
        if self.fault == "broken":
            raise RuntimeError("the engine died")
        return [Answer({"role": "assistant", "content": "a"}, "stop", 2, 5, 1)]


async def refusals(folder: Path) -> dict[str, Any]:
    """What sessions do → the error that a request with their key gets after their end."""
    player = Player(
        EnvironmentConfig.model_validate(
            {
                "function": "tests.environments.environments_under_test:tells_its_key",
                "processes": 1,
                "url": True,
                "max_turns": 1,
                "tool_s": 3,
            }
        )
    )

    async def play(fault: str) -> str | None:
        task = {"fault": fault, "file": str(folder / fault)}
        session = Answers(fault)
        playing = asyncio.ensure_future(player.play(task, session))
        if fault == "canceled":
            await session.asked.wait()
            playing.cancel()
        with contextlib.suppress(asyncio.CancelledError, RuntimeError):
            return (await playing).end
        return None

    async def late(client: httpx2.AsyncClient, fault: str) -> Any:
        _, url, key = (folder / fault).read_text().split()
        headers = {"authorization": f"Bearer {key}"}
        answer = await client.post(f"{url}/chat/completions", json=LATE, headers=headers)
        assert answer.status_code == 409
        return answer.json()["error"]

    try:
        names = [*ENDS, "canceled", "broken"]
        ends = await asyncio.gather(*map(play, names))
        assert ends == [*ENDS.values(), None, None]
        async with httpx2.AsyncClient() as client:
            return {name: await late(client, name) for name in names}
    finally:
        await player.close()


def test_a_late_request_learns_how_its_session_ended(tmp_path: Path) -> None:
    found = asyncio.run(asyncio.wait_for(refusals(tmp_path), 120))
    ends = {**ENDS, "canceled": "closed", "broken": "closed"}
    assert {name: error["session_end"] for name, error in found.items()} == ends
    assert {error["code"] for error in found.values()} == {"session_closed"}
