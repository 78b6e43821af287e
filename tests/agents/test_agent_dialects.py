"""Official clients have conversations with a session, streamed and not. Each one is one row of the
sampled tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from agent_server import ADD_TOOL, QWEN, Server, call

TEXTS = [
    "Let me add.\n" + call(1, 2),
    "<think>3 is right</think>The sum is 3 < 4.",
    call(3, 4) + call(5, 6),
    "7 and 11",
]
USER: Any = {"role": "user", "content": "q"}
QUESTIONS = ("1 + 2?", "3 + 4 and 5 + 6?")
SAID = ["Let me add.", "The sum is 3 < 4.", "", "7 and 11"]
RESPONSES_TOOL = {"type": "function", **ADD_TOOL["function"]}  # type: ignore[dict-item]
MESSAGES_TOOL = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": ADD_TOOL["function"]["parameters"],  # type: ignore[index]
}


def adds(arguments: Any) -> str:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(given["a"] + given["b"])


def check(server: Server, said: list[str]) -> None:
    """The session is one row with all texts and results, in their order."""
    assert said == SAID
    row, place = server.row(), 0
    for text in (QUESTIONS[0], TEXTS[0], "3<|im_end|>", TEXTS[1], QUESTIONS[1], TEXTS[2], "11"):
        place = row.index(text, place)
    assert row.endswith("assistant\n7 and 11<|im_end|>")
    assert [text.removesuffix("<|im_end|>") for text in server.sampled] == TEXTS


async def chat_completion(client: Any, stream: bool, **body: Any) -> Any:
    if not stream:
        return await client.chat.completions.create(**body)
    async with client.chat.completions.stream(**body) as events:
        async for _ in events:
            pass
        return await events.get_final_completion()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_of_chat_completions_is_one_row(tmp_path: Path, stream: bool) -> None:
    server, said = Server(tmp_path, TEXTS), []

    chat: list[Any] = [{"role": "developer", "content": "Add."}]
    async with server.openai() as client:
        for question in QUESTIONS:
            chat.append({"role": "user", "content": [{"type": "text", "text": question}]})
            while True:
                done = await chat_completion(
                    client, stream, model="gpt-x", messages=chat, tools=[ADD_TOOL]
                )
                message = done.choices[0].message
                chat.append(message)
                said.append(message.content or "")
                if done.choices[0].finish_reason != "tool_calls":
                    break
                for asked in message.tool_calls:
                    result = adds(asked.function.arguments)
                    chat.append({"role": "tool", "tool_call_id": asked.id, "content": result})
    assert stream or done.usage.completion_tokens == server.tokens[-1]
    check(server, said)
    assert server.row().startswith("<|im_start|>tools\n")
    assert not server.agent.overridden


async def response(client: Any, stream: bool, **body: Any) -> Any:
    if not stream:
        return await client.responses.create(**body)
    async with client.responses.stream(**body) as events:
        async for _ in events:
            pass
        return await events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("previous", [False, True])
async def test_a_conversation_of_responses_is_one_row(
    tmp_path: Path, stream: bool, previous: bool
) -> None:
    server, said = Server(tmp_path, TEXTS), []

    items: list[Any] = []
    last = None
    async with server.openai() as client:
        for question in QUESTIONS:
            items.append({"role": "user", "content": question})
            while True:
                more = {} if last is None or not previous else {"previous_response_id": last}
                done = await response(
                    client,
                    stream,
                    model="gpt-x",
                    input=items,
                    instructions="Add.",
                    tools=[RESPONSES_TOOL],
                    **more,
                )
                assert done.status == "completed"
                last = done.id
                said.append(done.output_text)
                items = [] if previous else items
                items += [] if previous else list(done.output)
                calls = [item for item in done.output if item.type == "function_call"]
                items += [
                    {
                        "type": "function_call_output",
                        "call_id": item.call_id,
                        "output": adds(item.arguments),
                    }
                    for item in calls
                ]
                if not calls:
                    break
    assert done.usage.output_tokens == server.tokens[-1]
    if stream:
        assert server.agent.requests[-1].messages[-1]["content"] == "11"
    check(server, said)
    assert not server.agent.overridden


async def message(client: Any, stream: bool, **body: Any) -> Any:
    if not stream:
        return await client.messages.create(**body)
    async with client.messages.stream(**body) as events:
        async for _ in events:
            pass
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_of_messages_is_one_row(tmp_path: Path, stream: bool) -> None:
    server, said = Server(tmp_path, TEXTS), []

    chat: list[Any] = []
    async with server.anthropic() as client:
        for question in QUESTIONS:
            chat.append({"role": "user", "content": question})
            while True:
                done = await message(
                    client,
                    stream,
                    model="claude-x",
                    max_tokens=1000,
                    system=[{"type": "text", "text": "Add."}],
                    messages=chat,
                    tools=[MESSAGES_TOOL],
                )
                chat.append({"role": "assistant", "content": done.content})
                said.append("".join(one.text for one in done.content if one.type == "text"))
                if done.stop_reason != "tool_use":
                    break
                results = [
                    {
                        "type": "tool_result",
                        "tool_use_id": block.id,
                        "content": [{"type": "text", "text": adds(block.input)}],
                    }
                    for block in done.content
                    if block.type == "tool_use"
                ]
                chat.append({"role": "user", "content": results})
    assert done.stop_reason == "end_turn"
    assert done.usage.output_tokens == server.tokens[-1]
    assert done.usage.input_tokens == len(server.generator.requests[-1].prompt_ids)
    thoughts = [
        (block.thinking, bool(block.signature))  # clients rewrite a block without a signature
        for one in chat
        for block in one["content"]
        if getattr(block, "type", "") == "thinking"
    ]
    assert thoughts == [("3 is right", True)]
    check(server, said)
    assert not server.agent.overridden


async def test_a_text_that_goes_on_is_one_row(tmp_path: Path) -> None:
    server = Server(tmp_path, [" one", " two", " three"])

    async def talk() -> str:
        text = "Count:"
        async with server.openai() as client:
            for _ in range(2):
                done = await client.completions.create(model="m", prompt=text, max_tokens=4)
                text += done.choices[0].text
            assert done.choices[0].finish_reason == "length"
            stream = await client.completions.create(model="m", prompt=text, stream=True)
            return text + "".join([event.choices[0].text async for event in stream])

    assert await talk() == "Count: one two three"
    assert server.row() == "Count: one two three<|im_end|>"


async def test_the_apis_have_the_same_messages(tmp_path: Path) -> None:
    """A conversation goes from one API to the next, and no turn branches."""
    server = Server(tmp_path, [TEXTS[0], TEXTS[1], call(3, 4), "done"])

    user = {"role": "user", "content": "1 + 2?"}
    async with server.openai() as client, server.anthropic() as other:
        chat = await client.chat.completions.create(model="m", messages=[user], tools=[ADD_TOOL])
        (asked,) = chat.choices[0].message.tool_calls
        result = {"type": "function_call_output", "call_id": asked.id, "output": "3"}
        said: list[Any] = [
            user,
            {"role": "assistant", "content": chat.choices[0].message.content},
            {
                "type": "function_call",
                "call_id": asked.id,
                "name": "add",
                "arguments": asked.function.arguments,
            },
            result,
        ]
        done = await client.responses.create(model="m", input=said, tools=[RESPONSES_TOOL])
        blocks: list[Any] = [
            user,
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Let me add."},
                    {"type": "tool_use", "id": "x", "name": "add", "input": {"b": 2, "a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "x", "content": "3"}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": done.output_text}]},
            {"role": "user", "content": "3 + 4?"},
        ]
        last = await other.messages.create(
            model="m", max_tokens=100, messages=blocks, tools=[MESSAGES_TOOL]
        )
        assert last.stop_reason == "tool_use" and last.content[0].input == {"a": 3, "b": 4}
    assert server.row().count("<|im_start|>assistant") == 3


async def test_several_choices_stops_and_logprobs(tmp_path: Path) -> None:
    server = Server(tmp_path, lambda number: f"answer {number}")

    body = {"model": "m", "messages": [{"role": "user", "content": "q"}], "n": 3}
    async with server.openai() as client:
        done = await client.chat.completions.create(
            **body, logprobs=True, top_logprobs=2, stop="\n", temperature=0.1, seed=3
        )
        assert [one.message.content for one in done.choices] == [
            "answer 0",
            "answer 1",
            "answer 2",
        ]
        tokens = done.choices[1].logprobs.content
        assert "".join(one.token for one in tokens) == "answer 1<|im_end|>"
        assert tokens[1].logprob == -0.225
        texts = ["", "", ""]
        stream = await client.chat.completions.create(
            **body, stream=True, stream_options={"include_usage": True}
        )
        usage = None
        async for event in stream:
            usage = event.usage
            for choice in event.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == ["answer 3", "answer 4", "answer 5"]
        assert usage.completion_tokens == sum(server.tokens[-3:])
    assert server.generator.requests[0].stop == ("\n",)
    assert server.agent.overridden == {"temperature": 1, "seed": 1, "top_logprobs": 1}


async def test_text_arrives_while_it_is_sampled(tmp_path: Path) -> None:
    released: list[asyncio.Event] = []

    async with asyncio.timeout(30):
        server = Server(tmp_path, ["some text <tool_call> no call"])
        wait = asyncio.Event()
        released.append(wait)
        generate = server.generator.generate

        async def slowly(request: Any, heard: Any = None) -> Any:
            def heard_first(choice: int, text: str) -> None:
                heard(choice, text)

            answers = await generate(request, heard_first)
            await wait.wait()
            return answers

        server.generator.generate = slowly  # type: ignore[method-assign]
        async with server.openai() as client:
            pieces = []
            async with client.responses.stream(model="m", input="q") as events:
                async for event in events:
                    if event.type == "response.output_text.delta":
                        pieces.append(event.delta)
                        if "".join(pieces) == "some text":
                            wait.set()
            assert "".join(pieces) == "some text <tool_call> no call"
            assert (await events.get_final_response()).output_text == "".join(pieces)


async def test_reasoning_that_the_template_begins_is_not_streamed_as_text(tmp_path: Path) -> None:
    forced = QWEN.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>' }}{% endif %}")
    server = Server(tmp_path, ["why so</think>so"], template=forced)

    async with server.openai() as client:
        done = await chat_completion(client, True, model="m", messages=[USER])
        assert done.choices[0].message.content == "so"
        assert done.choices[0].message.reasoning == "why so"


async def test_a_cut_answer_says_so(tmp_path: Path) -> None:
    server = Server(tmp_path, lambda number: "a long answer")

    chat: Any = [{"role": "user", "content": "q"}]
    async with server.openai() as client, server.anthropic() as other:
        done = await client.chat.completions.create(
            model="m", messages=chat, max_completion_tokens=5
        )
        assert done.choices[0].finish_reason == "length"
        async with client.responses.stream(model="m", input="q", max_output_tokens=5) as events:
            (last,) = [event async for event in events if event.type == "response.incomplete"]
        assert last.response.status == "incomplete"
        assert last.response.incomplete_details.reason == "max_output_tokens"
        cut = await message(other, True, model="m", messages=chat, max_tokens=5)
        assert cut.stop_reason == "max_tokens" and cut.content[0].text == "a lon"


@pytest.mark.parametrize("options", [{}, {"max_output_tokens": 500}])
async def test_an_answer_that_the_run_cut_is_complete_for_the_responses_api(
    tmp_path: Path, options: dict[str, int]
) -> None:
    server = Server(tmp_path, lambda number: "a long answer " * 20, max_length=50)

    async with server.openai() as client:
        whole: Any = await client.responses.create(model="m", input="q", **options)
        async with client.responses.stream(model="m", input="q", **options) as events:
            streamed = await events.get_final_response()
    for answer in (whole, streamed):
        assert answer.status == "completed" and answer.output[0].status == "incomplete"
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert 0 < len(answer.output_text) < 50


async def test_answers_that_follow_a_schema(tmp_path: Path) -> None:
    server = Server(tmp_path, lambda number: '{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    chat: Any = [{"role": "user", "content": "q"}]
    form = {"type": "json_schema", "schema": schema, "name": "x"}
    async with server.openai() as client, server.anthropic() as other:
        await client.chat.completions.create(
            model="m",
            messages=chat,
            response_format={"type": "json_schema", "json_schema": form},
        )
        await client.responses.create(model="m", input="q", text={"format": form})
        done = await other.messages.create(
            model="m",
            messages=chat,
            max_tokens=20,
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
        assert done.content[0].text == '{"a": 1}'
    assert [request.schema for request in server.generator.requests] == [schema] * 3


async def test_each_chunk_of_a_stream_has_one_tool_call(tmp_path: Path) -> None:
    """As those of OpenAI. Some clients read only the first call of a chunk."""
    server = Server(tmp_path, ["I add. " + call(1, 2) + call(3, 4)])

    async with server.openai() as client:
        events = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "q"}],
            tools=[ADD_TOOL],
            stream=True,
        )
        deltas = [event.choices[0].delta async for event in events]
    calls = [delta.tool_calls for delta in deltas if delta.tool_calls]
    assert [[one.index for one in each] for each in calls] == [[0], [1]]
    assert [json.loads(one.function.arguments)["a"] for (one,) in calls] == [1, 3]


async def test_a_stop_sequence_is_named(tmp_path: Path) -> None:
    server = Server(tmp_path, lambda number: "one STOP")
    generate = server.generator.generate

    async def stopped(request: Any, heard: Any = None) -> Any:
        from dataclasses import replace

        (answer,) = await generate(request)
        one = answer.completion
        kept = len("one STOP")
        cut = replace(
            one,
            token_ids=one.token_ids[:kept],
            logprobs=one.logprobs[:kept],
            versions=(replace(one.versions[0], end=kept),),
            text="one ",
        )
        return [replace(answer, completion=cut)]

    server.generator.generate = stopped  # type: ignore[method-assign]

    async with server.anthropic() as client:
        done = await client.messages.create(
            model="m",
            max_tokens=50,
            messages=[{"role": "user", "content": "q"}],
            stop_sequences=["NO", "STOP"],
        )
        assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", "STOP")
        assert done.content[0].text == "one "
