"""math-verify as a reward: whether a completion's final answer is mathematically equal to the wanted one.

Expressions that a model wrote may take sympy minutes. Each completion is judged in a forked child under a limit of CPU time that
the kernel keeps: math-verify's own limit is a signal handler, which a long call in C does not run, and works in the main thread only.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from math_verify import parse, verify

__all__ = ["math_verify"]

# It warns once that nobody limits its time; here the kernel does.
logging.getLogger("math_verify").setLevel(logging.ERROR)

DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
"""What says where in a text the LaTeX is. An answer without it is LaTeX as a whole."""

RIGHT, WRONG, UNKNOWN = b"1", b"0", b"?"


def math_verify(completions: Sequence[str], answer: Sequence[Any], seconds: float = 3.0, **_: Any) -> list[float | None]:
    """1.0 where a completion's last boxed or final expression equals column `answer`, else 0.0. None where the answer itself cannot be parsed.

    Args:
        answer: LaTeX or plain mathematics, with or without delimiters.
        seconds: CPU time for one completion. One that takes longer gets 0.0.
    """
    wanted = [str(one) for one in answer]

    def judge(index: int) -> bytes:
        return _judge(wanted[index], completions[index])

    verdicts = _each_within(judge, len(completions), seconds)
    return [None if verdict == UNKNOWN else float(verdict == RIGHT) for verdict in verdicts]


def _judge(answer: str, completion: str) -> bytes:
    gold = parse(answer if DELIMITED.search(answer) else f"${answer}$", parsing_timeout=None)
    if not gold:
        return UNKNOWN
    return RIGHT if verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None) else WRONG


def _each_within(judge: Callable[[int], bytes], count: int, seconds: float) -> list[bytes]:
    """`judge(index)`, one byte, for each index; WRONG for one that takes longer or ends its process. A child goes on until it is killed."""
    verdicts: list[bytes] = []
    while len(verdicts) < count:
        verdicts += _until_killed(judge, range(len(verdicts), count), seconds)
        if len(verdicts) < count:
            verdicts.append(WRONG)
    return verdicts


def _until_killed(judge: Callable[[int], bytes], indices: range, seconds: float) -> Iterator[bytes]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            for index in indices:
                signal.setitimer(signal.ITIMER_PROF, seconds)
                os.write(writing, judge(index))
        finally:
            os._exit(0)
    os.close(writing)
    try:
        while verdict := os.read(reading, 1):
            yield verdict
    finally:
        os.close(reading)
        os.waitpid(child, 0)
