"""A session as a conversation: its messages, and what each turn of the model took."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncrl.page.pieces import Pieces
from asyncrl.text.chat_messages import plain_text


def session_of(row: Mapping[str, Any], index: int, pieces: Pieces) -> dict[str, Any] | None:
    """The session of a group's trajectory; None if it is a completion, or has no messages.

    Args:
        row: of `Run.groups()`.
    """
    written = _item(row, "session_messages", index)
    try:
        messages = json.loads(written) if written else None
    except ValueError:
        return None
    if not isinstance(messages, list):
        return None
    return {
        "end": _item(row, "session_end", index) or "",
        "note": _item(row, "session_note", index) or "",
        "messages": [_message(one) for one in messages if isinstance(one, Mapping)],
        "turns": _turns(row, index, pieces),
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {
        "role": str(message.get("role") or ""),
        "text": str(plain_text(message.get("content"))),
        "reasoning": str(message.get("reasoning") or ""),
        "calls": [_call(one) for one in calls] if isinstance(calls, list) else [],
    }


def _call(call: Any) -> list[str]:
    """Name and arguments."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return ["", str(call)]
    return [str(function.get("name")), str(function.get("arguments"))]


def _turns(row: Mapping[str, Any], index: int, pieces: Pieces) -> list[dict[str, Any]]:
    """The turns of one session, in their order. `start` counts its sampled tokens, and `after` is
    the seconds since the turn before ended: what the agent and its tools took."""
    mine = [number for number, at in enumerate(row["turn_trajectory"]) if at == index]
    numbers = {turn: number for number, turn in enumerate(mine)}
    turns, start, ended = list[dict[str, Any]](), 0, None
    for turn in mine:
        began, tokens = row["turn_started_at"][turn], row["turn_tokens"][turn]
        turns.append(
            {
                "start": start,
                "tokens": tokens,
                "follows": numbers.get(row["turn_parent"][turn]),
                "context": "".join(pieces.of(row["turn_context"][turn])),
                "seconds": row["turn_finished_at"][turn] - began,
                "after": None if ended is None else began - ended,
                "finish": row["turn_finish_reason"][turn],
                "status": row["turn_status"][turn],
                "branch": row["turn_branch_reason"][turn],
                "reward": _item(row, "turn_reward", turn),
                "advantage": _item(row, "turn_advantage", turn),
            }
        )
        start, ended = start + tokens, row["turn_finished_at"][turn]
    return turns


def _item(row: Mapping[str, Any], name: str, index: int) -> Any:
    values = row.get(name)
    return values[index] if values is not None and index < len(values) else None
