"""Turns as families of models write them, and what is read of them. The chat templates are our own
and have each family's marks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from asyncrl.text.response import MOST_CALLS, ResponseReader, format_name
from asyncrl.text.turn_formats import STARTS, TURN_FORMATS, turn_format
from benchmarks.families import byte_tokenizer

PLACE, ARGUMENTS = "Bad Ischl, 4820", {"place": "Bad Ischl, 4820", "days": 3}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    for name in ("weather", "now")
]
WRITTEN = json.dumps(ARGUMENTS)
PARAMETERS = "<parameter=place>\nBad Ischl, 4820\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
CALLS = [("weather", ARGUMENTS), ("now", {})]
TURNS = {
    "gpt-oss": (
        "<|start|>assistant",
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>look<|end|><|start|>assistant<|channel|>commentary to=functions.weather"
        f" <|constrain|>json<|message|>{WRITTEN}<|call|><|start|>assistant to=functions.now"
        "<|channel|>commentary json<|message|>{}<|call|>",
    ),
    "Gemma 4": (
        "<|turn>model\n",
        '<|channel>thought\nso\n<channel|>look<|tool_call>call:weather{place:<|"|>Bad Ischl,'
        ' 4820<|"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|><|tool_response>',
    ),
    "FunctionGemma": (
        "<start_of_turn>model\n",
        "<think>so</think>look<start_function_call>call:weather{place:<escape>Bad Ischl, 4820"
        "<escape>,days:3}<end_function_call><start_function_call>call:now{}<end_function_call>"
        "<start_function_response>",
    ),
    "DeepSeek V3 and R1": (
        "<｜Assistant｜><think>\n",
        "so</think>\n\nlook<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{WRITTEN}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    ),
    "DeepSeek V3.1": (
        "<｜Assistant｜><think>",
        "so</think>look<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        f"{WRITTEN}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    ),
    "DeepSeek V3.2": (
        "<｜Assistant｜><think>",
        'so</think>look\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        f'<｜DSML｜parameter name="place" string="true">{PLACE}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
        "<｜end▁of▁sentence｜>",
    ),
    "Kimi K2": (
        "<|im_assistant|>assistant<|im_middle|>",
        "<think>so</think>look<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:4"
        f"<|tool_call_argument_begin|>{WRITTEN}<|tool_call_end|><|tool_call_begin|>functions.now:5"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
    ),
    "MiniMax M2": (
        "]~b]ai\n<think>\n",
        'so\n</think>\n\nlook\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="place'
        f'">{PLACE}</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>[e~[',
    ),
    "Seed-OSS": (
        "<seed:bos>assistant\n",
        f"<seed:think>so</seed:think>look<seed:tool_call>\n<function=weather>\n{PARAMETERS}"
        "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n"
        "</seed:tool_call><seed:eos>",
    ),
    "Qwen3-Coder, Qwen3.5 and Nemotron 3": (
        "<|im_start|>assistant\n<think>\n",
        f"so\n</think>\n\nlook\n\n<tool_call>\n<function=weather>\n{PARAMETERS}</function>\n"
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call><|im_end|>",
    ),
    "GLM-4.5 and later": (
        "<|assistant|>",
        f"\n<think>so</think>\nlook\n<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>{PLACE}"
        "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call><|observation|>",
    ),
    "Hermes, Qwen 2.5 and Qwen3": (
        "<|im_start|>assistant\n",
        f'<think>so</think>look<tool_call>\n{{"name": "weather", "arguments": {WRITTEN}}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>',
    ),
    "LFM2": (
        "<|im_start|>assistant\n",
        f"<think>so</think>look<|tool_call_start|>[weather(place='{PLACE}', days=3), now()]"
        "<|tool_call_end|><|im_end|>",
    ),
    "OLMo 3": (
        "<|im_start|>assistant\n",
        f'<think>so</think>look<function_calls>weather(place="{PLACE}", days=3)\nnow()'
        "</function_calls><|im_end|>",
    ),
    "Mistral": (
        "[/INST]",
        f"[THINK]so[/THINK]look[TOOL_CALLS]weather[ARGS]{WRITTEN}[TOOL_CALLS]now[ARGS]{{}}</s>",
    ),
    "Phi-4-mini and Granite 3": (
        "<|assistant|>",
        f'<think>so</think>look<|tool_call|>[{{"name": "weather", "arguments": {WRITTEN}}},'
        ' {"name": "now", "arguments": {}}]<|/tool_call|><|end|>',
    ),
    "Command R7B and Command A": (
        "<|CHATBOT_TOKEN|>",
        "<|START_THINKING|>so<|END_THINKING|><|START_RESPONSE|>look<|END_RESPONSE|>"
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters":'
        f' {WRITTEN}}}, {{"tool_call_id": "1", "tool_name": "now", "parameters": {{}}}}]'
        "<|END_ACTION|><|END_OF_TURN_TOKEN|>",
    ),
    "Nemotron Nano 2 and Llama Nemotron": (
        "<SPECIAL_11>Assistant\n<think>\n",
        f'so</think>look<TOOLCALL>[{{"name": "weather", "arguments": {WRITTEN}}},'
        ' {"name": "now", "arguments": {}}]</TOOLCALL>',
    ),
    "Hunyuan, Jamba and Apriel": (
        "<|begin_assistant|>\n",
        f'<think>so</think>look<tool_calls>[{{"name": "weather", "arguments": {WRITTEN}}},'
        ' {"name": "now", "arguments": "{}"}]</tool_calls><|end|>',
    ),
    "Apertus": (
        "<|im_start|>assistant\n",
        f'<|inner_prefix|>so<|inner_suffix|>look<|tools_prefix|>[{{"weather": {WRITTEN}}},'
        ' {"now": {}}]<|tools_suffix|>',
    ),
    "GigaChat 3": (
        "<|im_start|>assistant\n",
        f'<think>so</think>look<|function_call|>{{"name": "weather", "arguments": {WRITTEN}}},'
        '{"name": "now", "arguments": {}}',
    ),
    "Solar Open": (
        "<|im_start|>assistant\n",
        "<think>so</think>look<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>weather"
        f"<|tool_call:args|>{WRITTEN}<|tool_call:end|><|tool_call:begin|>a2<|tool_call:name|>now"
        "<|tool_call:args|>{}<|tool_call:end|><|calls|>",
    ),
    "Functionary 3.1": (
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        f"<think>so</think>look<function=weather>{WRITTEN}</function><function=now>{{}}</function>"
        "<|eom_id|>",
    ),
    "Llama 3": (
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        f'{{"name": "weather", "parameters": {WRITTEN}}}; {{"name": "now", "parameters": {{}}}}'
        "<|eot_id|>",
    ),
    "Llama 4": (
        "<|header_start|>assistant<|header_end|>\n\n",
        f'<|python_start|>[weather(place="{PLACE}", days=3), now()]<|python_end|><|eot|>',
    ),
}
"""Format → what the template writes before a turn, and a turn with reasoning, text and two
calls."""
BARE = ("Llama 3", "Llama 4")
"""Formats whose turns are only calls."""
SPECIAL = sorted(
    {
        *[
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|constrain|>",
            "<|turn>",
            "<|tool_call>",
            "<tool_call|>",
            "<|channel>",
            "<channel|>",
            "<|tool_response>",
            '<|"|>',
            "<|im_start|>",
            "<|im_end|>",
            "<start_function_response>",
            "<escape>",
            "<start_function_call>",
            "<end_function_call>",
            "<|python_start|>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜User｜>",
            "<｜tool▁calls▁end｜>",
            "<｜end▁of▁sentence｜>",
            "<｜Assistant｜>",
            "<|tool_call_begin|>",
            "[/INST]",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
            "[TOOL_CALLS]",
            "<|tool_calls_section_begin|>",
            "[ARGS]",
            "<seed:eos>",
            "<|observation|>",
            "<|tool_call_start|>",
            "<|tools_prefix|>",
            "<|tools_suffix|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|eot|>",
            "<|python_end|>",
            "[e~[",
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
            "<|calls|>",
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            "<|END_OF_TURN_TOKEN|>",
            "<|function_call|>",
            "<|assistant|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|header_start|>",
            "<|header_end|>",
        ]
    }
)


@cache
def tokenizer_of(name: str) -> Any:
    """A tokenizer whose chat template has the marks of a format. Tests share it."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": SPECIAL})
    marks = next(one.marks for one in TURN_FORMATS if one.name == name)
    tokenizer.chat_template = "{# " + " ".join([*marks, TURNS[name][0]]) + " #}{{ tools }}"
    return tokenizer


