"""Kinds of instructions whose following a program can check, after IFEval (Zhou et al. 2023,
arXiv:2311.07911). The checkers are those of the package if-verifiable; the wording is our own."""

from __future__ import annotations

import importlib
import site
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

ENDINGS = (
    "That is all.",
    "Thank you for reading.",
    "I hope this helps.",
    "This is my answer.",
    "Now you know.",
)
KEYWORDS = (
    *("bright", "simple", "winter", "friend", "window", "quiet", "water", "green", "today"),
    *("small", "music", "street", "garden", "color", "early", "strong", "travel", "summer"),
)
LEAST_WORDS = 8
"""Words of the shortest answer that may pass. Otherwise an answer of one word would pass most
instructions."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of instruction."""

    checker: str
    """The name of its checker in the package."""
    text: str
    """What the prompt says, with the parameters by name."""
    parameters: Callable[[Random], dict[str, Any]] = lambda _: {}
    """Draws the parameters."""


def _ending(draw: Random) -> dict[str, Any]:
    return {"end_phrase": draw.choice(ENDINGS)}


def _keyword(draw: Random) -> dict[str, Any]:
    return {"keywords": [draw.choice(KEYWORDS)]}


def _bullets(draw: Random) -> dict[str, Any]:
    return {"num_bullets": draw.choice((2, 3))}


def _most_words(draw: Random) -> dict[str, Any]:
    return {"num_words": draw.choice((18, 22, 26)), "relation": "less than"}


KINDS: Mapping[str, Kind] = {
    # SmolLM2 follows each of these now and then. It hardly ever answers in quotation marks or in
    # lowercase letters, and a group of such answers with equal rewards would teach nothing.
    "no_comma": Kind("punctuation:no_comma", "Do not use any commas."),
    "ending": Kind(
        "startend:end_checker", "Finish with exactly these words: {end_phrase}", _ending
    ),
    "title": Kind(
        "detectable_format:title",
        "Put a title in double angle brackets, such as <<title>>, before it.",
    ),
    "keyword": Kind("keywords:existence", "Use the word {keywords[0]}.", _keyword),
    "bullets": Kind(
        "detectable_format:number_bullet_lists",
        "Write exactly {num_bullets} bullet points, and begin each with an asterisk.",
        _bullets,
    ),
    "postscript": Kind(
        "detectable_content:postscript",
        "Add a postscript at the end that begins with P.S.",
        lambda _: {"postscript_marker": "P.S."},
    ),
    "few_words": Kind(
        "length_constraints:number_words", "Use fewer than {num_words} words.", _most_words
    ),
    "placeholder": Kind(
        "detectable_content:number_placeholders",
        "Include a placeholder in square brackets, such as [name].",
        lambda _: {"num_placeholders": 1},
    ),
    "highlight": Kind(
        "detectable_format:number_highlighted_sections",
        "Put asterisks around the most important words, such as *these words*.",
        lambda _: {"num_highlights": 1},
    ),
}


@cache
def checkers(packages: str) -> Mapping[str, Any]:
    """The checkers by name, from the folder with the package.

    The package's own `__init__` imports `datasets`, which no checker needs, so it is left out.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: this process has imported the checkers of another folder.
    """
    if not Path(packages).is_dir():
        raise FileNotFoundError(
            f"packages = {packages!r} does not exist; run python -m jobs.smollm.inputs checkers"
        )
    site.addsitedir(packages)
    parent = sys.modules.setdefault("if_verifiable", ModuleType("if_verifiable"))
    wanted = [str(Path(packages) / "if_verifiable")]
    if getattr(parent, "__path__", wanted) != wanted:
        raise ValueError(
            f"packages = {packages!r}, but this process has the checkers of"
            f" {Path(parent.__path__[0]).parent}; use one folder in a run"
        )
    parent.__path__ = wanted
    registry = importlib.import_module("if_verifiable.ifeval.instructions_registry")
    found: Mapping[str, Any] = registry.INSTRUCTION_DICT
    return found


def follows(packages: str, checker: str, parameters: Mapping[str, Any], answer: str) -> bool:
    """Whether an answer follows one instruction. An empty answer follows none."""
    found = checkers(packages)[checker](checker)
    found.build_description(**parameters)
    return bool(answer.strip()) and bool(found.check_following(answer))
