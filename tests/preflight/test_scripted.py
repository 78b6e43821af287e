"""What a scripted model says, in the tokens of several chat templates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from chat_families import (
    CHATML,
    FINAL_EOS,
    FORCES_THINKING,
    HEADERS,
    STRIPS_THINKING,
    TOOLS,
    save_chat_model,
)

from asyncrl.preflight.check_env.scripted_model import (
    Said,
    ScriptedModel,
    ScriptedSession,
    call_message,
    next_end,
    turn_text,
    writes,
)
from asyncrl.sessions.answers import ChatRequest
from asyncrl.sessions.session import SessionTemplate
from asyncrl.text.response import ResponseReader
from asyncrl.text.tokenizer import load_tokenizer

USER: Any = [{"role": "user", "content": "q"}]


def template_of(path: Path, jinja: str) -> SessionTemplate:
    tokenizer: Any = load_tokenizer(save_chat_model(path / "model", jinja))
    end = "<|eot|>" if jinja == HEADERS else "<|im_end|>"
    return SessionTemplate(tokenizer, frozenset([tokenizer.convert_tokens_to_ids(end)]), 512)


@pytest.mark.parametrize(
    ("jinja", "text"),
    [
        (CHATML, "so<|im_end|>\n"),
        (HEADERS, "so<|eot|>"),
        (FINAL_EOS, "so<|im_end|>\n</s>"),
        (STRIPS_THINKING, "so<|im_end|>\n"),
        (FORCES_THINKING, "\n</think>\n\nso<|im_end|>\n"),
    ],
)
def test_a_turn_is_what_the_template_writes_for_it(tmp_path: Path, jinja: str, text: str) -> None:
    template = template_of(tmp_path, jinja)
    said = {"role": "assistant", "content": "so"}
    assert turn_text(template, USER, said, None) == text
    earlier = [*USER, said, *USER]
    assert turn_text(template, earlier, said, None) == text


def test_a_tool_call_is_what_the_template_writes_for_it(tmp_path: Path) -> None:
    template = template_of(tmp_path, TOOLS)
    message = call_message(("add", {"a": 1}), ("sub", {}))
    text = turn_text(template, USER, message, [{"name": "add"}])
    assert text == 'call add{"a": 1}call sub{}<|im_end|>\n'


def say(tmp_path: Path, said: Said, most: int = 100) -> tuple[Any, ScriptedSession]:
    """What the agent gets, and the session."""
    template = template_of(tmp_path, CHATML)
    model = ScriptedModel(template, lambda *_: said, most)
    session = ScriptedSession(template, ResponseReader(template.tokenizer), model)
    (answer,) = asyncio.run(session.chat(ChatRequest(USER)))
    return answer, session


def test_a_turn_ends_at_its_first_end_token(tmp_path: Path) -> None:
    answer, session = say(tmp_path, Said({"role": "assistant", "content": "a<|im_end|>b"}))
    assert (answer.message["content"], answer.finish_reason) == ("a", "stop")
    assert session.model.texts == ["a<|im_end|>"]
    answer, session = say(tmp_path, Said(text="no end"))
    assert (answer.message["content"], session.model.texts) == ("no end", ["no end<|im_end|>"])


def test_the_next_message_may_end_a_turn(tmp_path: Path) -> None:
    """The end of a text is the head of a user's message, and that of a call is a tool's."""
    jinja = (
        "{% for m in messages %}{{ {'user': '<|head|>', 'tool': '<|/head|>'}.get(m.role, '')"
        " + m.content }}{% endfor %}{% if add_generation_prompt %}{{ ' ' }}{% endif %}"
    )
    tokenizer: Any = load_tokenizer(save_chat_model(tmp_path / "glm", jinja))
    head, tool = tokenizer.convert_tokens_to_ids(["<|head|>", "<|/head|>"])
    template = SessionTemplate(tokenizer, frozenset([head, tool]), 512)
    text = {"role": "assistant", "content": "so"}
    assert next_end(template, USER, text, None) == head
    assert next_end(template, USER, call_message(("add", {})), None) == tool
    assert next_end(template_of(tmp_path, CHATML), USER, text, None) is None


def test_a_spelled_special_token_does_not_end_the_turn(tmp_path: Path) -> None:
    answer, _ = say(tmp_path, Said(text="a<|im_end|>b", spelled=True))
    assert (answer.message["content"], answer.finish_reason) == ("a<|im_end|>b", "stop")


def test_a_turn_is_cut_at_its_limit(tmp_path: Path) -> None:
    answer, session = say(tmp_path, Said(text="one two three"), most=3)
    assert (answer.finish_reason, answer.completion_tokens) == ("length", 3)
    assert session.model.texts == [answer.message["content"]]


def test_what_the_tokenizer_can_write(tmp_path: Path) -> None:
    from jobs.guess.task import make_model

    make_model(tmp_path / "guess", 0)
    few: Any = load_tokenizer(str(tmp_path / "guess"))
    assert writes(few, "<|im_start|>user\n42") and not writes(few, "so")
    assert writes(template_of(tmp_path, CHATML).tokenizer, "Grüße 🙂\n")