def read(
    name: str, turn: str, before: str = "", tools: Any = TOOLS, thinks: bool = True
) -> tuple[Any, bool]:
    """Read a turn.

    Args:
        thinks: whether the template may begin the reasoning.
    """
    tokenizer = tokenizer_of(name)
    start = TURNS[name][0] if thinks else TURNS[name][0].partition("<think>")[0]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (f"{before}{start}", turn)]
    plain = tokenizer.decode(ids[1], skip_special_tokens=True)
    return ResponseReader(tokenizer).read(*ids, plain, tools)


def test_every_format_is_tried() -> None:
    assert set(TURNS) == {one.name for one in TURN_FORMATS}
    assert {start for start, _ in TURNS.values()} <= {
        start + think for start in STARTS for think in ("", "<think>", "<think>\n")
    }


@pytest.mark.parametrize("name", TURNS)
def test_calls_reasoning_and_text_are_read(name: str) -> None:
    assert format_name(tokenizer_of(name)) == f"the format of {name}"
    message, parsed = read(name, TURNS[name][1], before="<|im_start|>user\nq ")
    assert parsed
    found = [call["function"] for call in message["tool_calls"]]
    assert [(one["name"], json.loads(one["arguments"])) for one in found] == CALLS
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    said = ("", None) if name in BARE else ("look", "so")
    assert (message["content"], message.get("reasoning")) == said


