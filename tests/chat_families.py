"""Chat templates of several families, each with a slow reference: the parts of a chat as text, and
whether the model writes them. The checkpoints have a tokenizer and no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_checkpoint

Part = tuple[str, bool]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<think>", "</think>"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_TAGS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONTENT_TAGS = CHATML_TAGS.replace(
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}",
    "{%- generation -%}{{ m.content }}{%- endgeneration -%}{{ '<|im_end|>' }}",
)
HEADERS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>\\n\\n' +"
    " (m.content | trim) + '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"
)
FINAL_EOS = CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
STRIPS_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
FORCES_THINKING = CHATML.replace(
    "assistant\\n' }}{% endif %}", "assistant\\n<think>' }}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + CHATML
)
DATED = "{{ '<|im_start|>system\\nToday: ' + strftime_now('%d %b %Y') + '<|im_end|>\\n' }}" + CHATML
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ 'call ' + c.function.name + (c.function.arguments |"
    " tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chatml(messages: Iterable[Any], trained_end: str = "<|im_end|>\n") -> list[Part]:
    parts = []
    for message in messages:
        writes = message["role"] == "assistant"
        rest = "<|im_end|>\n".removeprefix(trained_end)
        parts += [
            (f"<|im_start|>{message['role']}\n", False),
            (message["content"] + trained_end, writes),
            (rest, False),
        ]
    return parts


def headers(messages: Iterable[Any]) -> list[Part]:
    parts = [(llama_checkpoint.BOS, False)]
    for message in messages:
        parts += [
            (f"<|head|>{message['role']}<|/head|>\n\n", False),
            (message["content"].strip() + "<|eot|>", message["role"] == "assistant"),
        ]
    return parts


def with_final_eos(messages: Iterable[Any]) -> list[Part]:
    return [*chatml(messages), (llama_checkpoint.EOS, True)]


@dataclass(frozen=True)
class ChatFamily:
    template: str
    parts: Callable[[Iterable[Any]], list[Part]]


FAMILIES = {
    "chatml": ChatFamily(CHATML, chatml),
    "chatml with tags": ChatFamily(CHATML_TAGS, lambda chat: chatml(chat, "<|im_end|>")),
    "tags around contents": ChatFamily(CONTENT_TAGS, lambda chat: chatml(chat, "<|im_end|>")),
    "headers": ChatFamily(HEADERS, headers),
    "final eos": ChatFamily(FINAL_EOS, with_final_eos),
}


def save_chat_model(directory: Path, template: str | None) -> str:
    """Write a tokenizer with this chat template, which load_tokenizer reads."""
    tokenizer = llama_checkpoint.tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return str(directory)


def slow_mask(tokenizer: Any, parts: list[Part], ids: list[int]) -> list[bool]:
    """The mask of token ids by their bytes: a token is trained if any of its bytes is."""
    trained = [writes for text, writes in parts for _ in text.encode()]
    byte_of = {char: byte for byte, char in enumerate(_byte_characters())}
    special = set(tokenizer.all_special_tokens)
    mask, at = [], 0
    for token in tokenizer.convert_ids_to_tokens(ids):
        text = token.encode() if token in special else bytes(byte_of[char] for char in token)
        mask.append(any(trained[at : at + len(text)]))
        at += len(text)
    assert at == len(trained)
    return [False, *mask[1:]]


def _byte_characters() -> list[str]:
    """The character by which byte-level BPE writes each byte (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(rest)) for byte in range(256)]
