"""What follows a sampled turn, for several families of templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from chat_families import (
    CHATML,
    CHATML_TAGS,
    FINAL_EOS,
    FORCES_THINKING,
    HEADERS,
    STRIPS_THINKING,
    TOOLS,
    save_chat_model,
)
from tokenizers import AddedToken

from asyncrl.text.continuation import (
    ContinuationError,
    continuation,
    first_difference,
    render_chat,
)
from asyncrl.text.template import render_messages
from asyncrl.text.tokenizer import decode_prompt, load_tokenizer

ENDS = {HEADERS: "<|eot|>"}
DROPS_EARLIER_ANSWERS = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CALLS_WITHOUT_TEXT = TOOLS.replace("(m.content or '')", "(m.content if not m.tool_calls else '')")
STRIPS_EARLIER_CALLS = CALLS_WITHOUT_TEXT.replace(
    "in m.tool_calls or []", "in (m.tool_calls if m.tool_calls and loop.last else [])"
)
WITH_REASONING = CHATML.replace(
    "m.content",
    "('<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '') + m.content",
)
STARTS_ONLY = CHATML.replace("<|im_end|>\\n", "")
TEXT_ARGUMENTS = CHATML.replace(
    "m.content",
    "m.content + ('call ' + m.tool_calls[0].function.name + ': ' +"
    " m.tool_calls[0].function.arguments if m.tool_calls else '')",
)
MOVES_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'user' and loop.index0 == (messages | length) - (1 if"
    " add_generation_prompt else 2) %}{{ messages[0].content }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Writes the system message at the last user message, as some of Mistral's templates do."""
UPPER = CHATML.replace("m.content", "(m.content | upper)")


@dataclass(frozen=True)
class Chat:
    """A chat model, and how it renders."""

    tokenizer: Any

    def ids(self, messages: list[dict[str, Any]], generation_prompt: bool = True) -> list[int]:
        text = render_messages(self.tokenizer, messages, {}, None, generation_prompt)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def token(self, text: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(text))


@pytest.fixture
def chat_of(tmp_path):
    def make(template: str) -> Chat:
        return Chat(load_tokenizer(save_chat_model(tmp_path / "model", template)))

    return make


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGS, HEADERS, FINAL_EOS, TOOLS])
@pytest.mark.parametrize("answer", ["7", "line\nend", "Grüße 🙂", ""])
def test_prompt_turn_and_continuation_are_the_templates_own_tokens(chat_of, template, answer):
    chat = chat_of(template)
    end = chat.token(ENDS.get(template, "<|im_end|>"))
    before = [user("3 + 4 ="), assistant("no"), user("sure?")]
    sampled = [*chat.tokenizer.encode(answer, add_special_tokens=False), end]
    added = [user("and 5?")]
    follows = continuation(chat.tokenizer, [*before, assistant(answer)], added, end, {})
    assert chat.ids(before) + sampled + follows == chat.ids([*before, assistant(answer), *added])


def test_a_turn_that_was_cut_gets_its_closing_tokens(chat_of):
    chat = chat_of(CHATML)
    messages = [user("count"), assistant("1 2 3")]
    follows = continuation(chat.tokenizer, messages, [user("go on")], None, {})
    assert follows[0] == chat.token("<|im_end|>")
    text = decode_prompt(chat.tokenizer, follows)
    assert text == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_reasoning_that_the_template_strips_stays_in_the_sampled_tokens(chat_of):
    chat = chat_of(STRIPS_THINKING)
    end = chat.token("<|im_end|>")
    messages = [user("a"), assistant("<think>long</think>b")]
    follows = continuation(chat.tokenizer, messages, [user("c")], end, {})
    text = decode_prompt(chat.tokenizer, follows)
    assert text == "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    kept = chat.ids(messages, generation_prompt=False)[:-1]
    rendered = chat.ids([*messages, user("c")])
    place = first_difference(kept + follows, rendered)
    assert place is not None and kept[place] == chat.token("<think>")