@pytest.mark.parametrize("name", TURNS)
def test_a_call_that_was_cut_is_no_call(name: str) -> None:
    turn = TURNS[name][1]
    place = turn.index("place") + len("place") if "place" in turn else 0
    for end in range(place, turn.index("3", turn.index("4820")) + 1):
        message, _ = read(name, turn[:end])
        assert not message.get("tool_calls"), turn[:end]


@pytest.mark.parametrize("name", TURNS)
def test_no_call_is_read_if_no_tool_was_offered(name: str) -> None:
    message, _ = read(name, TURNS[name][1], tools=None)
    assert "tool_calls" not in message


@pytest.mark.parametrize("name", TURNS)
def test_a_text_stays_a_text(name: str) -> None:
    message, parsed = read(name, "It is [sunny] {now}, (a) 3 < 4.", thinks=False)
    assert parsed and message == {
        "role": "assistant",
        "content": "It is [sunny] {now}, (a) 3 < 4.",
    }


def test_a_turn_after_the_answer_of_a_tool_has_no_earlier_call() -> None:
    earlier = TURNS["Gemma 4"][1] + "response:weather{value:1}<tool_response|>"
    tokenizer = deepcopy(tokenizer_of("Gemma 4"))
    tokenizer.add_special_tokens({"extra_special_tokens": [*SPECIAL, "<tool_response|>"]})
    tokenizer.chat_template += "{# <tool_response|> #}"
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (earlier, "fine")]
    assert ResponseReader(tokenizer).read(*ids, "fine", TOOLS)[0]["content"] == "fine"


