"""Groups of sessions as a run records them, without a model: each session asks what its script
says, and gets the answers of the script."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from asyncrl.contracts.rows import SCORED_COLUMNS, Completion, Group, Prompt
from asyncrl.environments.running import Ended
from asyncrl.rollout.prefixes import PrefixCounter
from asyncrl.rollout.session_groups import Played, session_table
from asyncrl.sessions.answers import ChatRequest
from asyncrl.sessions.session import Session, SessionTemplate
from asyncrl.testing import FakeTurnGenerator
from asyncrl.text.chat_messages import Message
from asyncrl.text.tokenizer import load_tokenizer

PROMPT = "what is 3+4"


@dataclass(frozen=True)
class Script:
    """What happens in a session, one step after the other. "ask …" adds a user's message and takes
    a turn. "two …" does the same with two choices. "forget …" begins the chat anew with a message,
    and takes a turn."""

    steps: tuple[str, ...]
    answers: tuple[str, ...]
    """All choices, in order."""
    reward: float | None
    end: Any = "done"
    prompt: str = PROMPT


@dataclass(frozen=True)
class Turn:
    """One sampled turn, as the generator saw it."""

    before: tuple[int, ...]
    """All tokens before it."""
    tokens: tuple[int, ...]


def read(prompt_ids: object, completion: Completion, tools: object) -> Message:
    return {"role": "assistant", "content": completion.text}


class Recorder(FakeTurnGenerator):
    """Notes each turn."""

    turns: list[Turn]

    async def generate(self, request: Any, heard: Any = None) -> Any:
        sampled = await super().generate(request, heard)
        before = tuple(request.prompt_ids)
        self.turns += [Turn(before, one.completion.token_ids) for one in sampled]
        return sampled


async def play(tokenizer: Any, script: Script) -> tuple[Played, list[Turn]]:
    """The session of a script, and its turns."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    generator = Recorder(tokenizer, lambda number: script.answers[number], end)
    generator.turns = []
    session = Session(SessionTemplate(tokenizer, frozenset({end}), 500), generator, read)
    chat: list[Message] = [{"role": "user", "content": script.prompt}]
    for number, step in enumerate(script.steps):
        kind, _, text = step.partition(" ")
        if kind == "forget":
            chat = [{"role": "user", "content": text}]
        elif number:
            chat.append({"role": "user", "content": text})
        answers = await session.chat(ChatRequest(chat, n=2 if kind == "two" else 1))
        chat.append(answers[0].message)
    ended = Ended(script.end, script.reward)
    return Played(session, ended, None, 0, PrefixCounter()), generator.turns


def record(
    model: str | Path, ordinal: int, scripts: Sequence[Script], columns: Mapping[str, Any] = {}
) -> tuple[pa.Table, list[list[Turn]]]:
    """The scored row of a group with these sessions, and the turns of each. A session with another
    end than `done` is masked."""
    tokenizer: Any = load_tokenizer(str(model))

    async def scenario() -> list[tuple[Played, list[Turn]]]:
        return [await play(tokenizer, script) for script in scripts]

    made = asyncio.run(scenario())
    played = [one for one, _ in made]
    prompt = Prompt(ordinal, 0, PROMPT, tuple(tokenizer.encode(PROMPT)), dict(columns))
    group = Group(1, prompt, tuple(one.trajectory() for one in played), "replica", 1.0, 2.0)
    return scored_table(group, played), [turns for _, turns in made]


def scored_table(group: Group, played: Sequence[Played]) -> pa.Table:
    """The row of a group whose sessions have the rewards that their environment gave."""
    good = [one.ended.end == "done" for one in played]
    scored = {
        "reward": [one.ended.reward if one.ended.end == "done" else None for one in played],
        "advantage": [0.0 if done else None for done in good],
        "status": ["ok" if one.ended.end == "done" else one.ended.end for one in played],
        "failure": None,
        "scored_at": 3.0,
    }
    table = session_table(group, played)
    for name, kind in SCORED_COLUMNS.items():
        table = table.append_column(name, pa.array([scored[name]], kind))
    return table
