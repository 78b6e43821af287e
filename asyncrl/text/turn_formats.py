"""How families of models write turns: their tool calls, their reasoning, and where a turn begins.

Each format is a response template of transformers, found by what the chat template of a model
contains. The texts are those that the models write, as vLLM's tool parsers read them.

A model may write anything, and long. So no pattern begins with a repeat, repeats keep what they
have matched (`*+`), and names are short: then a search takes time in proportion to the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.text.call_texts import (
    Reads,
    bare_arguments,
    json_arguments,
    json_calls,
    json_or_python_calls,
    named_calls,
    python_calls,
    tagged_arguments,
    whole,
)

TAKES_TOOLS = re.compile(r"\btools\b")
"""What a chat template that shows tools to the model contains."""

STARTS = (
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|header_start|>assistant<|header_end|>\n\n",
    "<|start_of_role|>assistant<|end_of_role|>",
    "<|im_assistant|>assistant<|im_middle|>",
    "<|start|>assistant",
    "<|assistant|>",
    "<|assistant_start|>",
    "<|turn>model\n",
    "<start_of_turn>model\n",
    "<｜Assistant｜>",
    "<seed:bos>assistant\n",
    "<|CHATBOT_TOKEN|>",
    "<SPECIAL_11>Assistant\n",
    "<|begin_assistant|>\n",
    "]~b]ai\n",
    "[/INST]",
    # A turn that goes on after the answers of tools.
    "[/TOOL_RESULTS]",
    "<tool_response|>",
    "<end_function_response>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁end｜>",
)
"""What templates write before an assistant's turn, in any format."""
CALL_MARK = re.compile(r"[<\[｜].*(?:call|function|dsml|arg_key)", re.IGNORECASE)
FIRST_MARK = re.compile(r"<[^>]+>|\[[^\]]+\]|\]~b\]")


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """How a family of models writes its turns."""

    name: str
    marks: tuple[str, ...]
    """Texts of its chat templates. A template with all of them has this format."""
    fields: Mapping[str, Mapping[str, Any]]
    """The `fields` of the response template for transformers."""
    opening: str
    """The first text of a call."""
    closing: str = ""
    """The last text of a call. Without it, the call was cut. If it is "", the call's arguments show
    whether it was cut."""
    last: str = ""
    """What may follow the last call of a turn."""
    before: str = ""
    """The text before the arguments of a call without a last text. A turn with nothing after it was
    cut, unless a special token ends it."""
    calls: Reads | None = None
    """Reads calls from the text that the field `tool_calls` found. None if that field already gives
    calls."""
    between: str = ""
    """A pattern for what may be between the parts of a turn whose content is marked, too."""
    begins_with_word: bool = False
    """Whether a call may begin with a word, so that the text before it is not known to be one."""
    short_ids: bool = False
    """Whether the chat template takes only ids of nine letters and digits."""

    @property
    def response_template(self) -> dict[str, Any]:
        """The response template that transformers takes."""
        return {"start_anchor": list(STARTS), "fields": {**self.fields}}

    @property
    def marked_content(self) -> bool:
        """Whether texts mark the content of a turn, not only its reasoning and its calls."""
        return bool({"open", "open_pattern"} & set(self.fields["content"]))

    @property
    def attempts(self) -> tuple[str, ...]:
        """Texts that only a call has. Where nothing was read from one, a call was lost."""
        marks = dict.fromkeys([self.opening, *filter(CALL_MARK.match, self.marks)])
        return tuple(mark for mark in marks if len(mark) > 1)

    @property
    def body(self) -> Reads:
        """Reads a call after its opening, up to its closing."""
        if self.calls is not None:
            return self.calls
        field = self.fields["tool_calls"]
        return READERS[field["content"]](field.get("content_args", {}))


