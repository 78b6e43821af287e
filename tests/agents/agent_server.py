"""An agent server in this process: real sessions with a tiny tokenizer, and a fake generator."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
from live_transport import LiveTransport
from tools_model import ADD_TOOL, QWEN, call, tokenizer

from asyncrl.agents.app import agent_app
from asyncrl.contracts.rows import Completion
from asyncrl.sessions.session import Session, SessionTemplate
from asyncrl.sessions.session_rows import session_rows
from asyncrl.testing import FakeAgentSessions, FakeTurnGenerator
from asyncrl.text.chat_messages import Message
from asyncrl.text.response import ResponseReader
from asyncrl.text.tokenizer import decode_prompt

KEY = "key-of-a-session"
URL = "http://agents"
__all__ = ["ADD_TOOL", "KEY", "QWEN", "Server", "call", "tokenizer"]


class Server:
    """One session behind the routes, and clients that reach it."""

    def __init__(
        self,
        folder: Path,
        texts: Sequence[str] | Callable[[int], str],
        max_length: int = 4_000,
        largest_body: int = 1 << 20,
        template: str = QWEN,
        **fake: Any,
    ) -> None:
        self.tokenizer = tokenizer(folder / "model", template)
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        write = texts if callable(texts) else texts.__getitem__
        self.generator = FakeTurnGenerator(self.tokenizer, write, end, **fake)
        rendered = SessionTemplate(self.tokenizer, frozenset({end}), max_length)
        reader = ResponseReader(self.tokenizer)

        def read(prompt_ids: Sequence[int], completion: Completion, tools: Any) -> Message:
            message, _ = reader.read(prompt_ids, completion.token_ids, completion.text, tools)
            return message

        self.session = Session(rendered, self.generator, read)
        self.sessions = FakeAgentSessions({KEY: self.session})
        self.agent = self.sessions.by_key[KEY]
        self.app = agent_app(self.sessions, largest_body)

    @contextlib.asynccontextmanager
    async def http(self, key: str | None = KEY) -> AsyncIterator[httpx2.AsyncClient]:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        transport = LiveTransport(self.app)
        async with httpx2.AsyncClient(transport=transport, base_url=URL, headers=headers) as client:
            yield client

    @contextlib.asynccontextmanager
    async def openai(self, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        transport = httpx2.AsyncClient(transport=LiveTransport(self.app))
        options = {"api_key": KEY, "max_retries": 0, **options}
        async with openai.AsyncOpenAI(
            base_url=f"{URL}/v1", http_client=transport, **options
        ) as client:
            yield client

    @contextlib.asynccontextmanager
    async def anthropic(self, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
        transport = httpx2.AsyncClient(transport=LiveTransport(self.app))
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

    @property
    def tokens(self) -> list[int]:
        """The numbers of tokens of its turns."""
        return [len(node.token_ids) for node in self.session.nodes if node.sampled]
