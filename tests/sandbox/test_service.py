"""The sandbox service, as a real server on a free port of this machine."""

import http.client
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from asyncrl.sandbox import (
    Level,
    Limits,
    Program,
    SandboxError,
    SandboxUnavailableError,
    open_sandbox,
    probe,
)
from asyncrl.sandbox.service import MOST_BODY, TOKEN, SandboxServer, ServiceSandbox
from asyncrl.testing import FakeSandbox
from asyncrl.testing.sandbox import ended

SECRET = "a secret of the tests"


@pytest.fixture
def serve(monkeypatch):
    """`serve(sandbox)`: starts a service, and returns its URL."""
    monkeypatch.setenv(TOKEN, SECRET)
    servers = []

    def serve(sandbox):
        servers.append(SandboxServer(sandbox))
        threading.Thread(target=servers[-1].serve, daemon=True).start()
        return servers[-1].url

    yield serve
    for server in servers:
        server.close()


def ask(url, method="POST", path="/run", body=b"", headers=None):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    connection.request(method, path, body, {"Authorization": f"Bearer {SECRET}"} | (headers or {}))
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


def test_the_service_runs_the_program(serve):
    fake = FakeSandbox(
        lambda program: ended(
            program.stdin.decode() + program.files["a"].decode("latin-1"), level=Level.CONTAINER
        ),
        Level.CONTAINER,
    )
    sandbox = open_sandbox(Level.CONTAINER, service=serve(fake))
    result = sandbox.run(Program(("cat",), b"in", {"a": b"\xff"}), Limits(wall_s=3.0))
    assert (result.stdout, result.level, result.ok) == ("inÿ", Level.CONTAINER, True)
    assert fake.limits == [Limits(wall_s=3.0)] and fake.programs[0].argv == ("cat",)


def test_a_level_below_the_required_one_is_refused(serve):
    fake = FakeSandbox(lambda program: ended(level=Level.LANDLOCK), Level.LANDLOCK)
    url = serve(fake)
    with pytest.raises(
        SandboxUnavailableError,
        match=r"'namespaces' is required, and the service at .* has 'landlock'",
    ):
        open_sandbox(Level.NAMESPACES, service=url)
    sandbox = open_sandbox(Level.LANDLOCK, service=url)
    sandbox.level = Level.NAMESPACES  # as if the service had reported this at the start
    with pytest.raises(SandboxError, match="at level 'landlock' after"):
        sandbox.run(Program(("true",)))


def test_refuses_wrong_tokens_and_invalid_requests(serve, monkeypatch):
    fake = FakeSandbox(lambda program: ended())
    url = serve(fake)
    for wrong in ("Bearer x", "", f"Bearer {SECRET}x", "Bearer é"):
        for method, path in (("GET", "/level"), ("POST", "/run")):
            assert ask(url, method, path, headers={"Authorization": wrong.encode()})[0] == 401
    assert ask(url, path="/other")[0] == 404 and ask(url, "GET", "/run")[0] == 404
    assert ask(url, headers={"Content-Length": str(MOST_BODY + 1)})[0] == 413
    good = {"program": {"argv": ["true"], "stdin": "", "files": {}}, "limits": {}}
    assert ask(url, body=json.dumps(good))[0] == 200 and len(fake.programs) == 1
    for bad in (
        b"{",
        b"[]",
        b"[" * 100_000,
        json.dumps({**good, "limits": {"wall_s": -1}}),
        json.dumps({**good, "limits": {"other": 1}}),
        json.dumps({**good, "program": {"argv": [], "stdin": "", "files": {}}}),
        json.dumps({**good, "program": {"argv": ["true"], "stdin": "", "files": {"../x": ""}}}),
        json.dumps({**good, "program": {"argv": ["true"], "stdin": "é", "files": []}}),
    ):
        assert ask(url, body=bad)[0] == 400
    assert len(fake.programs) == 1
    monkeypatch.setenv(TOKEN, "another secret of the tests")
    with pytest.raises(SandboxError, match="wrong token"):
        ServiceSandbox(url)
    monkeypatch.setenv(TOKEN, "short")
    with pytest.raises(SandboxError, match=f"{TOKEN} has 5 characters"):
        SandboxServer(fake)
    for wrong in ("127.0.0.1:8700", "ftp://x", "http://", "http://x/path"):
        monkeypatch.setenv(TOKEN, SECRET)
        with pytest.raises(ValueError, match="is not a URL"):
            ServiceSandbox(wrong)


def test_a_failure_of_the_service_is_an_error_of_the_caller(serve):
    def broken(program):
        raise SandboxError("the disk is full")

    url = serve(FakeSandbox(broken))
    sandbox = ServiceSandbox(url)
    with pytest.raises(SandboxError, match="the disk is full"):
        sandbox.run(Program(("true",)))
    with pytest.raises(SandboxError, match="does not answer"):
        ServiceSandbox("http://127.0.0.1:1")


def test_the_command_serves_a_real_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, SECRET)
    command = [
        sys.executable,
        "-m",
        "asyncrl.sandbox",
        "serve",
        "--port",
        "0",
        "--level",
        "landlock",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            line = server.stdout.readline()
            if probe().best is None:
                assert line == "" and "is not available here" in server.stderr.read()
                return
            level, url = line.strip().removeprefix("level ").split("; ")
            sandbox = open_sandbox(Level.LANDLOCK, service=url)
            assert sandbox.level == level == probe().best
            assert sandbox.run(Program.python("print(6 * 7)"), Limits(wall_s=30.0)).stdout == "42\n"
        finally:
            server.terminate()
