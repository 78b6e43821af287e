"""math-verify as a reward: whether a completion's final answer is mathematically equal to the
expected one.

Sympy may take minutes for an expression that a model wrote. So a forked child judges each
completion under a CPU time limit that the kernel enforces. The limit of math-verify itself is a
signal handler: it works only in the main thread, and not during a long call in C.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import signal
import threading
from collections.abc import Sequence
from typing import NoReturn

from math_verify import parse, verify

from asyncrl.rewards.final_answer import answers_of, final_expression
from asyncrl.sandbox.machine import usable_cpus

# math-verify warns that its own time limit is off. Here the kernel limits the time.
logging.getLogger("math_verify").setLevel(logging.ERROR)

DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
"""Marks where LaTeX begins in a text. An answer without such a mark is LaTeX as a whole."""

PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2}|\n")
"""Words, or more than one line. A text without them may be LaTeX as a whole."""

AS_LATEX = (
    (re.compile(r"[€£¥₹]"), ""),
    (re.compile(r"(?<![\w.^])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![\w.])"), r"\1\\cdot10^{\2}"),
    (re.compile(r"(?<![\w./^])(\d+)\s+(\d+)/(\d+)(?![\w/.])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<=\d)(?:\\[,; ]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\{\*\*([^*]+)\*\*\}"), r"{\1}"),
)
"""What LaTeX reads in another way: currencies, 1e-3, the mixed number 1 1/2, thousands, and a bold
content of a box."""

RIGHT, WRONG, UNKNOWN = "1", "0", "?"

MOST_CHILDREN = usable_cpus()
"""Children that judge at once. Other threads wait."""
FIRST_INHERITED = 3
"""The lowest file descriptor that is no standard stream."""

_free_children = threading.BoundedSemaphore(MOST_CHILDREN)
_forking = threading.Lock()
_idle: list[_Child] = []


def math_verify(
    completions: Sequence[str],
    answer: Sequence[object],
    seconds: float = 3.0,
    answer_texts: Sequence[str | None] | None = None,
    answer_ended: Sequence[bool] | None = None,
    **_: object,
) -> list[float | None]:
    """1.0 where a completion's final expression equals that of column `answer`, else 0.0. None
    where the answer itself is missing or cannot be parsed.

    The final expression is the last box, or the number after `####`. Without both, math-verify
    looks for it, in the last `<answer>` tag if there is one. Reasoning and code do not count. A
    completion that was cut needs one of these marks.

    Args:
        answer: LaTeX or plain mathematics, with or without delimiters. A list has one of them.
        seconds: CPU time per completion. A completion that takes longer gets 0.0.

    Raises:
        ValueError: an answer is no text or number, such as an object.
    """
    texts = answers_of(completions, answer_texts)
    finals = [
        None if text is None else final_expression(text, ended)
        for text, ended in zip(texts, answer_ended or [True] * len(texts), strict=True)
    ]
    verdicts = [
        _verdict(seconds, _gold(expected), final or "")
        for expected, final in zip(answer, finals, strict=True)
    ]
    return [None if verdict == UNKNOWN else float(verdict == RIGHT) for verdict in verdicts]


def _gold(expected: object) -> str:
    """The expression of a row's answer; "" if the row has none.

    Raises:
        ValueError: the answer is no text or number.
    """
    given = expected
    if isinstance(given, list | tuple) and len(given) == 1:
        given = given[0]
    if given is None or given != given:  # a missing number of pandas
        return ""
    if not isinstance(given, str | int | float) or isinstance(given, bool):
        raise ValueError(
            f"column answer contains {str(expected)[:80]!r}; give one expression as text, or a"
            " number"
        )
    return final_expression(str(given)) or str(given)


def _verdict(seconds: float, answer: str, completion: str) -> str:
    """The verdict of a child; WRONG if judging this completion ended the child."""
    with _free_children:
        try:
            child = _idle.pop()
        except IndexError:
            child = _Child()
        verdict = child.ask(answer, completion, seconds)
        if not verdict:
            return WRONG
        _idle.append(child)
        return verdict


def _as_latex(text: str) -> str:
    """The text, with numbers as LaTeX reads them. Prose is left as it is."""
    if text.startswith("\\boxed") or not PROSE.search(text):
        for pattern, written in AS_LATEX:
            text = pattern.sub(written, text)
    return text


def _judge(answer: str, completion: str) -> str:
    answer, completion = _as_latex(answer), _as_latex(completion)
    gold = parse(answer if DELIMITED.search(answer) else f"${answer}$", parsing_timeout=None)
    if not gold:
        return UNKNOWN
    texts, bare = [completion], completion.strip()
    if not DELIMITED.search(bare) and not PROSE.search(bare):
        texts.append(f"${bare}$")
    for text in texts:
        if verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None):
            return RIGHT
    return WRONG


class _Child:
    """A forked child that judges one answer after another, until one takes too long. Keeping the
    child keeps its parsers warm."""

    def __init__(self) -> None:
        with _forking:  # no other child may inherit this child's pipe ends
            # A child must import nothing: another thread may hold a lock of an import at the fork.
            _warm_up()
            requests, self._requests = os.pipe()
            self._verdicts, verdicts = os.pipe()
            self._process = os.fork()
            if self._process == 0:
                # A copy of another's pipe would keep that open: `subprocess.Popen` in another
                # thread waits until the pipe of its new process is closed.
                _close_all_but(requests, verdicts)
                _serve(requests, verdicts)
            os.close(requests)
            os.close(verdicts)

    def ask(self, answer: str, completion: str, seconds: float) -> str:
        """The verdict, or "" if the child has ended."""
        payload = json.dumps([answer, completion, seconds]).encode() + b"\n"
        verdict = b""
        with contextlib.suppress(BrokenPipeError):
            sent = 0
            while sent < len(payload):
                sent += os.write(self._requests, payload[sent:])
            verdict = os.read(self._verdicts, 1)
        if not verdict:
            os.close(self._requests)
            os.close(self._verdicts)
            os.waitpid(self._process, 0)
        return verdict.decode()


@functools.cache
def _warm_up() -> None:
    """Import and build what the first judgment needs. All children inherit it."""
    for answer, completion in ((r"\frac{1}{2}", r"\boxed{0.5}"), ("{1, 2}", "$x = 2$")):
        _judge(answer, completion)


def _close_all_but(*kept: int) -> None:
    """Close the inherited file descriptors, apart from the standard streams and these."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= FIRST_INHERITED and int(name) not in kept:
            with contextlib.suppress(OSError):  # that of the listing is closed already
                os.close(int(name))


def _serve(requests: int, verdicts: int) -> NoReturn:
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        with os.fdopen(requests) as lines:
            for line in lines:
                answer, completion, seconds = json.loads(line)
                signal.setitimer(signal.ITIMER_PROF, seconds)
                verdict = _judge(answer, completion)
                signal.setitimer(signal.ITIMER_PROF, 0)
                os.write(verdicts, verdict.encode())
    finally:
        os._exit(0)
