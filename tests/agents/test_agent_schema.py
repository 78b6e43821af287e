"""Requests that follow the published schema, and others that do not, get the answers that the
schema promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from agent_server import ADD_TOOL, KEY, Server, call
from hypothesis import HealthCheck, given, settings, strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

EXAMPLES = 25
"""Requests of each kind to each route."""
RESPONSES = "/v1/responses"
USER = {"role": "user", "content": "q"}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "tools": [ADD_TOOL], "logprobs": True},
    "/v1/completions": {"prompt": "q", "logprobs": 1},
    "/v1/responses": {"input": "q", "tools": [{"type": "function", "name": "add"}]},
    "/v1/messages": {"messages": [USER], "tools": [{"name": "add", "input_schema": {}}]},
}
UNCHECKED = [ignored_auth, positive_data_acceptance]
"""The key is added to every request. The schema cannot say all that a chat template refuses."""
ROUTES = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return Server(tmp_path_factory.mktemp("schema"), lambda number: f"answer {number}", 400)


@pytest.fixture(scope="module")
def schema(server: Server) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", server.app)


def test_the_schema_has_all_routes(schema: Any) -> None:
    found = {(one.ok().method.upper(), one.ok().path) for one in schema.get_all_operations()}
    assert found == set(ROUTES)


def test_the_schema_has_the_limits_of_numbers(server: Server) -> None:
    schemas = server.app.openapi()["components"]["schemas"]
    for body, field, limits in (
        ("ChatBody", "n", (1, 128)),
        ("ChatBody", "max_tokens", (1, None)),
        ("CompletionsBody", "logprobs", (0, 20)),
        ("ResponsesBody", "top_logprobs", (0, 20)),
    ):
        (number,) = [
            kind
            for kind in schemas[body]["properties"][field]["anyOf"]
            if kind["type"] == "integer"
        ]
        assert (number["minimum"], number.get("maximum")) == limits


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("stream", [False, True])
def test_good_answers_follow_the_schema(tmp_path: Path, path: str, stream: bool) -> None:
    server = Server(tmp_path, lambda number: "<think>so</think>two " + call(1, 2))
    schema = schemathesis.openapi.from_asgi("/openapi.json", server.app)
    body = {**GOOD[path], "stream": stream, "user": "a"}
    case = schema[path]["POST"].Case(body=body, media_type="application/json")
    case.headers = {"Authorization": f"Bearer {KEY}"}
    assert case.call_and_validate(excluded_checks=UNCHECKED).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        (*route, mode)
        for route in ROUTES
        for mode in GenerationMode
        if route[0] == "POST" or mode is GenerationMode.POSITIVE
    ],
)
def test_answers_are_what_the_schema_promises(
    schema: Any, method: str, path: str, mode: GenerationMode
) -> None:
    statuses: set[int] = set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        case = data.draw(schema[path][method].as_strategy(generation_mode=mode))
        case.headers = {**(case.headers or {}), "Authorization": f"Bearer {KEY}"}
        if path == RESPONSES and mode is GenerationMode.POSITIVE:
            case.body.setdefault("input", "q")  # optional, with an earlier answer
        statuses.add(case.call_and_validate(excluded_checks=UNCHECKED).status_code)

    check()
    assert (200 if mode is GenerationMode.POSITIVE else 400) in statuses, statuses
