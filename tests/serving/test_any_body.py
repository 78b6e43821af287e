"""Random bodies: every one gets an answer or an error in OpenAI's format, and none a 500."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from asyncrl.api.chat import ChatBody
from asyncrl.api.completions import PromptsBody
from asyncrl.api.messages import MessagesBody
from asyncrl.api.responses import ResponsesBody
from asyncrl.serving.http import routes
from asyncrl.serving.identity import ServedModel
from asyncrl.serving.requests import HINTS, NEUTRAL, Sampling
from asyncrl.testing import FakeServed

MODEL = ServedModel("tiny", max_model_len=64, vocabulary=200, longest_token=4)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["user", "text", "tiny", 10**30])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "x", "name", "function"]),
            inner,
            max_size=3,
        )
    ),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": VALUES}
    ),
    max_size=3,
)
ITEMS = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "type", "content", "call_id", "name", "arguments", "output"]),
        VALUES
        | st.sampled_from(["assistant", "message", "function_call", "function_call_output"])
        | st.sampled_from(["reasoning", "{}"]),
        max_size=5,
    ),
    max_size=3,
)
PROMPTS = (
    VALUES | st.lists(st.integers(0, 199), max_size=5) | st.lists(st.text(max_size=5), max_size=3)
)
NAMES = sorted(
    {
        *ChatBody.model_fields,
        *PromptsBody.model_fields,
        *ResponsesBody.model_fields,
        *MessagesBody.model_fields,
        *Sampling.model_fields,
        *HINTS,
        *NEUTRAL,
        "suffix",
        "user",
    }
    - {"model", "prompt", "messages", "input"}
)
OTHER_FIELDS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3)


async def post(path: str, body: Any) -> tuple[int, str]:
    """The status and body of the answer."""
    sent: list[dict[str, Any]] = []
    parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        return parts.pop() if parts else await asyncio.Event().wait()  # type: ignore[func-returns-value]

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": headers,
        "query_string": b"",
    }
    await asyncio.wait_for(routes(FakeServed(MODEL), None)(scope, receive, send), 30)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode()


@pytest.mark.parametrize(
    ("path", "field", "values"),
    [
        ("/v1/chat/completions", "messages", MESSAGES | VALUES),
        ("/v1/completions", "prompt", PROMPTS),
        ("/v1/responses", "input", ITEMS | VALUES),
        ("/v1/messages", "messages", MESSAGES | VALUES),
    ],
)
def test_any_body_gets_an_answer(path: str, field: str, values: st.SearchStrategy[Any]) -> None:
    @settings(deadline=None, max_examples=100)
    @given(values, OTHER_FIELDS)
    def check(value: Any, other_fields: dict[str, Any]) -> None:
        status, text = asyncio.run(post(path, {"model": "tiny", field: value, **other_fields}))
        assert status in (200, 400), text
        if status == 400:
            error = json.loads(text)["error"]
            assert (
                error["type"] == "invalid_request_error"
                and error["message"]
                and "\n" not in error["message"]
            )
        elif text.startswith(("data: ", "event: ")):
            ends = ("data: [DONE]\n\n", '"type": "message_stop"}\n\n')
            assert text.endswith(ends) or "response.completed" in text
            assert '"error":' not in text.replace('"error": null', "")
        else:
            assert {"choices", "output", "content"} & set(json.loads(text))

    check()
