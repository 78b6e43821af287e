"""Measures the CPU time and the memory of sessions, besides the engine.

    python -m benchmarks.sessions [--turns 1,8,32,128] [--sessions 1,50,200]

Prints

- the bookkeeping of a turn by the length of its session, in this process: comparing chats, the
  template's continuation, parsing, the tree. The completions are made up before;
- the bookkeeping of a sampled token, which must not grow with the session;
- the CPU time of a turn of the game in `jobs.guess`, with environment processes, by the number of
  sessions at once: the rollout worker's part, and the environment process's;
- the same for an agent with openai's client at the sessions' URL, and how much longer a turn takes;
- the errors of many sessions and agent programs at once;
- the memory of a waiting session, besides its tokens.

The exit code is 0 if every bar is met.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from asyncrl.config import AgentCommand, FunctionEnvironment
from asyncrl.contracts import Completion, VersionSpan
from asyncrl.observe import cpu_seconds, cpu_seconds_between
from asyncrl.rollout import Player
from asyncrl.sessions import ChatRequest, Sampled, Session, SessionTemplate, TurnRequest
from asyncrl.text import ResponseReader, load_tokenizer
from jobs.guess.game import TOOLS
from jobs.guess.task import make_model

TOKENS = 64
"""Tokens of a long answer."""
MOST_MS, MOST_GROWTH, MOST_KIB = 8.0, 1.5, 4.0
REPEATS = 5
GAMES = 400
"""Games of a measurement, at least."""
WAITING = 200
PROGRAMS = 16
TURN_S = 0.05
"""Seconds in which a turn is sampled, where it matters: ten tokens at 5 ms."""
MOST_RATIO, PAIRS = 1.15, 15
TASK = {"low": 31, "hidden": 31, "prompt": "31..93"}
PROGRAM = """
import json, os, urllib.request
messages = [{"role": "user", "content": "31..93"}]
for _ in range(6):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages}).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        },
    )
    answer = json.load(urllib.request.urlopen(request))
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "lower"}]
"""
"""An agent that takes six turns."""


class Maker:
    """A `TurnGenerator` whose answers are the same tokens. It counts turns."""

    def __init__(self, ids: Sequence[int], seconds: float = 0.0) -> None:
        self.ids, self.seconds, self.turns = tuple(ids), seconds, 0
        self.wait: asyncio.Event | None = None
        spans = (VersionSpan(0, 0, len(self.ids)),)
        self.completion = Completion(self.ids, (-1.0,) * len(self.ids), spans, "stop", "text")

    async def generate(self, request: TurnRequest, heard: object = None) -> list[Sampled]:
        if self.wait is not None:
            await self.wait.wait()
        if self.seconds:
            await asyncio.sleep(self.seconds)
        self.turns += request.n
        return [Sampled(self.completion, "replica", 0.0, 1.0)] * request.n


class Parts:
    """What sessions of the game's model are made of."""

    def __init__(self, folder: Path) -> None:
        make_model(folder, 0)
        self.tokenizer: Any = load_tokenizer(str(folder))
        end: Any = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.template = SessionTemplate(self.tokenizer, frozenset({end}), 1 << 20)
        self.reader = ResponseReader(self.tokenizer)
        call = '<tool_call>{"name": "guess", "arguments": {"number": 51}}</tool_call><|im_end|>'
        self.call = self.tokenizer.encode(call)
        self.answer = [*self.tokenizer.encode("higher") * (TOKENS - 1), end]

    def session(self, maker: Maker) -> Session:
        def read(prompt_ids: Any, completion: Completion, tools: Any) -> Any:
            return self.reader.read(prompt_ids, completion.token_ids, completion.text, tools)[0]

        return Session(self.template, maker, read)