def test_a_turn_that_was_cut_in_its_reasoning_is_closed_as_the_template_closes_it(chat_of):
    chat = chat_of(WITH_REASONING)
    messages = [user("a"), assistant("", reasoning_content="long th")]
    follows = continuation(chat.tokenizer, messages, [user("c")], None, {})
    assert decode_prompt(chat.tokenizer, follows).startswith("</think><|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize("content", [[{"type": "text", "text": "c"}], "c"])
def test_text_parts_are_rendered_as_text(chat_of, content):
    chat = chat_of(CHATML)
    end = chat.token("<|im_end|>")
    added = [{"role": "user", "content": content}]
    follows = continuation(chat.tokenizer, [user("a"), assistant("b")], added, end, {})
    assert "user\nc<|im_end|>" in decode_prompt(chat.tokenizer, follows)


def test_the_start_of_the_next_message_can_end_a_turn(chat_of):
    chat = chat_of(STARTS_ONLY)
    end = chat.token("<|im_start|>")
    follows = continuation(chat.tokenizer, [user("a"), assistant("b")], [user("c")], end, {})
    assert decode_prompt(chat.tokenizer, follows) == "user\nc<|im_start|>assistant\n"


def test_a_token_that_takes_the_space_after_it_is_read_as_in_the_whole_chat(chat_of):
    chat = chat_of(CHATML)
    tokenizer = chat.tokenizer
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [AddedToken("<|close|>", rstrip=True, special=True)]}
    )
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|close|>")
    end, answer = chat.token("<|close|>"), tokenizer.encode("b", add_special_tokens=False)
    messages, added = [user("a"), assistant("b")], [user("c")]
    follows = continuation(tokenizer, messages, added, end, {})
    assert chat.ids([user("a")]) + answer + [end] + follows == chat.ids([*messages, *added])


def test_a_probe_in_the_chat_is_no_problem(chat_of):
    chat = chat_of(CHATML)
    messages = [user("asyncrl-probe-0- asyncrl-probe-1-"), assistant("b")]
    assert continuation(chat.tokenizer, messages, [user("c")], chat.token("<|im_end|>"), {})


def test_a_template_that_reads_arguments_as_json_text_gets_it(chat_of):
    chat = chat_of(TEXT_ARGUMENTS)
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 3}}}]
    messages = [user("3 + 4"), assistant("", tool_calls=calls)]
    added = [{"role": "tool", "tool_call_id": "1", "content": "7"}]
    assert continuation(chat.tokenizer, messages, added, chat.token("<|im_end|>"), {})
    assert 'call add: {"a": 3}' in render_chat(chat.tokenizer, messages, {}, None)


def test_the_next_turn_begins_as_the_template_says(chat_of):
    chat = chat_of(FORCES_THINKING)
    follows = continuation(
        chat.tokenizer, [user("a"), assistant("b")], [user("c")], chat.token("<|im_end|>"), {}
    )
    assert follows[-1] == chat.token("<think>")


@pytest.mark.parametrize("template", [TOOLS, CALLS_WITHOUT_TEXT])
@pytest.mark.parametrize("arguments", ['{"a": 3, "b": 4}', {"a": 3, "b": 4}])
def test_tool_calls_belong_to_the_turn_and_their_answers_follow(chat_of, template, arguments):
    chat = chat_of(template)
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}]
    messages = [user("3 + 4"), {"role": "assistant", "content": None, "tool_calls": calls}]
    added = [{"role": "tool", "tool_call_id": "1", "content": "7"}]
    follows = continuation(chat.tokenizer, messages, added, chat.token("<|im_end|>"), {})
    rest = "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    assert decode_prompt(chat.tokenizer, follows) == rest
    with pytest.raises(ContinuationError, match="cut after a tool call"):
        continuation(chat.tokenizer, messages, added, None, {})


@pytest.mark.parametrize(
    ("template", "end", "error"),
    [
        (DROPS_EARLIER_ANSWERS, "<|im_end|>", "does not write the text of the turn once"),
        (UPPER, "<|im_end|>", "does not write the text of the turn once"),
        (CHATML, "</s>", "the turn ended with '</s>', and the template writes '<|im_end|>"),
        (CHATML + "{{ 1 // 0 }}", "<|im_end|>", "the template refuses the chat"),
    ],
)
def test_what_the_template_does_not_prove_is_an_error(chat_of, template, end, error):
    chat = chat_of(template)
    with pytest.raises(ContinuationError) as raised:
        continuation(chat.tokenizer, [user("a"), assistant("b")], [user("c")], chat.token(end), {})
    assert error in str(raised.value) and "\n" not in str(raised.value)


