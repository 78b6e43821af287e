"""Reward functions for tests, importable in a reward process."""

import asyncio
import ctypes
import os
import signal
import subprocess
import threading
import time

import psutil


def by_length(completions, **_):
    return [float(len(completion)) for completion in completions]


async def async_half(completions, **_):
    return [0.5 for _ in completions]


def some_none(completions, **_):
    return [None if index == 0 else float(index) for index, _ in enumerate(completions)]


def last_none(completions, skip, **_):
    return [*by_length(completions[:-1]), None if skip[0] else 2.0]


def all_columns(prompts, completions, completion_ids, answer, **columns):
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer)
    return [
        float(p == "p" and a == "x" and ids == [1, 2] and columns["extra"][0] == 7)
        for p, a, ids in zip(prompts, answer, completion_ids, strict=True)
    ]


def not_a_number(completions, **_):
    return [float("nan") for _ in completions]


def infinite(completions, **_):
    return [float("inf") for _ in completions]


def too_few(completions, **_):
    return [0.0 for _ in completions][1:]


def allocates(completions, slow, **_):
    """Allocates memory forever if `slow`."""
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
    """Keeps the interpreter lock forever."""
    if slow[0] == "1":
        ctypes.PyDLL(None).sleep(3600)
    return [1.0 for _ in completions]


def dies(completions, slow=("1",), **_):
    if slow[0] == "1":
        os._exit(7)
    return [1.0 for _ in completions]


def takes_its_time(completions, slow=("0",), **_):
    time.sleep({"1": 8, "an hour": 3600}.get(slow[0], 0))
    return [1.0 for _ in completions]