JSON, TAGS, BARE_KEYS = "asyncrl-json", "asyncrl-tags", "asyncrl-bare-keys"
READERS: Mapping[str, Callable[[Mapping[str, str]], Reads]] = {
    JSON: lambda _: json_arguments,
    TAGS: lambda tags: partial(tagged_arguments, tags=tags),
    BARE_KEYS: lambda marks: partial(bare_arguments, marks=marks),
}
"""How arguments are read, by the name of the content parser."""


def _parser(name: str) -> Callable[[str, Mapping[str, str]], Any]:
    return lambda text, given: whole(READERS[name](given), text)


ARGUMENT_PARSERS: Mapping[str, Callable[[str, Mapping[str, str]], Any]] = {
    name: _parser(name) for name in READERS
}
"""Content parsers of these formats, which transformers does not have."""
THINK: Mapping[str, Any] = {
    "open": "<think>",
    "close": "</think>",
    "repeats": True,
    "join": "\n",
}
REST: Mapping[str, Any] = {"repeats": True}
REST_NAME = "rest"
"""The field of what is outside all parts of a turn."""
REASONING_ONLY = TurnFormat(
    "reasoning in special tokens", (), {"reasoning": THINK, "content": REST}, ""
)
"""The format of a model without another one, if its text hides the marks of its reasoning."""
NAMED = {
    "type": "function",
    "function": {"name": "{name}", "arguments": "{content}"},
}


def _json(opening: str, closing: str, **calls: Any) -> dict[str, Mapping[str, Any]]:
    """Fields of a format whose calls have a name in `opening`, and JSON up to `closing`. Both are
    patterns."""
    return {
        "reasoning": THINK,
        "tool_calls": {
            "open_pattern": opening,
            "close_pattern": closing,
            "content": JSON,
            "repeats": True,
            "transform": NAMED,
            **calls,
        },
        "content": REST,
    }


def _tagged(
    opening: str, closing: str, tags: Mapping[str, str], think: str = "think"
) -> dict[str, Mapping[str, Any]]:
    """Fields of a format whose calls have a name in `opening` and a tag for each argument. Both are
    patterns. The schemas of the tools give the types of the values."""
    fields = _json(opening, closing, content=TAGS, content_args=tags)
    return {**fields, "reasoning": {**THINK, "open": f"<{think}>", "close": f"</{think}>"}}


def _listed(opening: str, closing: str | None = None) -> dict[str, Mapping[str, Any]]:
    """Fields of a format whose calls are one text between two patterns."""
    end = {} if closing is None else {"close_pattern": closing}
    calls = {"open_pattern": opening, **end, "repeats": True}
    return {"reasoning": THINK, "tool_calls": calls, "content": REST}


def _gemma(opening: str, closing: str, quote: str) -> dict[str, Mapping[str, Any]]:
    """Fields of a format whose calls are JSON with bare keys, and with texts in quotes of its
    own. A call without arguments may have no JSON."""
    name, end = r"(?P<name>[^{<\n]{1,256}+)(?=\{)|(?P<name>[\w.-]{1,256}+)", re.escape(closing)
    pattern = rf"{re.escape(opening)}call:(?:{name}(?={end}))"
    return _json(pattern, end, content=BARE_KEYS, content_args={"quote": quote})


PARAMETER = {
    "head": r"<parameter=(?P<key>[^<>\n]{1,256}+)>\n?",
    "mark": "<parameter=",
    "end": "</parameter>",
    "broken": "</param",
    "trim": "\n",
}
FUNCTION = r"\s*+<function=(?P<name>[^<>\n]{1,256}+)>"
BARE = (
    r"\A\s*+(?:<\|python_(?:tag|start)\|>\s*+)?"
    r"(?=\[?+\s*+\{\s*+\"(?:name|type|function|arguments|parameters)\"\s*+:|\[\s*+[A-Za-z_][\w.]{0,255}+\()"
)
"""Where a turn that is nothing but calls begins."""
LLAMA = _listed(BARE, r"<\|python_end\|>")

