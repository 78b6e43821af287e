"""Finds the program in an answer: the last fenced block of Python."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

PYTHON = ("python", "py", "python3", "py3", "cpython", "pypy", "pypy3", "ipython")
FENCE = re.compile(
    r"(?P<marks>`{3,}|~{3,})[ \t]*\{?[ \t]*\.?(?P<language>[\w+-]*)(?P<rest>[^`\n]*)"
)
"""The opening of a block. The language ends at the first other character."""
AFTER_TEXT = re.compile(
    rf"(?P<marks>`{{3,}}|~{{3,}})[ \t]*(?P<language>{'|'.join(PYTHON)})[ \t]*\Z", re.IGNORECASE
)
"""An opening that follows other text on its line."""
FENCES = re.compile("```|~~~")
TAGS = re.compile(r"(?:\s*</?\w+>)+\Z")
"""Tags that models write right after the end of a block."""
TAGS_LENGTH = 80
"""Characters of such tags, at most."""
INDENTED = 4
"""Columns more than those of a block's beginning, with which marks do not end it."""
PROMPT = ">>>"
"""How a session in an interpreter begins: it shows calls, and is no program."""
OUTPUT = re.compile(
    r"(?:outputs?|prints?|printed|results?|returns?|stdout|console|displays?)\b[^.\n]*\Z",
    re.IGNORECASE,
)
"""How a line ends that announces what a program prints."""
DEFINES = re.compile(
    r"^[ \t]*(?:async[ \t]|def[ \t]|class[ \t]|import[ \t]|from[ \t])", re.MULTILINE
)
CALLS = re.compile(r"\w\(")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    language: str
    """In lower case; "" if the fence names none."""
    code: str
    closed: bool
    before: str
    """The last line with text before the block."""
    lines: range
    """Lines of the block in the text, with its fences."""

    @property
    def is_python(self) -> bool:
        """Whether the fence says so."""
        return self.language in PYTHON


def code_block(answer: str, ended: bool = True) -> str | None:
    """The last block of Python, else the last without a language that is no output; None if there
    is none.

    Args:
        ended: whether the answer ended by itself. Then the end of the text closes a block that is
            still open. Otherwise such a block was cut, and is none.
    """
    blocks = [
        block
        for block in fenced_blocks(answer)
        if (block.closed or ended) and not block.code.lstrip().startswith(PROMPT)
    ]
    named = [block for block in blocks if block.is_python and block.code.strip()]
    unnamed = [block for block in blocks if not block.language]
    programs = [block for block in unnamed if not OUTPUT.search(block.before)] or unnamed
    for pattern in (DEFINES, CALLS):
        if not named:
            named = [block for block in programs if pattern.search(block.code)]
    found = named or programs
    return textwrap.dedent(found[-1].code) if found else None


def fenced_blocks(text: str) -> Iterator[Block]:
    """The blocks of a text, in its order. Goes line by line: on a degenerate text, one regular
    expression would take minutes.

    As in Markdown, a block ends with at least as many of the same marks as it began with, and marks
    that are INDENTED deeper belong to its code. But an end may follow the last line of code, tags
    may follow the end, and a block with a language ends one that was left open.
    """
    opening: _Opening | None = None
    before, code = "", list[str]()
    first, number = 0, -1
    for number, line in enumerate(text.split("\n")):
        found = _opening(line)
        if opening is not None and (ended := opening.end(line)) is not None:
            code += [ended] if ended.strip() else []
            yield opening.block(code, True, before, range(first, number + 1))
            opening = None
        elif opening is None or (found is not None and opening.is_ended_by(found)):
            if opening is not None:
                yield opening.block(code, True, before, range(first, number))
            opening, code, first = found, [], number
            before = (line[: found.column] if found is not None else line).strip() or before
        else:
            code.append(line)
    if opening is not None:
        deep = [index for index, line in enumerate(code) if line.strip() == opening.marks]
        lines = range(first, first + deep[0] + 2 if deep else number + 1)
        yield opening.block(code[: deep[0]] if deep else code, bool(deep), before, lines)


@dataclass(frozen=True, slots=True)
class _Opening:
    """The line that begins a block."""

    column: int
    marks: str
    language: str

    def end(self, line: str) -> str | None:
        """The code of a line that ends the block. None if the line does not end it."""
        bare = line.rstrip(" \t\r")
        if bare.endswith(">"):
            bare = bare[:-TAGS_LENGTH] + TAGS.sub("", bare[-TAGS_LENGTH:])
        code = bare.rstrip(self.marks[0])
        if not bare.endswith(self.marks) or self.marks[0] in code:
            return None
        if not code.strip() and len(code) >= self.column + INDENTED:
            return None
        return code

    def is_ended_by(self, other: _Opening) -> bool:
        """Whether another opening shows that this block was left open."""
        same = other.marks.startswith(self.marks) and other.language != ""
        return same and other.column < self.column + INDENTED

    def block(self, code: list[str], closed: bool, before: str, lines: range) -> Block:
        text = "".join(f"{line}\n" for line in code)
        return Block(self.language.lower(), text, closed, before, lines)


def _opening(line: str) -> _Opening | None:
    if FENCES.search(line) is None:
        return None
    bare = line.strip(" \t\r")
    found = FENCE.fullmatch(bare) or AFTER_TEXT.search(bare)
    return found and _Opening(line.index(found["marks"]), found["marks"], found["language"])
