"""Reward functions for tests, importable in a reward process."""

import ctypes
import os
import time


def by_length(completions, **_):
    return [float(len(completion)) for completion in completions]


async def async_half(completions, **_):
    return [0.5 for _ in completions]


def some_none(completions, **_):
    return [None if index == 0 else float(index) for index, _ in enumerate(completions)]


def all_columns(prompts, completions, completion_ids, answer, **columns):
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer)
    return [float(p == "p" and a == "x" and ids == [1, 2] and columns["extra"][0] == 7) for p, a, ids in zip(prompts, answer, completion_ids, strict=True)]


def not_a_number(completions, **_):
    return [float("nan") for _ in completions]


def infinite(completions, **_):
    return [float("inf") for _ in completions]


def too_few(completions, **_):
    return [0.0 for _ in completions][1:]


def allocates(completions, slow, **_):
    """Without end if it is slow."""
    held = []
    while slow[0] == "1":
        held.append(b"x" * (64 << 20))
    return [1.0 for _ in completions]


def text(completions, **_):
    return ["1.0" for _ in completions]


def one_number(**_):
    return 1.0


def raises(**_):
    raise KeyError("no such thing")


def hangs_in_c(completions, slow=("1",), **_):
    """Holds the interpreter lock for ever."""
    if slow[0] == "1":
        ctypes.PyDLL(None).sleep(3600)
    return [1.0 for _ in completions]


def dies(completions, slow=("1",), **_):
    if slow[0] == "1":
        os._exit(7)
    return [1.0 for _ in completions]


def takes_its_time(completions, slow=("0",), **_):
    if slow[0] == "1":
        time.sleep(8)
    return [1.0 for _ in completions]


def fails_once(completions, marker, **_):
    try:
        os.close(os.open(marker[0], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return [1.0 for _ in completions]
    raise RuntimeError("first time")


def names_its_reader(completions, marker, slow, **_):
    """Writes its parent's process id once and then hangs; the second call of the same group does not."""
    if slow[0] == "1":
        try:
            file = os.open(marker[0], os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return [1.0 for _ in completions]
        os.write(file, str(os.getppid()).encode())
        time.sleep(3600)
    return [1.0 for _ in completions]
