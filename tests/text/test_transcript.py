"""Sessions as text for people."""

from __future__ import annotations

from asyncrl.text.transcript import transcript


def test_each_message_is_a_line_with_its_calls_and_reasoning() -> None:
    call = {"type": "function", "function": {"name": "guess", "arguments": '{"number": 5}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1..9"}]},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "right"},
        {"role": "assistant", "content": "done", "tool_calls": ["odd"]},
    ]
    assert transcript(messages) == (
        'user: 1..9\nassistant: (hm) guess({"number": 5})\ntool: right\nassistant: done odd'
    )
