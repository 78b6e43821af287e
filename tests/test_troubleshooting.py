"""docs/troubleshooting.md quotes messages correctly: each fixed part of a message occurs in a
string of the package."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()
SECTIONS = re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]
MESSAGES = [
    line
    for block in re.findall(r"^```text\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
SHORTEST = 11
"""Least length of the longest fixed part of a message, because short strings occur in any program.
"""


def strings(code):
    """Every string of a module, with … for each formatted value. Adjacent literals are one
    string."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(value.value) if isinstance(value, ast.Constant) else "…"
                for value in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def source():
    """Every string of the package."""
    paths = sorted((ROOT / "asyncrl").rglob("*.py"))
    return "\0".join(text for path in paths for text in strings(path.read_text()))


def fixed_parts(message):
    parts = re.split(r"…", message)
    return [part.strip(" '():;") for part in parts if part.strip(" '():;=,")]


@pytest.mark.parametrize("message", MESSAGES)
def test_every_quoted_message_is_in_the_source(message):
    parts = fixed_parts(message)
    assert max(map(len, parts)) >= SHORTEST, "nothing in this message is fixed"
    missing = [
        part for part in parts if part not in source() and part.removesuffix(" =") not in source()
    ]
    assert not missing


def test_slimes_thirteen_come_first_and_every_section_is_whole():
    assert [section.split(".")[0] for section in SECTIONS[:13]] == [
        f"F{number}" for number in range(1, 14)
    ]
    for section in SECTIONS:
        title = section.splitlines()[0]
        assert "```text\n" in section and "\n**Why.** " in section and "\n**Fix.** " in section, (
            title
        )


def test_a_message_that_is_not_in_the_source_is_noticed():
    assert "the run was eaten by a dog" not in source() and fixed_parts(
        "model.path = …: gone (…)"
    ) == ["model.path =", "gone"]
