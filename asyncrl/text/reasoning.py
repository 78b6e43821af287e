"""The marks with which models begin and end their reasoning, and a text without its reasoning."""

from __future__ import annotations

import re

PROMPT_END = 200
"""Characters at a prompt's end in which a template may open the reasoning."""
WORDS = r"(?:\w{1,32}:)?(?:think|thinking|thoughts?|reasoning|analysis|scratch_?pad)"
PAIRS = (
    (rf"<{WORDS}>|\[think\]|◁think▷", rf"</{WORDS}>|\[/think\]|◁/think▷"),
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
    (r"<\|channel\|?>(?:analysis|thought)\n?(?:<\|message\|>)?", r"<\|end\|>|<channel\|>"),
)
"""How models open and close their reasoning."""
MARKS = re.compile(
    "|".join(f"(?P<open{n}>{first})|(?P<close{n}>{last})" for n, (first, last) in enumerate(PAIRS)),
    re.IGNORECASE,
)
OPENED = re.compile(rf"(?:{'|'.join(first for first, _ in PAIRS)})\s*\Z", re.IGNORECASE)
AROUND_ANSWER = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)[^<\n]{0,64}<\|message\|>"
    r"|<\|(?:return|start\|>assistant|(?:begin|end)_of_solution|(?:START|END)_(?:RESPONSE|TEXT))\|>"
)
"""What models write around an answer."""
RESPONSE = re.compile(r"\s*<response>(.*?)(?:</response>\s*)?", re.DOTALL)
"""What some write around an answer after reasoning. Elsewhere, it may be a part of the answer."""
WORD, CHANNEL = "0", str(len(PAIRS) - 1)
"""Numbers of the pair that a sentence may name, and of that whose end also ends other things."""
LINE_START = re.compile(r"(?:\A|\n)[^\S\n]*\Z")
"""The end of what is before the first mark of a line."""
LINE_PART = 500
"""Characters of a line around a mark that may show its quotes."""
BACKTICKS = re.compile("``+")
VISIBLE = re.compile(r"\S")


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends with the start of reasoning, which its template opened for the
    model."""
    return OPENED.search(prompt[-PROMPT_END:]) is not None


def text_after_reasoning(text: str, opened: bool = False, read: bool = False) -> str | None:
    """The text without its reasoning. None if the text has nothing else, such as in reasoning that
    never ends.

    A mark of an end without a start ends reasoning that began before the text. A mark in quotes is
    text, and so is a word in tags that a sentence names: it begins no line and has no end. The last
    mark ends open reasoning if no quote is next to it: the quotes on its line may not be a pair.

    Args:
        opened: whether the text begins within reasoning.
        read: whether reasoning before the text was read already.
    """
    parts: list[str] = []
    inside: str | None = "" if opened else None
    """Number of the pair whose reasoning is open. "": the prompt opened it, so any mark ends it."""
    begin, seen = 0, opened or read
    marks = [*MARKS.finditer(text)]
    quoted = {mark for mark in marks if _is_quoted(text, mark)}
    ends = [m.start() for m in marks if m.lastgroup == f"close{WORD}" and m not in quoted]
    for mark in marks:
        is_only_end = inside is not None and mark is marks[-1] and not _touches_quote(text, mark)
        if mark in quoted and not is_only_end:
            continue
        kind = str(mark.lastgroup)
        number = kind.removeprefix("open").removeprefix("close")
        if kind.startswith("open"):
            has_end = bool(ends) and ends[-1] > mark.start()
            if number == WORD and not has_end and _is_named(text, mark, seen):
                continue
            if inside is None:
                parts.append(text[begin : mark.start()])
                inside = number
        elif inside is not None:
            if inside in ("", number):
                inside, begin = None, mark.end()
        elif number == CHANNEL:
            continue
        elif not seen or VISIBLE.search(text, mark.end()):
            parts.clear()
            begin = mark.end()
        else:  # one too many, at the end
            parts.append(text[begin : mark.start()])
            begin = mark.end()
        seen = True
    if inside is None:
        parts.append(text[begin:])
    if not seen:
        return AROUND_ANSWER.sub("", text)
    answer = "\n".join(filter(str.strip, (AROUND_ANSWER.sub("", part) for part in parts)))
    within = RESPONSE.fullmatch(answer)
    return (within[1] if within else answer) or None


def only_names_reasoning(text: str) -> bool:
    """Whether all marks of reasoning in a turn are words of its text."""
    return has_reasoning_marks(text) and text_after_reasoning(text) == text


def has_reasoning_marks(text: str) -> bool:
    """Whether a turn has a mark of reasoning."""
    return any(mark.lastgroup != f"close{CHANNEL}" for mark in MARKS.finditer(text))


def _is_named(text: str, mark: re.Match[str], seen: bool) -> bool:
    """Whether a mark without an end is a word of a sentence. After other reasoning, that needs a
    space before it."""
    if LINE_START.search(text, max(0, mark.start() - LINE_PART), mark.start()) is not None:
        return False
    return not seen or text[mark.start() - 1].isspace()


def _touches_quote(text: str, mark: re.Match[str]) -> bool:
    around = text[max(0, mark.start() - 1) : mark.start()] + text[mark.end() : mark.end() + 1]
    return any(quote in around for quote in "'\"`")


def _is_quoted(text: str, mark: re.Match[str]) -> bool:
    """Whether a mark is in quotes on its line, as in code that reads the marks."""
    if text[mark.start() - 1 : mark.start()] == "'" == text[mark.end() : mark.end() + 1]:
        return True
    before = text[max(0, mark.start() - LINE_PART) : mark.start()].rpartition("\n")[2]
    after = text[mark.end() : mark.end() + LINE_PART].partition("\n")[0]
    before, after = (BACKTICKS.sub("", part) for part in (before, after))
    return any(before.count(quote) % 2 and quote in after for quote in ('"', "`"))