def fails_once(completions, marker, **_):
    try:
        os.close(os.open(marker[0], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return [1.0 for _ in completions]
    raise RuntimeError("first time")


def negative_once(completions, marker, **_):
    """Returns -1 for the second completion in the first call."""
    try:
        os.close(os.open(marker[0], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return [1.0 for _ in completions]
    return [1.0 - 2.0 * index for index, _ in enumerate(completions)]


def names_its_reader(completions, marker, slow, **_):
    """Writes its pool's process id and hangs in the first call; does not hang in the second call of
    the same group."""
    if slow[0] == "1":
        try:
            file = os.open(marker[0], os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return [1.0 for _ in completions]
        os.write(file, str(psutil.Process(os.getppid()).ppid()).encode())
        time.sleep(3600)
    return [1.0 for _ in completions]


class KeptClient:
    """Behaves like an HTTP client: what its first call makes belongs to that call's event loop."""

    def __init__(self):
        self.questions = None

    async def ask(self, question):
        if self.questions is None:
            self.questions = asyncio.Queue()
            self.server = asyncio.create_task(self.answer())
        reply = asyncio.get_running_loop().create_future()
        await self.questions.put((question, reply))
        return await reply

    async def answer(self):
        while True:
            question, reply = await self.questions.get()
            reply.set_result(float(len(question)))


client = KeptClient()


async def asks_a_kept_client(completions, **_):
    return [await client.ask(completion) for completion in completions]


under_way = most_under_way = 0
arrived = threading.Condition()


def meets_others(completions, others, **_):
    """Waits until `others` calls run at once, and returns the peak number of concurrent calls."""
    global under_way, most_under_way
    with arrived:
        under_way += 1
        most_under_way = max(most_under_way, under_way)
        arrived.notify_all()
        arrived.wait_for(lambda: most_under_way >= others[0])
    time.sleep(0.05)
    with arrived:
        under_way -= 1
    return [float(most_under_way) for _ in completions]


async def meets_others_async(completions, others, **_):
    global under_way, most_under_way
    under_way += 1
    most_under_way = max(most_under_way, under_way)
    while most_under_way < others[0]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    under_way -= 1
    return [float(most_under_way) for _ in completions]


async def waits_or_tells(completions, does, **_):
    """One group harms its process; the others report which process they are in."""
    if does[0] == "waits forever":
        await asyncio.sleep(3600)
    if does[0] == "blocks the loop":
        time.sleep(3600)  # noqa: ASYNC251
    if does[0] == "ends the process":
        os._exit(7)
    if does[0] == "takes its time":
        await asyncio.sleep(0.5)
    return [float(os.getpid()) for _ in completions]


def blocks_a_thread(completions, does, **_):
    time.sleep(3600 if does[0] == "waits forever" else 1.0)
    return [float(os.getpid()) for _ in completions]


LEAVES = {
    "child": "exec sleep 3600",
    "session": "exec setsid sleep 3600",
    "double fork": "(sleep 3600 &) ; (setsid sh -c 'sleep 3600 & sleep 3600' &) ; true",
}


def leaves_processes(completions, how, marker, then, **_):
    """Starts processes that keep the marker open and try to escape in several ways. Then hangs,
    ends its process or returns."""
    with open(marker[0], "a") as held:
        for command in LEAVES.values() if how[0] == "all" else [LEAVES[how[0]]]:
            subprocess.Popen(["sh", "-c", command], stdin=held, stdout=held, stderr=held)
        if how[0] == "all" and os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)
        held.write("started\n")
    if then[0] == "hangs":
        time.sleep(3600)
    if then[0] == "dies":
        os._exit(3)
    return [1.0 for _ in completions]


async def leaves_a_process_async(completions, marker, **_):
    with open(marker[0], "a") as held:  # noqa: ASYNC230
        process = await asyncio.create_subprocess_exec(
            "sleep", "3600", stdin=held, stdout=held, stderr=held
        )
    await process.wait()
    return [1.0 for _ in completions]


def told(finish_reason, truncated, messages=None, bonus=0.0, **_):
    return {
        "cut": [float(reason == "length") for reason in finish_reason],
        "truncated": [float(cut) for cut in truncated],
        "asked": [
            float(len(chat)) if chat else 0.0 for chat in messages or [None] * len(truncated)
        ],
        "bonus": [bonus] * len(truncated),
    }


def names_what_it_wants(completions, answer):
    return [
        float(completion == expected)
        for completion, expected in zip(completions, answer, strict=True)
    ]


def parts_with_a_total(completions, **_):
    return {
        "reward": [2.0] * len(completions),
        "length": [float(len(completion)) for completion in completions],
    }


def a_part_is_none(completions, **_):
    return {"a": [1.0, None], "b": [0.5, 0.5]}


def short_part(completions, **_):
    return {"a": [1.0], "b": [0.5, 0.5]}


def no_part(completions, **_):
    return {}


def part_with_a_slash(completions, **_):
    return {"a/b": [1.0, 1.0]}


def meets_another_pool(completions, folder, slow, **_):
    """Returns once two pools have called it. With `slow`, writes its pool's process id once and
    hangs."""
    pool = psutil.Process(os.getppid()).ppid()
    if slow[0] == "1":
        return names_its_reader(completions, [f"{folder[0]}/reader"], slow)
    with open(f"{folder[0]}/pool-{pool}", "w"):
        pass
    while len([name for name in os.listdir(folder[0]) if name.startswith("pool-")]) < 2:
        time.sleep(0.01)
    return [1.0 for _ in completions]


def names_its_process(completions, **_):
    if "fail" in completions:
        raise ValueError("no such thing")
    return [float(os.getpid()) for _ in completions]


def of_each_token(completion_ids, **_):
    return [[float(token) for token in ids] for ids in completion_ids]


def none_for_one(completion_ids, **_):
    return [None, *([0.5] * len(ids) for ids in completion_ids[1:])]


def one_token_short(completion_ids, **_):
    return [[1.0] * (len(ids) - 1) for ids in completion_ids]


def a_token_is_none(completion_ids, **_):
    return [[None] * len(ids) for ids in completion_ids]


def array(completions, **_):
    import numpy as np

    return np.array([0.25 for _ in completions], dtype=np.float32)


def tensor(completions, **_):
    import torch

    return torch.tensor([0.25 for _ in completions])


def tensors(completions, **_):
    import torch

    return {"reward": [torch.tensor(0.25) for _ in completions]}


def long_text(completions, **_):
    return ["x" * 10**7 for _ in completions]


def raises_half_a_character(completions, **_):
    raise ValueError("\ud800" + "x" * 10**6)


def interrupts(completions, **_):
    raise KeyboardInterrupt


async def interrupts_later(completions, **_):
    raise KeyboardInterrupt


def asks_for_an_unknown_argument(completions, solution):
    return [0.0 for _ in completions]


def finds_nothing(completions, **_):
    return [next(letter for letter in completion if letter == "?") for completion in completions]


def too_large(completions, **_):
    return [10**400 for _ in completions]


def parts_too_large(completions, **_):
    return {"a": [3e38 for _ in completions], "b": [3e38 for _ in completions]}


def large(completions, **_):
    return [3e38 for _ in completions]


def large_tokens(completion_ids, **_):
    return [[3e38, -3e38][: len(ids)] for ids in completion_ids]


def a_set(completions, **_):
    return set(range(len(completions)))


class UnreadableError(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


def raises_what_cannot_be_read(completions, **_):
    raise UnreadableError


def returns_what_cannot_be_read(completions, **_):
    return [UnreadableError() for _ in completions]
