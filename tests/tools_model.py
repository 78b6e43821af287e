"""A tiny tokenizer whose chat template has tools, tool calls and reasoning, as Qwen's."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import llama_checkpoint

from asyncrl.text.tokenizer import load_tokenizer

QWEN = (
    "{% if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and (m.reasoning_content or m.reasoning) %}"
    "{{ '<think>' + (m.reasoning_content or m.reasoning) + '</think>' }}{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson)"
    " + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A template with tools, tool calls and reasoning, as Qwen's."""
ADD_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def call(a: int, b: int) -> str:
    """A tool call, as the model writes it."""
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


@cache
def tokenizer(folder: Path, template: str = QWEN) -> Any:
    made = llama_checkpoint.tokenizer()
    made.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    made.save_pretrained(folder)
    return load_tokenizer(str(folder))