def main(arguments: list[str]) -> int:
    """Run the benchmark and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sessions")
    parser.add_argument("--turns", default="1,8,32,128")
    parser.add_argument("--sessions", default="1,50,200")
    options = parser.parse_args(arguments)
    missed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="asyncrl_bench_") as folder:
        parts = Parts(Path(folder) / "model")
        per_token = []
        for turns in map(int, options.turns.split(",")):
            seconds = statistics.median(_talk(parts, turns) for _ in range(REPEATS))
            per_token.append(seconds / turns / TOKENS)
            print(
                f"{turns:4} turns of {TOKENS} tokens: {1e3 * seconds / turns:6.2f} ms a turn,"
                f" {1e6 * per_token[-1]:6.1f} us a token"
            )
        growth = per_token[-1] / per_token[0]
        print(f"growth from the shortest to the longest: {growth:.1f} times (bar {MOST_GROWTH})")
        if growth > MOST_GROWTH:
            missed.append("growth")
        for sessions in map(int, options.sessions.split(",")):
            worker, process = asyncio.run(_games(parts, sessions))
            print(
                f"{sessions:4} sessions at once: {worker + process:.2f} ms of CPU a turn (bar"
                f" {MOST_MS:g}): {worker:.2f} in the worker, {process:.2f} in the environment"
            )
            if worker + process > MOST_MS:
                missed.append(f"{sessions} sessions")
        for sessions in map(int, options.sessions.split(",")):
            worker, process = asyncio.run(_games(parts, sessions, at_url=True))
            print(
                f"{sessions:4} sessions at the URL: {worker + process:.2f} ms of CPU a turn:"
                f" {worker:.2f} in the worker, {process:.2f} in the agent with openai's client"
            )
        ratio = asyncio.run(_latency_ratio(parts))
        print(
            f"a turn of {1e3 * TURN_S:g} ms takes {ratio:.2f} times as long at the URL as in"
            f" process (bar {MOST_RATIO})"
        )
        if ratio > MOST_RATIO:
            missed.append("the URL")
        errors = asyncio.run(_crowd(parts))
        print(f"{WAITING} sessions in process and {PROGRAMS} programs at once: {errors} errors")
        if errors:
            missed.append("errors")
        kib = asyncio.run(_memory(parts))
        print(f"a waiting session takes {kib:.1f} KiB besides its tokens (bar {MOST_KIB:g})")
        if kib > MOST_KIB:
            missed.append("memory")
    print("every bar is met" if not missed else f"missed: {', '.join(missed)}")
    return 1 if missed else 0


def _talk(parts: Parts, turns: int) -> float:
    """CPU seconds of one session with this many turns of TOKENS tokens each."""
    session = parts.session(Maker(parts.answer))

    async def talk() -> float:
        chat: list[Any] = [{"role": "user", "content": "31..93"}]
        began = time.process_time()
        for _ in range(turns):
            (answer,) = await session.chat(ChatRequest(chat, TOOLS))
            chat += [answer.message, {"role": "user", "content": "higher"}]
        return time.process_time() - began

    return asyncio.run(talk())


def _player(at_once: int, at_url: bool) -> Player:
    function = "jobs.guess.agent:play" if at_url else "jobs.guess.game:play"
    return Player(
        FunctionEnvironment(function=function, processes=1, concurrency=at_once, url=at_url)
    )


async def _games(parts: Parts, at_once: int, at_url: bool = False) -> tuple[float, float]:
    """Milliseconds of CPU a turn, in this process and in the environment process, while this many
    games are played. No game is won, so each has six turns."""
    pool = _player(at_once, at_url)
    maker = Maker(parts.call)

    async def player(games: int) -> None:
        for _ in range(games):
            ended = await pool.play(TASK, parts.session(maker))
            assert ended.end == "done" and ended.turns == 6, ended

    try:
        await pool.start()
        await player(2)
        root = psutil.Process()
        maker.turns = 0
        before = cpu_seconds(root)
        await asyncio.gather(*(player(max(1, GAMES // at_once)) for _ in range(at_once)))
        used = cpu_seconds_between(before, cpu_seconds(root))
    finally:
        await pool.close()
    driver = used.pop("driver")
    return 1e3 * driver / maker.turns, 1e3 * sum(used.values()) / maker.turns


async def _latency_ratio(parts: Parts) -> float:
    """How much longer a game takes at the URL than in process, if a turn is sampled in TURN_S. The
    median of pairs."""
    maker = Maker(parts.call, TURN_S)
    players = [_player(1, at_url) for at_url in (False, True)]
    seconds: tuple[list[float], list[float]] = [], []
    try:
        for player in players:
            await player.start()
            await player.play(TASK, parts.session(maker))
        for _ in range(PAIRS):
            for player, taken in zip(players, seconds, strict=True):
                began = time.perf_counter()
                await player.play(TASK, parts.session(maker))
                taken.append(time.perf_counter() - began)
    finally:
        for player in players:
            await player.close()
    ratios = [url / own for own, url in zip(*seconds, strict=True)]
    return float(statistics.median(ratios))


async def _crowd(parts: Parts) -> int:
    """Errors of many sessions in process and of some programs at once."""
    maker = Maker(parts.call, TURN_S)
    command = [sys.executable, "-c", PROGRAM]
    programs = Player(AgentCommand(command=command, stdin="none", processes=1))
    own = _player(WAITING, at_url=False)
    try:
        await asyncio.gather(programs.start(), own.start())
        ends = await asyncio.gather(
            *(own.play(TASK, parts.session(maker)) for _ in range(WAITING)),
            *(programs.play(TASK, parts.session(maker)) for _ in range(PROGRAMS)),
        )
    finally:
        await asyncio.gather(programs.close(), own.close())
    return sum(ended.end != "done" for ended in ends)


async def _memory(parts: Parts) -> float:
    """KiB of Python memory that a session holds while it waits for its second turn, with its task,
    besides its tokens."""
    chat: list[Any] = [{"role": "user", "content": "31..93"}]
    await parts.session(Maker(parts.call)).chat(ChatRequest(chat, TOOLS))
    gc.collect()
    tracemalloc.start()
    wait = asyncio.Event()
    maker = Maker(parts.call)
    sessions = [parts.session(maker) for _ in range(WAITING)]
    tasks = []
    for session in sessions:
        (answer,) = await session.chat(ChatRequest(chat, TOOLS))
        reply = {"role": "tool", "content": "lower", "tool_call_id": "call"}
        tasks.append(
            asyncio.create_task(session.chat(ChatRequest([*chat, answer.message, reply], TOOLS)))
        )
    maker.wait = wait
    await asyncio.sleep(0)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    wait.set()
    await asyncio.gather(*tasks)
    tokens = sum(len(node.token_ids) for node in sessions[0].nodes)
    return (held / WAITING - tokens * 8) / 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
