"""The server of a run's page: who may read it, and what it says about files that change."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_run import write_small_run

from asyncrl.config import ConfigError
from asyncrl.page.growing import GrowingRun
from asyncrl.page.watch import TOKEN_VARIABLE, chosen_token, listening, watch_app

TOKEN = "0123456789abcdef"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_small_run(tmp_path / "small")


async def ask(app: Any, path: str, query: str = "", **headers: str) -> tuple[int, bytes]:
    """Status and body of an answer."""
    scope = {
        "type": "http",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(b"host", b"localhost:80")]
        if "host" not in headers
        else [(b"host", headers.pop("host").encode())],
    }
    scope["headers"] += [(name.encode(), value.encode()) for name, value in headers.items()]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(one.get("body", b"") for one in sent[1:])


def status(app: Any, path: str = f"/{TOKEN}/", **headers: str) -> int:
    return asyncio.run(ask(app, path, **headers))[0]


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        (f"/{TOKEN}/", {}, 200),
        (f"/{TOKEN}/", {"host": "127.0.0.1"}, 200),
        (f"/{TOKEN}/", {"host": "LOCALHOST:9000"}, 200),
        (f"/{TOKEN}/", {"host": "[::1]:9000"}, 200),
        (f"/{TOKEN}/", {"origin": "http://localhost:80"}, 200),
        (f"/{TOKEN[:-1]}/", {}, 404),
        (f"/{TOKEN}", {}, 404),
        ("/", {}, 404),
        (f"/{TOKEN}/", {"host": "evil.test"}, 403),
        (f"/{TOKEN}/", {"host": "["}, 403),
        (f"/{TOKEN}/values", {"host": "evil.test"}, 403),
        (f"/{TOKEN}/values", {"origin": "http://evil.test"}, 403),
        (f"/{TOKEN}/values", {"origin": "http://["}, 403),
        (f"/{TOKEN}/values", {"origin": "null"}, 403),
    ],
)
def test_who_may_read(run: Path, path: str, headers: dict[str, str], expected: int) -> None:
    assert status(watch_app(GrowingRun(run), TOKEN, "127.0.0.1"), path, **headers) == expected


def test_values_come_when_they_are_new(run: Path) -> None:
    ending = False
    app = watch_app(GrowingRun(run), TOKEN, "127.0.0.1", lambda: ending)

    async def scenario() -> None:
        nonlocal ending
        for odd in ("", "have=", "have=-1", "have=" + "9" * 5000, "have=½"):
            code, body = await ask(app, f"/{TOKEN}/values", odd)
            assert code == 200 and json.loads(gzip.decompress(body))["live"] == 1
        waiting = asyncio.create_task(ask(app, f"/{TOKEN}/values", "have=1"))
        await asyncio.sleep(0)
        config = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(config.replace("max_steps: 6", "max_steps: 60"))
        code, body = await waiting
        found = json.loads(gzip.decompress(body))
        assert (code, found["live"], found["max_steps"]) == (200, 2, 60)
        ending = True
        assert await ask(app, f"/{TOKEN}/values", "have=2") == (204, b"")

    asyncio.run(scenario())


def test_a_run_that_cannot_be_read_is_named(run: Path) -> None:
    good = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text('{"event": "step"}\n{\n')
    app = watch_app(GrowingRun(run), TOKEN, "127.0.0.1")
    for path in (f"/{TOKEN}/", f"/{TOKEN}/values"):
        code, body = asyncio.run(ask(app, path))
        assert code == 503 and b"line 2 is not a JSON record" in body
    (run / "metrics.jsonl").write_text(good)
    app = watch_app(GrowingRun(run), TOKEN, "127.0.0.1")
    assert status(app) == 200


def test_a_growing_run_reads_what_is_new_and_another_file_anew(run: Path) -> None:
    growing = GrowingRun(run)
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(growing.records()) == len(lines)
    with path.open("a") as file:
        file.write(lines[-1] + '{"event": "half')
    assert len(growing.records()) == len(lines) + 1
    path.write_text("".join(lines).replace("reward/mean", "reward/other"))
    assert "reward/other" in growing.records("step")[0], "of the same file, written again"
    other = path.with_name("other")
    other.write_text("".join(reversed(lines)) * 3)
    other.replace(path)
    assert len(growing.records()) == 3 * len(lines)
    path.unlink()
    assert growing.records() == []


def test_a_growing_run_has_the_rows_of_merged_files_once(run: Path) -> None:
    growing = GrowingRun(run)
    before = growing.groups()
    shutil.copy(run / "groups" / "attempt_0-000001.parquet", run / "groups" / "again.parquet")
    (run / "groups" / "attempt_0-000001.parquet").unlink()
    assert growing.groups().equals(before)
    growing.forget_removed()
    assert all(path.exists() for path in growing._tables)


def test_an_address_that_others_reach_needs_the_users_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert chosen_token("127.0.0.1") != chosen_token("127.0.0.1")
    with pytest.raises(ConfigError, match="other machines could read"):
        chosen_token("0.0.0.0")
    for weak in ("abc", "a" * 15, "a" * 15 + "/", "ä" * 20):
        monkeypatch.setenv(TOKEN_VARIABLE, weak)
        with pytest.raises(ConfigError, match="letters and digits"):
            chosen_token("127.0.0.1")
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert chosen_token("0.0.0.0") == TOKEN


def test_an_address_that_cannot_be_used_is_named() -> None:
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} cannot be used"):
            listening("127.0.0.1", port)
    for host, port in (("127.0.0.1", 70_000), ("no.such.host.invalid", 0)):
        with pytest.raises(ConfigError, match="cannot be used"):
            listening(host, port)


def test_an_interrupt_ends_the_server_quietly(run: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.cli", "watch", str(run)]
    environment = os.environ | {TOKEN_VARIABLE: TOKEN}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[0]
            assert address.startswith("http://127.0.0.1:") and TOKEN not in address
            assert address.endswith(f"/${TOKEN_VARIABLE}/")
            server.send_signal(signal.SIGINT)
            _, errors = server.communicate(timeout=60)
        finally:
            server.kill()
    assert (server.returncode, errors) == (0, "")
