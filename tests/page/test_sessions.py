"""Sessions as conversations: the page's values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.page.pieces import Pieces
from asyncrl.page.sessions import session_of

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
    {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "two"},
]
ROW: dict[str, Any] = {
    "session_messages": [None, json.dumps(MESSAGES)],
    "session_end": ["deadline", "done"],
    "session_note": ["late", None],
    "turn_trajectory": [0, 1, 1],
    "turn_parent": [-1, -1, 1],
    "turn_context": [[5], [6, 7], [8]],
    "turn_tokens": [1, 4, 2],
    "turn_status": ["ok"] * 3,
    "turn_finish_reason": ["stop"] * 3,
    "turn_branch_reason": [""] * 3,
    "turn_started_at": [1.0, 2.0, 4.5],
    "turn_finished_at": [1.5, 3.0, 5.0],
    "turn_reward": [None, None, 1.0],
}


@pytest.fixture
def pieces(tmp_path: Path) -> Pieces:
    return Pieces(tmp_path)  # without a tokenizer, each token is its number


def test_a_session_has_its_messages_and_what_each_turn_took(pieces: Pieces) -> None:
    found = session_of(ROW, 1, pieces)
    assert found is not None and (found["end"], found["note"]) == ("done", "")
    assert [(one["role"], one["text"]) for one in found["messages"]] == [
        ("user", "1 + 1?"),
        ("assistant", ""),
        ("tool", "2"),
        ("assistant", "two"),
    ]
    assert found["messages"][1]["calls"] == [["add", '{"a": 1}']]
    assert found["messages"][1]["reasoning"] == "hm"
    first, second = found["turns"]
    assert (first["start"], first["tokens"], first["follows"], first["after"]) == (0, 4, None, None)
    assert (second["start"], second["follows"], second["after"]) == (4, 0, 1.5)
    assert (first["seconds"], second["seconds"], second["reward"]) == (1.0, 0.5, 1.0)
    assert first["context"] == "[6][7]"


@pytest.mark.parametrize("written", [None, "", "{", "3", '"text"'])
def test_what_is_no_chat_is_no_session(pieces: Pieces, written: str | None) -> None:
    assert session_of(ROW | {"session_messages": [None, written]}, 1, pieces) is None
    assert session_of({"completion_ids": [[1]]}, 0, pieces) is None


@pytest.mark.parametrize(
    "message", [{}, {"role": 3, "content": None}, {"role": "tool", "tool_calls": ["odd", {}]}]
)
def test_odd_messages_are_shown_as_they_are(pieces: Pieces, message: dict[str, Any]) -> None:
    found = session_of(ROW | {"session_messages": [None, json.dumps([message, 7])]}, 1, pieces)
    assert found is not None and len(found["messages"]) == 1
    assert json.dumps(found)
