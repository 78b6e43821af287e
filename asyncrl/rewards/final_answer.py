"""Finds the final answer in the answer part of a completion, for every reward that reads one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncrl.rewards.code_blocks import code_block, fenced_blocks
from asyncrl.text.reasoning import text_after_reasoning

OPEN_TAG, CLOSE_TAG = "<answer>", "</answer>"
BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<word>[^\s{}$\\.,;]+))")
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
NO_ANSWER = ("", "...", "\\ldots", "\\dots")
"""What a box contains in an example of a box."""
HASHES = re.compile(
    r"^[ \t]*####[ \t]*\**(?P<value>\$[^$\n]+\$|[-+$€£]{0,3} ?\d[\d,./]*%?)"
    r"(?: [a-z]{1,20}){0,2}\.?\**[ \t\r]*(?P<end>\n|\Z)",
    re.MULTILINE,
)
"""How solutions of GSM8K end, perhaps with a unit. Other text makes the marks a heading."""
MINUS = re.compile(r"[\u2212\ufe63\uff0d]|(?<![\w)}\]])[\u2010-\u2014](?=[\d.\\])")
"""A minus sign that is no hyphen of ASCII. A dash is one only before a number, not in a range."""
MATHEMATICS = ("", "latex", "tex", "math", "text", "txt", "plaintext", "markdown", "md")
"""Languages of fenced blocks that may contain a final answer."""


def answers_of(
    completions: Sequence[str], answer_texts: Sequence[str | None] | None
) -> list[str | None]:
    """The answer parts of completions: those that the run found, else those that the texts show."""
    if answer_texts is None:
        return [text_after_reasoning(text) for text in completions]
    return list(answer_texts)


def code_blocks(
    completions: Sequence[str],
    answer_texts: Sequence[str | None] | None,
    answer_ended: Sequence[bool] | None,
) -> list[str | None]:
    """The program in each completion's answer part (`code_block`); None where there is none."""
    texts = answers_of(completions, answer_texts)
    return [
        None if text is None else code_block(text, ended)
        for text, ended in zip(texts, answer_ended or [True] * len(texts), strict=True)
    ]


def tagged_answer(answer: str, ended: bool = True) -> str | None:
    """The last text in `<answer>…</answer>`, else the whole text.

    Args:
        ended: whether the text ended by itself. If not, there is None in a tag that is still open.
    """
    lowered = answer.lower()
    if len(lowered) != len(answer):  # of a few letters outside ASCII
        lowered = answer
    begin, end = lowered.rfind(OPEN_TAG), lowered.rfind(CLOSE_TAG)
    if begin < 0 and end < 0:
        return answer
    if begin > end:
        return answer[begin + len(OPEN_TAG) :] if ended else None
    begin = lowered.rfind(OPEN_TAG, 0, end)
    return answer[begin + len(OPEN_TAG) if begin >= 0 else 0 : end]


def final_expression(answer: str, ended: bool = True) -> str | None:
    """The part of an answer that contains the final expression; None if there is none.

    That is the last box with something in it, or a number after `####`, outside of code. Without
    both, it is the whole answer, or what is in its `<answer>` tag.

    Args:
        ended: whether the answer ended by itself. If not, a box must be closed, and an answer
            without a box, marks or a tag is none.
    """
    text = tagged_answer(answer, ended)
    if text is None:
        return None
    complete = ended or text is not answer
    prose = MINUS.sub("-", _without_code(text))
    box = _last_box(prose)
    hashes = [found for found in HASHES.finditer(prose) if complete or found["end"]]
    if hashes and (box is None or hashes[-1].start() > box[0]):
        return hashes[-1]["value"]
    if box is not None:
        offset, content = box
        if content is not None:
            return f"\\boxed{{{content}}}"
        return prose[offset:] if complete else None
    return prose if complete else None


def _last_box(text: str) -> tuple[int, str | None] | None:
    """Where the last box with a content begins, and the content: None if the box has no end."""
    for box in reversed(list(BOX.finditer(text))):
        content = box["word"] or _in_braces(text, box.end())
        if content is None or content.strip() not in NO_ANSWER:
            return box.start(), content
    return None


def _in_braces(text: str, begin: int) -> str | None:
    """The text from `begin` to the brace that closes it; None without one."""
    depth = 1
    for brace in BRACES.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if not depth:
            return text[begin : brace.start()]
    return None


def _without_code(text: str) -> str:
    """The text without its fenced blocks of programs. All of it if nothing else is there."""
    programs = {
        number
        for block in fenced_blocks(text)
        if block.language not in MATHEMATICS
        for number in block.lines
    }
    lines = text.split("\n")
    kept = "\n".join(line for number, line in enumerate(lines) if number not in programs)
    return kept if kept.strip() else text