def test_a_template_that_moves_text_proves_nothing(chat_of):
    chat = chat_of(MOVES_SYSTEM)
    messages = [{"role": "system", "content": "be brief"}, user("a"), assistant("b")]
    with pytest.raises(ContinuationError, match="messages before the turn in another way"):
        continuation(chat.tokenizer, messages, [user("c")], chat.token("<|im_end|>"), {})


@pytest.mark.parametrize("end", ["\n", "x"])
def test_an_end_that_skips_the_templates_own_is_an_error(chat_of, end):
    chat = chat_of(CHATML)
    (token,) = chat.tokenizer.encode(end, add_special_tokens=False)
    with pytest.raises(ContinuationError, match="the turn ended with"):
        continuation(chat.tokenizer, [user("a"), assistant("b")], [user("c")], token, {})


def test_a_template_that_strips_earlier_tool_calls_proves_nothing(chat_of):
    chat = chat_of(STRIPS_EARLIER_CALLS)
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {}}}]
    messages = [user("a"), assistant("", tool_calls=calls)]
    with pytest.raises(ContinuationError, match="or changes it when messages follow"):
        added = [{"role": "tool", "content": "7"}]
        continuation(chat.tokenizer, messages, added, chat.token("<|im_end|>"), {})


ENDS_THE_LAST = CHATML.replace(
    "<|im_end|>\\n' }}",
    "' }}{{ '<|eot|>' if loop.last and not add_generation_prompt else '<|im_end|>\\n' }}",
)
STARTS_AND_EOS = STARTS_ONLY + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"


def test_the_last_turn_of_a_chat_may_have_an_end_of_its_own(chat_of):
    """As gpt-oss's. The sampled end stays where the template would write the other one."""
    always = CHATML.replace(
        "<|im_end|>\\n' }}",
        "' }}{{ '<|eot|>' if loop.last and m.role == 'assistant' else '<|im_end|>\\n' }}",
    )
    chat = chat_of(always)
    messages, added = [user("a"), assistant("b")], [user("c")]
    follows = continuation(chat.tokenizer, messages, added, chat.token("<|eot|>"), {})
    assert decode_prompt(chat.tokenizer, follows) == (
        "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_ordinary_token_is_no_other_end(chat_of):
    """It may be a part of what follows."""
    chat = chat_of(
        CHATML.replace(
            "<|im_end|>\\n' }}",
            "' }}{{ '<|eot|>' if loop.last and m.role == 'assistant' else '#' }}",
        )
    )
    messages, added = [user("a"), assistant("b")], [user("c")]
    with pytest.raises(ContinuationError, match="the turn ended with"):
        continuation(chat.tokenizer, messages, added, chat.token("<|eot|>"), {})


@pytest.mark.parametrize(
    ("template", "end"), [(STARTS_AND_EOS, "</s>"), (ENDS_THE_LAST, "<|eot|>")]
)
def test_a_token_that_does_not_end_the_next_message_is_no_other_end(chat_of, template, end):
    chat = chat_of(template)
    with pytest.raises(ContinuationError, match="the turn ended with"):
        continuation(chat.tokenizer, [user("a"), assistant("b")], [user("c")], chat.token(end), {})


@pytest.mark.parametrize("given", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content", "thinking"])
def test_a_template_gets_reasoning_under_the_name_that_it_reads(chat_of, given, read):
    chat = chat_of(WITH_REASONING.replace("m.reasoning_content", f"m.{read}"))
    messages = [user("a"), assistant("b", **{given: "so"})]
    assert "<think>so</think>b" in render_chat(chat.tokenizer, messages, {}, None)


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([1], [], 0)],
)
def test_the_first_difference(first, second, place):
    assert first_difference(first, second) == place
