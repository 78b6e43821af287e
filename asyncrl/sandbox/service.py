"""The same sandbox behind HTTP, so that programs run in another container or on another machine.

    GET  /level                                  → {"level": "namespaces"}
    POST /run  {"program": …, "limits": …}       → the fields of a `Result`, or {"error": …}

Every request carries `Authorization: Bearer TOKEN`. Both sides read the token from the environment
variable ASYNCRL_SANDBOX_TOKEN. Your own service may report level "container", which promises that
programs run on a separate machine or in a separate container.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import http.client
import http.server
import json
import os
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

from asyncrl.sandbox.job import limits_from, program_from, program_to, result_from, result_to
from asyncrl.sandbox.levels import Level, Limits, Program, Result, Sandbox, SandboxError
from asyncrl.sandbox.machine import usable_cpus

TOKEN = "ASYNCRL_SANDBOX_TOKEN"
LEAST_TOKEN = 16
MOST_BODY = 64 << 20
ANSWER_S = 60.0
"""Seconds beyond the program's own that an answer may take."""
HELD_S = 30.0
"""Seconds after which an idle client is disconnected."""


def _token() -> str:
    token = os.environ.get(TOKEN, "")
    if len(token) < LEAST_TOKEN:
        raise SandboxError(
            f"{TOKEN} has {len(token)} characters; set it to the same secret of at least"
            f" {LEAST_TOKEN} on both sides"
        )
    return token


class ServiceSandbox:
    """`Sandbox` at a URL such as `http://127.0.0.1:8700`."""

    def __init__(self, url: str) -> None:
        """Ask the service for its level.

        Raises:
            SandboxError: There is no token, or no sandbox service answers.
            ValueError: `url` is not the URL of a service.
        """
        parts = urlsplit(url)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.path not in ("", "/")
        ):
            raise ValueError(
                f"sandbox service {url!r} is not a URL such as 'http://127.0.0.1:8700'"
            )
        self._url, self._parts, self._token = url, parts, _token()
        answer = self._ask("GET", "/level", None, ANSWER_S, MOST_BODY)
        try:
            self.level = Level(str(answer["level"]))
        except (KeyError, TypeError, ValueError):
            raise SandboxError(
                f"the sandbox service at {url} did not report a level: {str(answer)[:200]}"
            ) from None

    def run(self, program: Program, limits: Limits | None = None) -> Result:
        """Run the program at the service.

        Raises:
            SandboxError: The program did not run, its end is unknown, or it ran at a lower level
                than the service reported.
        """
        limits = limits or Limits()
        body = {"program": program_to(program), "limits": dataclasses.asdict(limits)}
        most = MOST_BODY + 12 * limits.output_bytes
        result = result_from(self._ask("POST", "/run", body, limits.wall_s + ANSWER_S, most))
        if not result.level.reaches(self.level):
            raise SandboxError(
                f"the sandbox service at {self._url} ran a program at level {result.level.value!r}"
                f" after reporting level {self.level.value!r}"
            )
        return result

    async def run_async(self, program: Program, limits: Limits | None = None) -> Result:
        """`run` in a thread. Cancellation does not kill the program; its limits still apply."""
        return await asyncio.to_thread(self.run, program, limits)

    def _ask(
        self, method: str, path: str, body: object, timeout_s: float, most: int
    ) -> dict[str, object]:
        kind = (
            http.client.HTTPSConnection
            if self._parts.scheme == "https"
            else http.client.HTTPConnection
        )
        assert self._parts.hostname is not None
        connection = kind(self._parts.hostname, self._parts.port, timeout=timeout_s)
        try:
            content = None if body is None else json.dumps(body).encode()
            headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            answer = response.read(most + 1)
        except (OSError, http.client.HTTPException) as error:
            raise SandboxError(
                f"the sandbox service at {self._url} does not answer ({type(error).__name__}:"
                f" {error})"
            ) from None
        finally:
            connection.close()
        try:
            tree = json.loads(answer) if len(answer) <= most else None
        except ValueError:
            tree = None
        if not isinstance(tree, dict):
            raise SandboxError(
                f"the sandbox service at {self._url} answered {response.status} without a JSON"
                " object"
            )
        if response.status != 200:
            raise SandboxError(
                f"the sandbox service at {self._url}: {tree.get('error', response.status)}"
            )
        return tree


class SandboxServer:
    """Serves any sandbox over HTTP, a few programs at once. `serve` runs until `close`."""

    def __init__(
        self, sandbox: Sandbox, host: str = "127.0.0.1", port: int = 0, at_once: int | None = None
    ) -> None:
        """Listen on `port`; 0 = a free port.

        Args:
            at_once: Programs that run concurrently. Default: one per usable processor.

        Raises:
            SandboxError: There is no token.
            OSError: The port is taken.
        """
        slots = threading.BoundedSemaphore(at_once or usable_cpus())
        handler = type(
            "Handler", (_Handler,), {"sandbox": sandbox, "token": _token(), "slots": slots}
        )
        self._server = http.server.ThreadingHTTPServer((host, port), handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """The URL of this service."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def serve(self) -> None:
        """Answer requests until another thread calls `close`."""
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    sandbox: Sandbox
    token: str
    slots: threading.BoundedSemaphore
    timeout = HELD_S
    server_version, sys_version = "asyncrl-sandbox", ""

    def do_GET(self) -> None:
        if self._allowed():
            if self.path == "/level":
                self._answer(200, {"level": self.sandbox.level})
            else:
                self._answer(404, {"error": "GET /level or POST /run"})

    def do_POST(self) -> None:
        if not self._allowed():
            return
        if self.path != "/run":
            self._answer(404, {"error": "GET /level or POST /run"})
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BODY:
            self._answer(
                413,
                {
                    "error": (
                        f"the body needs a Content-Length of at most {MOST_BODY} bytes, not"
                        f" {length[:20]!r}"
                    )
                },
            )
            return
        try:
            tree = json.loads(self.rfile.read(int(length)))
            program, limits = program_from(tree["program"]), limits_from(tree["limits"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._answer(400, {"error": f"the body is not a program with limits: {error}"})
            return
        try:
            with self.slots:
                self._answer(200, result_to(self.sandbox.run(program, limits)))
        except SandboxError as error:
            self._answer(503, {"error": str(error)})

    def _allowed(self) -> bool:
        """Whether the request has the token. If not, sends a refusal."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), self.token.encode()):
            return True
        self._answer(401, {"error": f"wrong token: set {TOKEN}"})
        return False

    def _answer(self, status: int, tree: Mapping[str, object]) -> None:
        content = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: the text of a request does not belong on a terminal."""