def test_a_prompt_without_a_known_start_is_no_part_of_the_turn() -> None:
    tokenizer = tokenizer_of("Qwen3-Coder, Qwen3.5 and Nemotron 3")
    turn = TURNS["Qwen3-Coder, Qwen3.5 and Nemotron 3"][1].removesuffix("<|im_end|>")
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (f"{turn} bot:", "fine")]
    assert ResponseReader(tokenizer).read(*ids, "fine", TOOLS)[0]["content"] == "fine"
    ids[0] += tokenizer.encode("<think>\n", add_special_tokens=False)
    ids[1] = tokenizer.encode("why</think>fine", add_special_tokens=False)
    message, _ = ResponseReader(tokenizer).read(*ids, "why</think>fine", TOOLS)
    assert (message["content"], message["reasoning"]) == ("fine", "why")


def test_only_the_final_channel_of_gpt_oss_is_text() -> None:
    final = "<|channel|>final<|message|>It is sunny.<|return|>"
    assert read("gpt-oss", final) == ({"role": "assistant", "content": "It is sunny."}, True)


def test_the_empty_reasoning_of_a_turn_is_no_text() -> None:
    name = "Hermes, Qwen 2.5 and Qwen3"
    assert read(name, "<think>\n\n</think>\n\nfine<|im_end|>")[0]["content"] == "fine"


def test_mistrals_ids_have_nine_letters_and_digits() -> None:
    message, _ = read("Mistral", TURNS["Mistral"][1])
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in message["tool_calls"])


def test_ids_that_the_model_wrote_stay() -> None:
    message, _ = read("Kimi K2", TURNS["Kimi K2"][1])
    assert [call["id"] for call in message["tool_calls"]] == [
        "functions.weather:4",
        "functions.now:5",
    ]


COMMAND_CALL = (
    '<|START_ACTION|>[{"tool_call_id": "ID", "tool_name": "now", "parameters": {}}]<|END_ACTION|>'
)
KIMI_CALL = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("name", "turn", "kept"),
    [
        ("Kimi K2", KIMI_CALL * 2, ["functions.now:0", None]),
        ("Mistral", "[TOOL_CALLS]now[CALL_ID]x[ARGS]{}", [None]),
        ("Mistral", '[TOOL_CALLS][{"name":"now","arguments":{},"id":"bad id 12"}]', [None]),
        ("Mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}" * 2, ["abcdefghi", None]),
        ("Mistral", "[TOOL_CALLS]now[CALL_ID]000001001[ARGS]{}[TOOL_CALLS]now{}", [None, None]),
        ("Command R7B and Command A", COMMAND_CALL.replace("ID", ""), [None]),
        ("Command R7B and Command A", COMMAND_CALL.replace("ID", "\\n"), [None]),
        ("Command R7B and Command A", COMMAND_CALL.replace("ID", "7"), ["7"]),
    ],
)
def test_an_id_that_is_not_new_or_not_usable_becomes_ours(
    name: str, turn: str, kept: list[str | None]
) -> None:
    message, parsed = read(name, turn)
    ids = [call["id"] for call in message["tool_calls"]]
    assert parsed and len(set(ids)) == len(ids) == len(kept)
    tokenizer = tokenizer_of(name)
    place = len(tokenizer.encode(TURNS[name][0], add_special_tokens=False))
    form = f"{place:06d}{{:03d}}" if name == "Mistral" else f"call_{place}_{{}}"
    assert ids == [own or form.format(number) for number, own in enumerate(kept)]


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        ("{{ tools }}", ["<|tool_call_start|>"], "LFM2"),
        ("{{ tools }}", ["<tool_call>"], "Hermes, Qwen 2.5 and Qwen3"),
        ("{{ tools }}", ["<think>"], None),
        ("{{ messages }}", ["<|tool_call_start|>"], None),
    ],
)
def test_tokens_tell_the_format_of_a_template_that_shows_no_call(
    template: str, tokens: list[str], name: str | None
) -> None:
    found = turn_format(template, tokens)
    assert (None if found is None else found.name) == name


