"""How families of models write turns: their tool calls, their reasoning, and where a turn begins.

Each format is a response template of transformers, found by what the chat template of a model
contains. The texts are those that the models write, as vLLM's tool parsers read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.text.call_texts import (
    Calls,
    json_calls,
    json_or_python_calls,
    named_calls,
    python_calls,
)

__all__ = ["STARTS", "TAKES_TOOLS", "TURN_FORMATS", "TurnFormat", "turn_format"]

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


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """How a family of models writes its turns."""

    name: str
    marks: tuple[str, ...]
    """Texts of its chat templates. A template with all of them has this format."""
    fields: Mapping[str, Mapping[str, Any]]
    """Of a response template."""
    opening: str
    """The first text of a call."""
    closing: str = ""
    """The last text of a call. Without it, the call was cut. "": its arguments show that."""
    last: str = ""
    """What may follow the last call of a turn."""
    calls: Callable[[str], Calls] | None = None
    """Reads what the field `tool_calls` found. None: that is a call."""
    short_ids: bool = False
    """Whether the chat template takes only ids of nine letters and digits."""

    @property
    def response_template(self) -> dict[str, Any]:
        """As transformers takes it."""
        return {"start_anchor": list(STARTS), "fields": {**self.fields}}

    @property
    def marked_content(self) -> bool:
        """Whether texts mark the content, too."""
        return bool({"open", "open_pattern"} & set(self.fields["content"]))

    def was_cut(self, text: str) -> bool:
        """Whether the last call of a turn has no end."""
        return bool(self.closing) and text.rfind(self.opening) > text.rfind(self.closing)


THINK: Mapping[str, Any] = {
    "open": "<think>",
    "close": "</think>",
    "repeats": True,
    "join": "\n",
}
REST: Mapping[str, Any] = {"repeats": True}
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
            "content": "json",
            "repeats": True,
            "transform": NAMED,
            **calls,
        },
        "content": REST,
    }


def _tagged(
    opening: str, closing: str, argument: str, think: str = "think"
) -> dict[str, Mapping[str, Any]]:
    """Fields of a format whose calls have a name in `opening` and a tag for each argument. All are
    patterns. The schemas of the tools give the types of the values."""
    fields = _json(opening, closing, content="xml-inline", content_args={"tag_pattern": argument})
    return {**fields, "reasoning": {**THINK, "open": f"<{think}>", "close": f"</{think}>"}}


def _listed(opening: str, closing: str | None = None) -> dict[str, Mapping[str, Any]]:
    """Fields of a format whose calls are one text between two patterns."""
    end = {} if closing is None else {"close_pattern": closing}
    calls = {"open_pattern": opening, **end, "repeats": True}
    return {"reasoning": THINK, "tool_calls": calls, "content": REST}


def _gemma(opening: str, closing: str, quote: str) -> dict[str, Mapping[str, Any]]:
    """Fields of a format whose calls are JSON with bare keys, and with texts in quotes of its
    own."""
    lax = {"unquoted_keys": True, "string_delims": [[quote, quote]]}
    pattern = rf"{re.escape(opening)}call:(?P<name>[^{{]+)(?=\{{)"
    return _json(pattern, re.escape(closing), content_args=lax)


PARAMETER = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
FUNCTION = r"\s*<function=(?P<name>[^>\n]+)>"
BARE = (
    r"\A\s*(?:<\|python_(?:tag|start)\|>\s*)?"
    r"(?=\[?\s*\{\s*\"(?:name|type|function)\"\s*:|\[\s*[A-Za-z_][\w.]*\()"
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
                    r"(?:<\|channel\|>\w+ to=functions\.(?P<name>[^\s<]+)"
                    r"|to=functions\.(?P<name>[^\s<]+)<\|channel\|>\w+)"
                    r"\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>"
                ),
                "close": "<|call|>",
                "content": "json",
                "repeats": True,
                "transform": NAMED,
            },
            "content": {
                "open_pattern": r"<\|channel\|>(?:final|commentary)(?:\s*<\|constrain\|>\w+)?"
                r"<\|message\|>",
                "close": ["<|end|>", "<|return|>"],
                "repeats": True,
            },
        },
        "to=functions.",
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
            r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>\w*<｜tool▁sep｜>"
            r"(?P<name>[^\n]+)\n```(?:json)?\n",
            r"\s*```\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
        ),
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    TurnFormat(
        "DeepSeek V3.1",
        ("<｜tool▁sep｜>",),
        _json(
            r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?P<name>[^<]+)<｜tool▁sep｜>",
            r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
        ),
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    TurnFormat(
        "DeepSeek V3.2",
        ("｜DSML｜",),
        _tagged(
            r"(?:<｜DSML｜\w+>\s*)?<｜DSML｜invoke name=\"(?P<name>[^\"]+)\">",
            r"</｜DSML｜invoke>(?:\s*</｜DSML｜(?!invoke|parameter)\w+>)?",
            r"<｜DSML｜parameter name=\"(?P<key>[^\"]+)\"[^>]*>(?P<value>.*?)</｜DSML｜parameter>",
        ),
        "<｜DSML｜invoke",
        "</｜DSML｜invoke>",
    ),
    TurnFormat(
        "Kimi K2",
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        _json(
            r"(?:<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*"
            r"(?P<id>(?:functions\.)?(?P<name>[^\s:<]+):\d+)\s*<\|tool_call_argument_begin\|>",
            r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
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
            r"(?:<minimax:tool_call>\s*)?<invoke name=\"?(?P<name>[^\">]+)\"?>",
            r"</invoke>(?:\s*</minimax:tool_call>)?",
            r"<parameter name=\"?(?P<key>[^\">]+)\"?>(?P<value>.*?)</parameter>",
        ),
        "<invoke",
        "</invoke>",
    ),
    TurnFormat(
        "Seed-OSS",
        ("<seed:tool_call>",),
        _tagged(
            "<seed:tool_call>" + FUNCTION,
            r"</function>\s*</seed:tool_call>",
            PARAMETER,
            "seed:think",
        ),
        "<seed:tool_call>",
        "</seed:tool_call>",
    ),
    TurnFormat(
        "Qwen3-Coder, Qwen3.5 and Nemotron 3",
        ("<tool_call>", "<function="),
        _tagged("<tool_call>" + FUNCTION, r"</function>\s*</tool_call>", PARAMETER),
        "<tool_call>",
        "</tool_call>",
    ),
    TurnFormat(
        "GLM-4.5 and later",
        ("<tool_call>", "<arg_key>"),
        _tagged(
            r"<tool_call>\s*(?P<name>[^\s<]+)\s*(?=<arg_key>|</tool_call>)",
            "</tool_call>",
            r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
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
            "reasoning": THINK,
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "<|im_end|>", "repeats": True},
        },
        "<tool_call>",
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
        },
        "<|START_ACTION|>",
        calls=json_calls,
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
        _listed(r"<\|tools_prefix\|>", r"<\|tools_suffix\|>"),
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
            r"(?:<\|tool_calls\|>)?<\|tool_call:begin\|>(?P<id>[^<]*)<\|tool_call:name\|>"
            r"(?P<name>[^<]+)<\|tool_call:args\|>",
            r"<\|tool_call:end\|>",
            transform={"id": "{id}", **NAMED},
        ),
        "<|tool_call:begin|>",
        "<|tool_call:end|>",
    ),
    TurnFormat(
        "Functionary 3.1",
        ("<function=", "<|start_header_id|>"),
        _json(r"<function=(?P<name>[^>\n]+)>", "</function>"),
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


def _marked(text: str) -> TurnFormat | None:
    return next((one for one in TURN_FORMATS if all(mark in text for mark in one.marks)), None)
