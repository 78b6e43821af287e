"""A chat model in a folder, and sessions with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chat_families import CHATML, save_chat_model

from asyncrl.contracts.rows import Completion
from asyncrl.sessions.session import Session, SessionTemplate
from asyncrl.testing import FakeTurnGenerator
from asyncrl.text.chat_messages import Message
from asyncrl.text.tokenizer import decode_prompt, load_tokenizer

NUMBERED = "{{ '<|im_start|>' + (messages | length | string) + ' messages' }}" + CHATML
"""What it writes before a turn depends on the messages after it."""


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def read(prompt_ids: object, completion: Completion, tools: object) -> Message:
    return assistant(completion.text)


class Model:
    """A chat model in a folder, and sessions with it."""

    def __init__(self, folder: Path, template: str, end: str) -> None:
        self.tokenizer: Any = load_tokenizer(save_chat_model(folder / "model", template))
        self.end = self.tokenizer.convert_tokens_to_ids(end)

    def session(
        self, texts: Any, max_length: int = 500, history: Any = "verbatim", **fake: Any
    ) -> tuple[Session, FakeTurnGenerator]:
        generator = FakeTurnGenerator(self.tokenizer, texts, self.end, **fake)
        template = SessionTemplate(self.tokenizer, frozenset({self.end}), max_length, history, None)
        return Session(template, generator, read), generator

    def text(self, ids: Sequence[int]) -> str:
        return decode_prompt(self.tokenizer, ids)
