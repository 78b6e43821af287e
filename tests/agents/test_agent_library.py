"""An agent that was written for OpenAI's agent library runs on a session, unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_server import Server, call
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)

TEXTS = [
    "I add.\n" + call(1, 2),
    "<think>next</think>" + call(3, 4) + call(5, 6),
    "The sums are 3, 7 and 11.",
    "You are welcome.",
]


LONG = "a long answer " * 20


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
async def test_an_agent_of_the_library_is_one_row(tmp_path: Path, model: Any, stream: bool) -> None:
    server = Server(tmp_path, TEXTS)

    async with server.openai() as client:
        agent = Agent(
            name="adder",
            instructions="Add with the tool.",
            model=model("gpt-x", client),
            tools=[add],
        )
        settings = RunConfig(tracing_disabled=True)
        said: Any = "What are 1 + 2, 3 + 4 and 5 + 6?"
        for thanks in ("Thanks!", None):
            if stream:
                done: Any = Runner.run_streamed(agent, said, run_config=settings)
                async for _ in done.stream_events():
                    pass
            else:
                done = await Runner.run(agent, said, run_config=settings)
            if thanks is not None:
                assert done.final_output == TEXTS[2]
                said = [*done.to_input_list(), {"role": "user", "content": thanks}]
        assert done.final_output == TEXTS[3]
    row = server.row()
    assert [text.removesuffix("<|im_end|>") for text in server.sampled] == TEXTS
    place = 0
    for text in (TEXTS[0], "3<|im_end|>", TEXTS[1], "7<|im_end|>", "11<|im_end|>", TEXTS[2]):
        place = row.index(text, place)
    assert set(server.agent.overridden) <= {"strict"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
async def test_an_agent_of_the_library_goes_on_with_a_cut_turn(
    tmp_path: Path, model: Any, stream: bool
) -> None:
    server = Server(tmp_path, lambda number: LONG, max_length=60)

    async with server.openai() as client:
        agent = Agent(name="talker", model=model("gpt-x", client))
        settings = RunConfig(tracing_disabled=True)
        if stream:
            done: Any = Runner.run_streamed(agent, "hello", run_config=settings)
            async for _ in done.stream_events():
                pass
        else:
            done = await Runner.run(agent, "hello", run_config=settings)
    said = str(done.final_output)
    (node,) = (node for node in server.session.nodes if node.sampled)
    assert node.finish_reason == "length" and said and LONG.startswith(said)
