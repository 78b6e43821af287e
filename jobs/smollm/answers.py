"""Answers made from templates, right for every kind of instruction. They are examples for SFT, and
show `asyncrl plan` that the reward can be earned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

SENTENCES = (
    "People all over the world know about {subject}.",
    "Many of us have a story about {subject}.",
    "It is always easy to talk about {subject}.",
    "Children often ask their parents questions about {subject}.",
    "A good book about {subject} is a nice gift.",
    "We can all learn something new about {subject}.",
    "My friends like to sit and think about {subject}.",
    "There is a lot to say about {subject}.",
)
"""Each has at least seven words without the subject, and no comma."""
KEYWORD = "The word {keyword} fits here."


def answer(subject: str, instructions: Sequence[Mapping[str, Any]], draw: Random) -> str:
    """An answer of two sentences, or of as many as there are bullet points, which follows the
    instructions.

    Args:
        instructions: `kind` and `kwargs` of each, as in a row of the data.
    """
    asked = {one["kind"]: one["kwargs"] for one in instructions}
    count = asked.get("bullets", {"num_bullets": 2})["num_bullets"]
    lines = [one.format(subject=subject) for one in draw.sample(SENTENCES, count)]
    return _laid_out(subject, _inserted(lines, asked), asked)


def _inserted(lines: list[str], asked: Mapping[str, Any]) -> list[str]:
    """The sentences with what has to be in them."""
    if "few_words" in asked:
        lines = lines[:1]
    if "keyword" in asked:
        lines[-1] += " " + KEYWORD.format(keyword=asked["keyword"]["keywords"][0])
    if "placeholder" in asked:
        lines[-1] += " Ask [name]."
    if "highlight" in asked:
        first, _, rest = lines[0].partition(" ")
        lines[0] = f"*{first}* {rest}"
    return lines


def _laid_out(subject: str, lines: list[str], asked: Mapping[str, Any]) -> str:
    """The sentences as one text, with what comes before and after them."""
    text = "\n".join(f"* {line}" for line in lines) if "bullets" in asked else " ".join(lines)
    if "title" in asked:
        text = f"<<About {subject}>>\n{text}"
    if "ending" in asked:
        text += f" {asked['ending']['end_phrase']}"
    if "postscript" in asked:
        text += "\nP.S. Try it."
    return text
