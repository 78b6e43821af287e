"""Calls to this machine go through no proxy, whatever the environment says."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from asyncrl.config import AgentCommand
from asyncrl.contracts.text_listener import Heard
from asyncrl.environments.running import Ended
from asyncrl.rollout.session_player import Player
from asyncrl.runtime.loopback import call_loopback_directly, without_proxy_on_loopback
from asyncrl.sessions.answers import Answer, ChatRequest

OURS = "localhost,127.0.0.1,::1"
PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY")
CLIENTS = """
import asyncio, json, os, urllib.request
import aiohttp, httpx2, requests
body = {"messages": [{"role": "user", "content": "a secret"}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
base = os.environ["OPENAI_BASE_URL"]

def plain(url):
    given = headers | {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), given)).read()

async def waits(url):
    async with aiohttp.ClientSession(trust_env=True) as client:
        async with client.post(url, json=body, headers=headers) as answer:
            answer.raise_for_status()

for host in ("127.0.0.1", "localhost"):
    url = base.replace("127.0.0.1", host) + "/chat/completions"
    httpx2.post(url, json=body, headers=headers).raise_for_status()
    requests.post(url, json=body, headers=headers).raise_for_status()
    plain(url)
    asyncio.run(waits(url))
"""
"""Asks at the session's URL with the HTTP clients that Python programs use."""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (OURS, OURS)),
        ({"no_proxy": "", "NO_PROXY": " "}, (OURS, OURS)),
        ({"no_proxy": ".corp, db"}, (f".corp,db,{OURS}", f".corp,db,{OURS}")),
        ({"NO_PROXY": "10.0.0.0/8"}, (f"10.0.0.0/8,{OURS}", f"10.0.0.0/8,{OURS}")),
        ({"no_proxy": "a", "NO_PROXY": "b"}, (f"a,{OURS}", f"b,{OURS}")),
        ({"no_proxy": "127.0.0.1,a"}, ("127.0.0.1,a,localhost,::1",) * 2),
        ({"no_proxy": "*"}, ("*", "*")),
        ({"no_proxy": OURS, "NO_PROXY": OURS}, (OURS, OURS)),
    ],
)
def test_loopback_is_added_to_the_users_own_hosts(
    given: dict[str, str], expected: tuple[str, str]
) -> None:
    found = without_proxy_on_loopback({"http_proxy": "http://p:1", **given})
    assert (found["no_proxy"], found["NO_PROXY"]) == expected
    assert found["http_proxy"] == "http://p:1" and len(found) == 3
    assert without_proxy_on_loopback(found) == found


def test_grpc_has_a_variable_of_its_own() -> None:
    found = without_proxy_on_loopback({"no_grpc_proxy": "x"})
    assert found["no_grpc_proxy"] == f"x,{OURS}" and found["no_proxy"] == OURS


def test_this_process_calls_loopback_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", ".corp")
    monkeypatch.delenv("NO_PROXY", raising=False)
    call_loopback_directly()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == f".corp,{OURS}"


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[str]]]:
    """The URL of a proxy, and what it was asked for."""
    asked: list[str] = []

    class Records(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(f"{self.command} {self.path} {self.headers.get('authorization')}")
            self.send_error(502)

        do_GET = do_CONNECT = do_POST

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Records)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


class Answers:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def abandon(self, nodes: Sequence[int]) -> None:
        pass

    async def chat(self, request: ChatRequest, heard: Heard | None = None) -> list[Answer]:
        self.asked.append(request.messages[0]["content"])
        return [Answer({"role": "assistant", "content": "a"}, "stop", 2, 5, 1)]


@pytest.mark.parametrize("named_by", ["the run", "environment.variables"])
async def test_an_agents_prompts_and_key_reach_no_proxy(
    monkeypatch: pytest.MonkeyPatch, proxy: tuple[str, list[str]], named_by: str
) -> None:
    url, seen = proxy
    variables = dict.fromkeys(PROXIES, url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        if named_by == "the run":
            monkeypatch.setenv(name, url)
    agent = {
        "command": [sys.executable, "-c", CLIENTS],
        "stdin": "none",
        "variables": variables if named_by != "the run" else {},
    }

    async def play(session: Answers) -> Ended:
        player = Player(AgentCommand.model_validate({**agent, "processes": 1}))
        try:
            return await player.play({"prompt": ""}, session)
        finally:
            await player.close()

    session = Answers()
    ended = await asyncio.wait_for(play(session), 120)
    assert seen == [] and ended.end == "done", (ended.note, json.dumps(seen))
    assert session.asked == ["a secret"] * 8
