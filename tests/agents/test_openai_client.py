"""The official client of OpenAI has conversations with a session, streamed and not. Each one is one
row of the sampled tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from agent_server import ADD_TOOL, Server, call

TEXTS = [
    "Let me add.\n" + call(1, 2),
    "<think>3 is right</think>The sum is 3 < 4.",
    call(3, 4) + call(5, 6),
    "7 and 11",
]


def adds(arguments: str) -> str:
    import json

    given = json.loads(arguments)
    return str(given["a"] + given["b"])


async def one_completion(client: Any, stream: bool, **body: Any) -> Any:
    if not stream:
        return await client.chat.completions.create(**body)
    async with client.chat.completions.stream(**body) as events:
        async for _ in events:
            pass
        return await events.get_final_completion()


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_of_chat_completions_is_one_row(tmp_path: Path, stream: bool) -> None:
    server = Server(tmp_path, TEXTS)

    async def talk() -> list[Any]:
        chat: list[Any] = [{"role": "system", "content": "Add."}]
        async with server.openai() as client:
            for question in ("1 + 2?", "3 + 4 and 5 + 6?"):
                chat.append({"role": "user", "content": question})
                while True:
                    done = await one_completion(
                        client, stream, model="gpt-x", messages=chat, tools=[ADD_TOOL]
                    )
                    message = done.choices[0].message
                    chat.append(message)
                    if done.choices[0].finish_reason != "tool_calls":
                        break
                    for asked in message.tool_calls:
                        result = adds(asked.function.arguments)
                        chat.append({"role": "tool", "tool_call_id": asked.id, "content": result})
        return chat

    chat = asyncio.run(talk())
    assert [message.content for message in chat if not isinstance(message, dict)] == [
        "Let me add.",
        "The sum is 3 < 4.",
        None,
        "7 and 11",
    ]
    assert [m["content"] for m in chat if isinstance(m, dict) and m["role"] == "tool"] == [
        "3",
        "7",
        "11",
    ]
    row = server.row()
    assert all(text in row for text in TEXTS) and len(server.sampled) == 4
    assert not server.agent.overridden
