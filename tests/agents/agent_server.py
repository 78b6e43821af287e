"""An agent server in this process: real sessions with a tiny tokenizer, and a fake generator."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import llama_checkpoint
import openai

from asyncrl.agents.app import agent_app
from asyncrl.contracts.rows import Completion
from asyncrl.sessions.rows import session_rows
from asyncrl.sessions.session import Session, SessionTemplate
from asyncrl.testing import FakeAgentSessions, FakeTurnGenerator
from asyncrl.text.response import ResponseReader
from asyncrl.text.template import Message
from asyncrl.text.tokenizer import decode_prompt, load_tokenizer

KEY = "key-of-a-session"
URL = "http://agents"
QWEN = (
    "{% if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and (m.reasoning_content or m.reasoning) %}"
    "{{ '<think>' + (m.reasoning_content or m.reasoning) + '</think>' }}{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson)"
    " + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A template with tools, tool calls and reasoning, as Qwen's."""
ADD_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def call(a: int, b: int) -> str:
    """A tool call, as the model writes it."""
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


@cache
def tokenizer(folder: Path) -> Any:
    made = llama_checkpoint.tokenizer()
    made.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = QWEN
    made.save_pretrained(folder)
    return load_tokenizer(str(folder))


class Server:
    """One session behind the routes, and clients that reach it."""

    def __init__(
        self,
        folder: Path,
        texts: Sequence[str] | Callable[[int], str],
        max_length: int = 4_000,
        largest_body: int = 1 << 20,
        **fake: Any,
    ) -> None:
        self.tokenizer = tokenizer(folder / "model")
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        write = texts if callable(texts) else texts.__getitem__
        self.generator = FakeTurnGenerator(self.tokenizer, write, end, **fake)
        template = SessionTemplate(self.tokenizer, frozenset({end}), max_length)
        reader = ResponseReader(self.tokenizer)

        def read(prompt_ids: Sequence[int], completion: Completion, tools: Any) -> Message:
            message, _ = reader.read(prompt_ids, completion.token_ids, completion.text, tools)
            return message

        self.session = Session(template, self.generator, read)
        self.sessions = FakeAgentSessions({KEY: self.session})
        self.agent = self.sessions.by_key[KEY]
        self.app = agent_app(self.sessions, largest_body)

    @contextlib.asynccontextmanager
    async def http(self, key: str | None = KEY) -> AsyncIterator[httpx2.AsyncClient]:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        transport = httpx2.ASGITransport(app=self.app)
        async with httpx2.AsyncClient(transport=transport, base_url=URL, headers=headers) as client:
            yield client

    @contextlib.asynccontextmanager
    async def openai(self, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        transport = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=self.app))
        options = {"api_key": KEY, "max_retries": 0, **options}
        async with openai.AsyncOpenAI(
            base_url=f"{URL}/v1", http_client=transport, **options
        ) as client:
            yield client

    @contextlib.asynccontextmanager
    async def anthropic(self, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
        transport = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=self.app))
        options = {"api_key": KEY, "max_retries": 0, **options}
        async with anthropic.AsyncAnthropic(
            base_url=URL, http_client=transport, **options
        ) as client:
            yield client

    def row(self) -> str:
        """The text of the session's only row."""
        (row,) = session_rows(self.session.nodes).rows
        assert not [node.branch_reason for node in self.session.nodes if node.branch_reason]
        return decode_prompt(self.tokenizer, row.token_ids.tolist())

    @property
    def sampled(self) -> list[str]:
        """The texts of its turns."""
        return [
            decode_prompt(self.tokenizer, node.token_ids)
            for node in self.session.nodes
            if node.sampled
        ]