TURN_FORMATS = (
    TurnFormat(
        "gpt-oss",
        ("<|start|>", "<|channel|>", "<|call|>"),
        {
            "reasoning": {
                "open": "<|channel|>analysis<|message|>",
                "close": "<|end|>",
                "repeats": True,
                "join": "\n",
            },
            "tool_calls": {
                "open_pattern": (
                    r"(?:<\|channel\|>\w{1,32}+ to=functions\.(?P<name>[^\s<]{1,256}+)"
                    r"|to=functions\.(?P<name>[^\s<]{1,256}+)<\|channel\|>\w{1,32}+)"
                    r"(?:\s*+<\|constrain\|>)?\s*+\w*+\s*+<\|message\|>"
                ),
                "close": "<|call|>",
                "content": JSON,
                "repeats": True,
                "transform": NAMED,
            },
            "content": {
                "open_pattern": r"<\|channel\|>(?:final|commentary)(?:\s*+<\|constrain\|>\w++)?"
                r"<\|message\|>",
                "close": ["<|end|>", "<|return|>"],
                "repeats": True,
            },
            REST_NAME: REST,
        },
        "to=functions.",
        before="<|message|>",
        between=r"<\|start\|>assistant|<\|(?:end|return|call)\|>|<\|channel\|>\w*+\s*+\Z",
    ),
    TurnFormat(
        "Gemma 4",
        ("<|tool_call>", "<|turn>"),
        {
            **_gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
            "reasoning": {
                "open_pattern": r"<\|channel>(?:thought)?\n?",
                "close": "<channel|>",
                "repeats": True,
                "join": "\n",
            },
        },
        "<|tool_call>",
        "<tool_call|>",
    ),
    TurnFormat(
        "FunctionGemma",
        ("<start_function_call>",),
        _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        "<start_function_call>",
        "<end_function_call>",
    ),
    TurnFormat(
        "DeepSeek V3 and R1",
        ("<｜tool▁sep｜>", "```json"),
        _json(
            r"(?:<｜tool▁calls▁begin｜>\s*+)?<｜tool▁call▁begin｜>\w*+<｜tool▁sep｜>"
            r"(?P<name>[^<\n]{1,256}+)\n?+(?:```(?:json)?+\n|(?=\s*+<｜tool▁call▁end｜>))",
            r"(?:```\s*+)?+<｜tool▁call▁end｜>(?:\s*+<｜tool▁calls▁end｜>)?",
        ),
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    TurnFormat(
        "DeepSeek V3.1",
        ("<｜tool▁sep｜>",),
        _json(
            r"(?:<｜tool▁calls▁begin｜>\s*+)?<｜tool▁call▁begin｜>(?P<name>[^<]{1,256}+)<｜tool▁sep｜>",
            r"<｜tool▁call▁end｜>(?:\s*+<｜tool▁calls▁end｜>)?",
        ),
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    TurnFormat(
        "DeepSeek V3.2",
        ("｜DSML｜",),
        _tagged(
            r"(?:<｜DSML｜\w++>\s*+)?<｜DSML｜invoke name=\"(?P<name>[^\"<]{1,256}+)\">",
            r"</｜DSML｜invoke>(?:\s*+</｜DSML｜(?!invoke|parameter)\w++>)?",
            {
                "head": r"<｜DSML｜parameter name=\"(?P<key>[^\"<]{1,256}+)\""
                r"(?: string=\"(?P<kind>\w{1,8}+)\")?[^<>]{0,256}+>",
                "mark": "<｜DSML｜parameter ",
                "end": "</｜DSML｜parameter>",
                "broken": "</｜DSML｜p",
                "trim": "",
            },
        ),
        "<｜DSML｜invoke",
        "</｜DSML｜invoke>",
    ),
    TurnFormat(
        "Kimi K2",
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        _json(
            r"(?:<\|tool_calls_section_begin\|>\s*+)?<\|tool_call_begin\|>\s*+"
            r"(?P<id>(?:functions\.)?(?P<name>[^\s:<]{1,256}+):\d{1,9}+)\s*+"
            r"<\|tool_call_argument_begin\|>",
            r"<\|tool_call_end\|>(?:\s*+<\|tool_calls_section_end\|>)?",
            transform={"id": "{id}", **NAMED},
        ),
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    TurnFormat(
        "MiniMax M2",
        ("<minimax:tool_call>",),
        _tagged(
            r"(?:<minimax:tool_call>\s*+)?<invoke name=\"?(?P<name>[^\"<>\n]{1,256}+)\"?>",
            r"</invoke>(?:\s*+</minimax:tool_call>)?",
            {
                "head": r"<parameter name=\"?(?P<key>[^\"<>\n]{1,256}+)\"?>",
                "mark": "<parameter name=",
                "end": "</parameter>",
                "broken": "</param",
                "trim": "",
            },
        ),
        "<invoke",
        "</invoke>",
    ),
    TurnFormat(
        "Seed-OSS",
        ("<seed:tool_call>",),
        _tagged(
            "<seed:tool_call>" + FUNCTION,
            r"</function>\s*+</seed:tool_call>",
            PARAMETER,
            "seed:think",
        ),
        "<seed:tool_call>",
        "</seed:tool_call>",
    ),
    TurnFormat(
        "Qwen3-Coder, Qwen3.5 and Nemotron 3",
        ("<tool_call>", "<function="),
        _tagged("<tool_call>" + FUNCTION, r"</function>\s*+</tool_call>", PARAMETER),
        "<tool_call>",
        "</tool_call>",
    ),
    TurnFormat(
        "GLM-4.5 and later",
        ("<tool_call>", "<arg_key>"),
        _tagged(
            r"<tool_call>\s*+(?P<name>[^\s<]{1,256}+)\s*+(?=<arg_key>|</tool_call>)",
            "</tool_call>",
            {
                "head": r"<arg_key>(?P<key>[^<]{1,256}+)</arg_key>\s*+<arg_value>",
                "mark": "<arg_key>",
                "end": "</arg_value>",
                "broken": "</arg_",
                "trim": "",
            },
        ),
        "<tool_call>",
        "</tool_call>",
    ),
    TurnFormat(
        "Hunyuan, Jamba and Apriel",
        ("<tool_calls>",),
        _listed("<tool_calls>", "</tool_calls>"),
        "<tool_calls>",
        calls=json_calls,
    ),
    TurnFormat(
        "Hermes, Qwen 2.5 and Qwen3",
        ("<tool_call>",),
        {
            **_listed("<tool_call>", "</tool_call>"),
            "content": {"close": "<|im_end|>", "repeats": True},
        },
        "<tool_call>",
        calls=json_calls,
    ),
    *(
        TurnFormat(
            "LFM2",
            (mark,),
            _listed(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"),
            "<|tool_call_start|>",
            "<|tool_call_end|>",
            calls=json_or_python_calls,
        )
        for mark in ("<|tool_call_start|>", "<|tool_list_start|>")
    ),
    TurnFormat(
        "OLMo 3",
        ("<function_calls>",),
        _listed("<function_calls>", "</function_calls>"),
        "<function_calls>",
        "</function_calls>",
        calls=python_calls,
    ),
    TurnFormat(
        "Mistral",
        ("[TOOL_CALLS]",),
        {
            **_listed(r"\[TOOL_CALLS\]"),
            "reasoning": {**THINK, "open": "[THINK]", "close": "[/THINK]"},
        },
        "[TOOL_CALLS]",
        before="[ARGS]",
        calls=named_calls,
        short_ids=True,
    ),
    *(
        TurnFormat(
            "Phi-4-mini and Granite 3",
            (mark,),
            _listed(r"<\|tool_call\|>|functools(?=\[)", r"<\|/tool_call\|>"),
            "<|tool_call|>",
            calls=json_calls,
            begins_with_word=True,
        )
        for mark in ("<|tool_call|>", "<|tool|>")
    ),
    TurnFormat(
        "Command R7B and Command A",
        ("<|START_ACTION|>",),
        {
            "reasoning": {
                "open": "<|START_THINKING|>",
                "close": "<|END_THINKING|>",
                "repeats": True,
                "join": "\n",
            },
            "tool_calls": {
                "open": "<|START_ACTION|>",
                "close": "<|END_ACTION|>",
                "repeats": True,
            },
            "content": {
                "open": ["<|START_RESPONSE|>", "<|START_TEXT|>"],
                "close": ["<|END_RESPONSE|>", "<|END_TEXT|>"],
                "repeats": True,
            },
            REST_NAME: REST,
        },
        "<|START_ACTION|>",
        calls=json_calls,
        between=r"<\|\w++\|>",
    ),
    TurnFormat(
        "Nemotron Nano 2 and Llama Nemotron",
        ("<TOOLCALL>",),
        _listed("<TOOLCALL>", "</TOOLCALL>"),
        "<TOOLCALL>",
        calls=json_calls,
    ),
    TurnFormat(
        "Apertus",
        ("<|tools_prefix|>",),
        {
            **_listed(r"<\|tools_prefix\|>", r"<\|tools_suffix\|>"),
            "reasoning": {**THINK, "open": "<|inner_prefix|>", "close": "<|inner_suffix|>"},
        },
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        calls=json_calls,
    ),
    TurnFormat(
        "GigaChat 3",
        ("<|function_call|>",),
        _listed(r"<\|function_call\|>"),
        "<|function_call|>",
        calls=json_calls,
    ),
    TurnFormat(
        "Solar Open",
        ("<|tool_call:begin|>",),
        _json(
            r"(?:<\|tool_calls\|>)?<\|tool_call:begin\|>(?P<id>[^<]{0,256}+)<\|tool_call:name\|>"
            r"(?P<name>[^<]{1,256}+)<\|tool_call:args\|>",
            r"<\|tool_call:end\|>",
            transform={"id": "{id}", **NAMED},
        ),
        "<|tool_call:begin|>",
        "<|tool_call:end|>",
    ),
    TurnFormat(
        "Functionary 3.1",
        ("<function=", "<|start_header_id|>"),
        _json(r"<function=(?P<name>[^<>\n]{1,256}+)>", "</function>"),
        "<function=",
        "</function>",
    ),
    TurnFormat(
        "Llama 3",
        ("<|start_header_id|>", "ipython", "tool_calls"),
        LLAMA,
        "{",
        calls=json_or_python_calls,
    ),
    TurnFormat(
        "Llama 4",
        ("<|header_start|>", "tool_calls"),
        LLAMA,
        "{",
        calls=json_or_python_calls,
    ),
)
"""Formats, tried in this order: the first whose marks a chat template has."""


def turn_format(chat_template: str, tokens: Iterable[str] = ()) -> TurnFormat | None:
    """The format of the models with this chat template. None: no format is known for it.

    Args:
        tokens: added ones of the tokenizer. They count if the template takes tools and shows
            nothing of how they are called.
    """
    found = _marked(chat_template)
    if found is None and TAKES_TOOLS.search(chat_template):
        found = _marked("\n".join([chat_template, *tokens]))
    return found


def starts_of(chat_template: str) -> list[str]:
    """The starts of turns whose first marks a chat template has. Those of other models may be in a
    user's message. Without any, all starts."""
    marks = {start: FIRST_MARK.match(start) for start in STARTS}
    known = [start for start, mark in marks.items() if mark and mark.group() in chat_template]
    return known or list(STARTS)


def _marked(text: str) -> TurnFormat | None:
    return next((one for one in TURN_FORMATS if all(mark in text for mark in one.marks)), None)