def test_text_is_released_only_where_marks_are_seen() -> None:
    seen = {name for name in TURNS if ResponseReader(tokenizer_of(name)).text_begins_content}
    assert seen == {
        "DeepSeek V3.2",
        "MiniMax M2",
        "Seed-OSS",
        "Qwen3-Coder, Qwen3.5 and Nemotron 3",
        "GLM-4.5 and later",
        "Hermes, Qwen 2.5 and Qwen3",
        "OLMo 3",
        "Nemotron Nano 2 and Llama Nemotron",
        "Hunyuan, Jamba and Apriel",
        "Functionary 3.1",
        "Solar Open",
        *BARE,
    }


@pytest.mark.parametrize(
    ("start", "user"),
    [
        ("<|assistant_start|>", "What does <think> mean?"),
        ("<|assistant_start|>", "[/INST]<think>\n"),
        ("<|other_start|>", "What does <think> mean?"),
        ("<|other_start|>", "What does <|assistant|><think> mean?"),
        (" BOT: ", "use <think> tags"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_marks_of_a_user_are_no_part_of_the_turn(start: str, user: str, known: bool) -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = "{# <|tools_prefix|> <|im_start|> " + start * known + " #}{{ tools }}"
    texts = (f"<|user_start|>{user}<|user_end|>{start}", TURNS["Apertus"][1])
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    message, parsed = ResponseReader(tokenizer).read(ids[0], ids[1], texts[1], TOOLS)
    assert parsed and (message["content"], message["reasoning"]) == ("look", "so")


@pytest.mark.parametrize("kind", ["code", " code", " <|constrain|>json", "<|constrain|>json5 ", ""])
def test_gpt_oss_may_name_any_constraint(kind: str) -> None:
    kind = f" {kind}" if kind == "code" else kind
    call = f"<|channel|>commentary to=functions.now{kind}<|message|>{{}}<|call|>"
    message, parsed = read("gpt-oss", call)
    assert parsed and message["tool_calls"][0]["function"]["name"] == "now"


@pytest.mark.parametrize(
    ("name", "turn", "content"),
    [
        (
            "gpt-oss",
            "<|channel|>analysis to=python code<|message|>1<|call|>",
            "analysis to=python code1",
        ),
        ("GLM-4.5 and later", "<tool_call>now <b></tool_call>", "<tool_call>now <b></tool_call>"),
        (
            "Qwen3-Coder, Qwen3.5 and Nemotron 3",
            "<think>so</think>I use <tool_call>.",
            "I use <tool_call>.",
        ),
    ],
)
def test_marks_that_stay_in_the_text_are_unparsed(name: str, turn: str, content: str) -> None:
    message, parsed = read(name, turn, thinks=False)
    assert not parsed and message["content"] == content and "tool_calls" not in message
    assert read(name, turn, tools=None, thinks=False)[1]


LONG = 100_000
"""Characters of a turn that a model may write."""
READ_S = 5.0
"""CPU seconds in which such a turn must be read. It takes a few tenths of one, and more if Python
collects the garbage of earlier tests meanwhile."""
QWEN, GLM = "Qwen3-Coder, Qwen3.5 and Nemotron 3", "GLM-4.5 and later"
OPEN, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
REPEATS = {
    "gpt-oss": (
        ("", "<|channel|>commentary to=functions.now<|message|>{}<|call|>", ""),
        ("", "to=functions.a", ""),
        ("<|channel|>", "a", " to=functions."),
    ),
    "Gemma 4": (
        ("", "<|tool_call>call:", ""),
        ("", "<|tool_call>call:now{}<tool_call|>", ""),
        ("<|tool_call>call:now{", 'k:<|"|>v<|"|>,', "}<tool_call|>"),
        ("<|tool_call>call:now{k:", " ", "<tool_call|>"),
        ("", '<|tool_call>call:now{k:<|"|><tool_call|>', ""),
    ),
    "FunctionGemma": (("", "<start_function_call>call:", ""),),
    "DeepSeek V3 and R1": (
        ("", f"{OPEN}function{SEP}", ""),
        (f'{OPEN}function{SEP}now\n```json\n{{"a": "', " ", '"}\n```<｜tool▁call▁end｜>'),
        (f"{OPEN}function{SEP}now\n```json\n", "``` ", "<｜tool▁call▁end｜>"),
    ),
    "DeepSeek V3.1": (("", f"{OPEN}now{SEP}{{}}<｜tool▁call▁end｜>", ""), ("", OPEN, "")),
    "DeepSeek V3.2": (
        ("", '<｜DSML｜invoke name="', ""),
        ("", "<｜DSML｜a>", ""),
        ('<｜DSML｜invoke name="now">', '<｜DSML｜parameter name="a">', "</｜DSML｜invoke>"),
    ),
    "Kimi K2": (("<|tool_call_begin|>", " ", ""), ("", "<|tool_call_begin|>", "")),
    "MiniMax M2": (
        ("", "<invoke name=", ""),
        ('<invoke name="now">', '<parameter name="a">', "</invoke>"),
    ),
    "Seed-OSS": (
        ("<seed:tool_call><function=now>", "<parameter=a>", "</function></seed:tool_call>"),
    ),
    QWEN: (
        ("<tool_call><function=now>", "<parameter=a>", "</function></tool_call>"),
        ("<tool_call><function=now>", "</function>", "</tool_call>"),
        ("<tool_call><function=now></function>", " ", "</tool_call>"),
        ("", "<tool_call><function=now></function></tool_call>", ""),
        ("<tool_call>", " ", ""),
        ("", "<tool_call><function=now><parameter=a></function></tool_call>", ""),
        ("<tool_call><function=now><parameter=a>", "</function></tool_call>", "</parameter>"),
        ("<tool_call><function=now><parameter=a>", "[", "</parameter></function></tool_call>"),
    ),
    GLM: (
        ("<tool_call>now", "<arg_key>a</arg_key><arg_value>", "</tool_call>"),
        ("<tool_call>now", "<arg_key>", "</tool_call>"),
        ("<tool_call>", "a", ""),
    ),
    "Hermes, Qwen 2.5 and Qwen3": (
        ("", '<tool_call>{"name":"now","arguments":{}}</tool_call>', ""),
        ("", "<tool_call>", ""),
        ('<tool_call>{"name":"now","arguments":', "[", "</tool_call>"),
        ("", '<tool_call>{"a":"</tool_call>', ""),
        ("", '<tool_call>["</tool_call>",1,"', ""),
        ("", "a<|im_end|>", ""),
    ),
    "LFM2": (
        ("<|tool_call_start|>[", "now(),", "]<|tool_call_end|>"),
        ("<|tool_call_start|>[now(a=", "'a", ")]<|tool_call_end|>"),
        ("<|tool_call_start|>[now(a='", "' ", "x)]<|tool_call_end|>"),
        ("<|tool_call_start|>[now(a=", "1", ")]<|tool_call_end|>"),
        ("", "<|tool_call_start|>[now(a='<|tool_call_end|>", ""),
    ),
    "OLMo 3": (("<function_calls>now(", " ", "</function_calls>"),),
    "Mistral": (
        ("[TOOL_CALLS]a", " ", "x"),
        ("[TOOL_CALLS]", "a.", ""),
        ("", "[TOOL_CALLS]now[ARGS]{}", ""),
        ("", "[TOOL_CALLS] ", ""),
    ),
    "Phi-4-mini and Granite 3": (
        ("", "functools", ""),
        ("", '<|tool_call|>[{"name":"now","arguments":{}}]<|/tool_call|>', ""),
    ),
    "Command R7B and Command A": (("", "<|START_RESPONSE|>a<|END_RESPONSE|>", ""),),
    "Nemotron Nano 2 and Llama Nemotron": (("", "<TOOLCALL>", ""),),
    "Hunyuan, Jamba and Apriel": (("", "<tool_calls>", ""),),
    "Apertus": (("", "<|tools_prefix|>", ""),),
    "GigaChat 3": (("", "<|function_call|>", ""),),
    "Solar Open": (("", "<|tool_call:begin|>", ""),),
    "Functionary 3.1": (("", "<function=", ""), ("", "<function=now>{}</function>", "")),
    "Llama 3": (
        ("", '{"name":"now","parameters":{}};', ""),
        ("<|python_tag|>", " ", ""),
        ("[", " ", ""),
    ),
    "Llama 4": (("<|python_start|>", " ", ""), ("", "[", "")),
}
"""Format → what a turn begins with, what it repeats, and what it ends with."""
ANY_REPEATS = (("", " ", "x"), ("a", "\n", "x"), ("", "<think>", ""), ("", "</think>", ""))


@pytest.mark.parametrize("name", TURNS)
def test_a_long_turn_is_read_in_time(name: str) -> None:
    tokenizer = tokenizer_of(name)
    reader = ResponseReader(tokenizer)
    start = tokenizer.encode(TURNS[name][0].partition("<think>")[0], add_special_tokens=False)
    for begin, repeat, end in (*ANY_REPEATS, *REPEATS[name]):
        turn = begin + repeat * ((LONG - len(begin + end)) // len(repeat)) + end
        ids = tokenizer.encode(turn, add_special_tokens=False)
        began = time.process_time()
        reader.read(start, ids, turn, TOOLS)
        assert time.process_time() - began < READ_S, (begin, repeat, end)


class Counted:
    """A pattern that counts the characters that it searches."""

    def __init__(self, pattern: Any, add: Callable[[int], None]) -> None:
        self.pattern, self.add = pattern, add

    def search(self, text: str, place: int, timeout: float) -> Any:
        found = self.pattern.search(text, place)
        self.add((len(text) if found is None else found.end()) - place)
        return found


@pytest.mark.parametrize("name", ["Hermes, Qwen 2.5 and Qwen3", "gpt-oss", QWEN])
def test_each_pattern_searches_a_turn_once(name: str) -> None:
    searched: list[int] = []
    tokenizer = tokenizer_of(name)
    reader = ResponseReader(tokenizer)
    template = reader._template
    patterns = ("open_re", "close_re")
    fields = {
        key: replace(
            field,
            **{
                one: Counted(pattern, searched.append)
                for one in patterns
                if (pattern := getattr(field, one)) is not None
            },
        )
        for key, field in template.fields.items()
    }
    reader._template = replace(template, fields=fields)
    turn = TURNS[name][1] * (MOST_CALLS // len(CALLS))
    ids = tokenizer.encode(turn, add_special_tokens=False)
    message, parsed = reader.read([], ids, turn, TOOLS)
    assert parsed and len(message["tool_calls"]) == MOST_CALLS  # type: ignore[arg-type]
    assert sum(searched) <= len(patterns) * len(fields) * len(turn)


def test_a_turn_with_too_many_calls_is_text() -> None:
    turn = '<tool_call>{"name": "now", "arguments": {}}</tool_call>' * (MOST_CALLS + 1)
    message, parsed = read("Hermes, Qwen 2.5 and Qwen3", turn)
    assert not parsed and message == {"role": "assistant", "content": turn}


WRONG_TAGS = {
    QWEN: (
        "<tool_call>\n<function=weather>\n{}\n</function>\n</tool_call>",
        "<parameter=place>\nWien\n<parameter=days>\n3\n</parameter>",
        "<parameter=place>\nWien\n</parameter>\n<parameter=days>3",
        "<parameter=place>\nWien</place>",
        "place: Wien",
        '{"place": "Wien"}',
        "<parameter=place>\na</parameter>b\n</parameter>",
    ),
    GLM: (
        "<tool_call>weather\n{}\n</tool_call>",
        "<arg_key>place</arg_key>\n<arg_value>Wien",
        "<arg_key>place</arg_key><arg_value>Wien<arg_key>days</arg_key><arg_value>3</arg_value>",
        "<arg_key>place</arg_key>Wien",
        "<arg_key>place</arg_key><arg_value>Wien</arg_value> and",
    ),
    "MiniMax M2": (
        '<minimax:tool_call>\n<invoke name="weather">\n{}\n</invoke>\n</minimax:tool_call>',
        '<parameter name="place">Wien',
        "Wien",
    ),
    "Seed-OSS": (
        "<seed:tool_call>\n<function=weather>\n{}\n</function>\n</seed:tool_call>",
        "<parameter=place>Wien",
    ),
    "DeepSeek V3.2": (
        '<｜DSML｜function_calls><｜DSML｜invoke name="weather">{}</｜DSML｜invoke>',
        '<｜DSML｜parameter name="place" string="true">Wien',
    ),
}
"""Format → a call, and what is not all in tags."""


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        (name, call.replace("{}", body, 1))
        for name, (call, *bodies) in WRONG_TAGS.items()
        for body in bodies
    ],
)
def test_a_call_whose_arguments_are_not_all_in_tags_is_text(name: str, turn: str) -> None:
    assert read(name, turn, thinks=False) == (
        {"role": "assistant", "content": decoded(name, turn)},
        False,
    )


QUOTED = {
    QWEN: "<tool_call><function=@weather@><parameter=@place@>x</parameter></function></tool_call>",
    GLM: "<tool_call>@weather@<arg_key>@place@</arg_key><arg_value>x</arg_value></tool_call>",
    "MiniMax M2": (
        "<minimax:tool_call><invoke name=@weather@><parameter name=@place@>x</parameter></invoke>"
        "</minimax:tool_call>"
    ),
    "Seed-OSS": (
        "<seed:tool_call><function=@weather@><parameter=@place@>x</parameter></function>"
        "</seed:tool_call>"
    ),
    "Functionary 3.1": '<function=@weather@>{"place": "x"}</function>',
}
"""Format → a call whose names may have quotes around them."""


@pytest.mark.parametrize("quote", ['"', "'", ""])
@pytest.mark.parametrize("name", QUOTED)
def test_quotes_around_a_name_are_no_part_of_it(name: str, quote: str) -> None:
    message, parsed = read(name, QUOTED[name].replace("@", quote), thinks=False)
    (call,) = message["tool_calls"]
    assert parsed and call["function"] == {"name": "weather", "arguments": '{"place": "x"}'}


def decoded(name: str, text: str) -> Any:
    """A text without special tokens."""
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{my-key:1,place:<|"|>a,b:{c}<|"|>}', {"my-key": 1, "place": "a,b:{c}"}),
        (
            '{place:Bad Ischl, o:{k:[1,<|"|>x<|"|>,null]}}',
            {"place": "Bad Ischl", "o": {"k": [1, "x", None]}},
        ),
        ('{"place": "a\\nb", ok: true}', {"place": "a\nb", "ok": True}),
        ("{}", {}),
        ("{place:}", None),
        ("{place}", None),
        ('{place:<|"|>a}', None),
        ("{place:{a:1}", None),
        ("{a:1} b", None),
        ("{a:" + "[" * 40 + "]" * 40 + "}", None),
    ],
)
def test_gemmas_arguments(body: str, arguments: Any) -> None:
    message, parsed = read("Gemma 4", f"<|tool_call>call:weather{body}<tool_call|>")
    assert parsed is (arguments is not None)
    calls: Any = message.get("tool_calls", [])
    assert [json.loads(call["function"]["arguments"]) for call in calls] == (
        [] if arguments is None else [arguments]
    )
