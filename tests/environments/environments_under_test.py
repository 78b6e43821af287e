"""Environments as users write them, with the faults that users make."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.environments import AgentFailedError


async def ask(model: Any, content: str = "q", **options: Any) -> str:
    messages = [{"role": "user", "content": content}]
    answer = await model.chat.completions.create(messages=messages, **options)
    return str(answer.choices[0].message.content)


async def echo(task: Mapping[str, Any], model: Any, worth: float = 1.0) -> float:
    """One turn, worth `worth`."""
    await ask(model, task["prompt"])
    return worth


async def faulty(task: Mapping[str, Any], model: Any) -> float | None:
    """Does what its task says, after one turn."""
    await ask(model)
    match task["fault"]:
        case "blocks":
            time.sleep(60)  # noqa: ASYNC251
        case "blocks until":
            while not os.path.exists(task["file"]):
                time.sleep(0.01)  # noqa: ASYNC251
        case "blocks in a task of its own":
            await asyncio.gather(blocks(), asyncio.sleep(60))
        case "hangs in c":
            re.match(r"(a+)+$", "a" * 40 + "b")
        case "dies":
            os._exit(7)
        case "leaves":
            sys.exit(3)
        case "leaves with a text":
            sys.exit("one\n\x1b[31mtwo")
        case "raises with control characters":
            kind = type("Odd\nname", (Exception,), {})
            raise kind("one\r\ntwo\u2028three\x00\u202e")
        case "raises":
            raise KeyError("no such thing")
        case "allocates":
            return float(len(bytearray(8 << 30)))
        case "ignores":
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    continue
        case "waits":
            await asyncio.sleep(1)
        case "overrides and waits":
            await ask(model, "again", temperature=0.5)
            await ask(model, "again", temperature=0.5, seed=1)
            await asyncio.sleep(60)
        case "waits long":
            await asyncio.sleep(60)
        case "blocks in a callback":
            asyncio.get_running_loop().call_later(0.3, time.sleep, 60)  # no session's own code
            await asyncio.sleep(60)
        case "cancels itself":
            task = asyncio.ensure_future(asyncio.sleep(60))
            task.cancel()
            await task
        case "catches":
            try:
                await ask(model, "again")
            except Exception:
                return 0.0
        case "leaves a task":
            leaves.add(asyncio.ensure_future(blocks_later()))
        case "surrogate":
            raise FileNotFoundError("caf\udce9")
        case "swallows its deadline":
            if "file" in task:
                Path(task["file"]).touch()
            try:
                await asyncio.sleep(60)
            except BaseException:
                return 0.0
        case "base exception":
            raise BaseException("odd\nlines")
        case "asks in a thread":
            answer = await asyncio.to_thread(lambda: asyncio.run(ask(model, "thread")))
            return float(answer == "said thread")
        case "hangs in a thread":
            await asyncio.to_thread(threading.Event().wait)
        case "calls in a thread":
            return float(await asyncio.to_thread(os.getpid))
        case "nests":
            deep: Any = "x"
            for _ in range(3000):
                deep = [deep]
            calls = [{"function": {"name": "f", "arguments": {"x": deep}}}]
            await model.chat.completions.create(
                messages=[{"role": "assistant", "content": "", "tool_calls": calls}]
            )
        case "cancels all":
            for task in asyncio.all_tasks():
                task.cancel()
            await asyncio.sleep(60)
        case "numpy":
            import numpy as np

            return np.float32(0.5)  # type: ignore[return-value]
        case "starts others":
            subprocess.Popen(["sleep", "600"], start_new_session=True)  # noqa: ASYNC220
        case "nonsense":
            return "good"  # type: ignore[return-value]
        case "nothing":
            return None
        case "agent fails":
            raise AgentFailedError("exit code 1")
    return 1.0


async def tells_its_key(task: Mapping[str, Any], model: Any) -> float | None:
    """Writes its process and where its session is served to a file. Then as `faulty`."""
    with open(task["file"], "a") as file:  # noqa: ASYNC230
        file.write(f"{os.getpid()} {model.base_url} {model.api_key}\n")
    worth = await faulty(task, model)
    if task["fault"] == "asks at its URL":
        import httpx2

        async with httpx2.AsyncClient() as client:
            await client.post(
                f"{model.base_url}/chat/completions",
                json={"messages": [{"role": "user", "content": "again"}]},
                headers={"authorization": f"Bearer {model.api_key}"},
            )
    return worth


leaves: set[Any] = set()


async def blocks_later() -> None:
    await asyncio.sleep(0.5)
    time.sleep(60)  # noqa: ASYNC251


async def blocks() -> None:
    time.sleep(60)  # noqa: ASYNC251


class Game:
    """Answers "more" until the model has said "stop"."""

    def __init__(self, most: int = 3) -> None:
        self.left = most

    def reset(self, task: Mapping[str, Any]) -> str:
        return str(task["prompt"])

    def step(self, message: Mapping[str, Any]) -> tuple[str, float, bool]:
        self.left -= 1
        return "more", 1.0, self.left == 0


class Closing:
    """A game that notes its end. The task says how it goes, and what `close` does."""

    def reset(self, task: Mapping[str, Any]) -> str:
        self.task = task
        if task["fault"] == "reset raises":
            raise OSError("no table")
        return "q"

    async def step(self, message: Mapping[str, Any]) -> tuple[str, float, bool]:
        if self.task["fault"] == "step raises":
            raise OSError("no row")
        if self.task["fault"] == "waits":
            Path(self.task["file"] + ".waits").touch()
            await asyncio.sleep(60)
        return "more", 1.0, self.task["fault"] == "none"

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        note = Path(self.task["file"])
        note.write_text("closed\n" + (note.read_text() if note.exists() else ""))
        if self.task.get("close") == "raises":
            raise OSError("cannot close")
        if self.task.get("close") == "hangs":
            await asyncio.sleep(60)


class Half:
    def reset(self, task: object) -> str:
        return "x"


def plain(task: object, model: object) -> float:
    return 1.0


async def sometimes_raises(task: object, model: Any, seen: list[int] = []) -> float:  # noqa: B006
    """Raises in the second session of its process."""
    seen.append(1)
    second = len(seen) == 2
    await ask(model)
    if second:
        raise RuntimeError("unlucky")
    return 1.0


async def dies_once(task: object, model: Any, seen: list[int] = []) -> float:  # noqa: B006
    """Ends its process in the third of three sessions, and never with fewer."""
    seen.append(1)
    third = len(seen) == 3
    await ask(model)
    await asyncio.sleep(0.5)
    if third:
        os._exit(1)
    await asyncio.sleep(0.5)
    return 1.0


async def asks_nothing(task: object, model: Any) -> float:
    return 1.0


async def rewrites(task: Mapping[str, Any], model: Any) -> float:
    """Takes two turns, the second one again after another question, and goes on with a summary,
    which it sends three times."""
    create = model.chat.completions.create
    start: list[Any] = [{"role": "user", "content": "q"}]
    start.append((await create(messages=start)).choices[0].message)
    for question in ("higher", "lower"):
        await create(messages=[*start, {"role": "user", "content": question}])
    for _ in range(3):
        await ask(model, "summary")
    return 1.0
