"""A start of an engine that is canceled, with stubs of vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from asyncrl.generation.engine import engine
from asyncrl.generation.engine.engine import start_engine
from asyncrl.generation.settings import GeneratorApp
from asyncrl.runtime.processes.environment import Caches


class Ending:
    """A stub of vLLM and of its processes, whose shutdown waits for `may_end`."""

    def __init__(self, folder: object, fails: bool) -> None:
        self.folder, self.fails = folder, fails
        self.ends, self.may_end, self.ended = threading.Event(), threading.Event(), asyncio.Event()

    def shutdown(self, timeout: float) -> None:
        self.ends.set()
        assert self.may_end.wait(20)
        if self.fails:
            raise OSError("the shutdown fails")

    def started(self) -> None: ...

    async def end(self) -> None:
        assert self.may_end.is_set(), "vLLM ends before its processes"
        self.ended.set()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_canceled_start_ends_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool
) -> None:
    stub, loaded = Ending(tmp_path, fails), asyncio.Event()

    async def prepare(*arguments: object) -> None:
        loaded.set()
        await asyncio.Event().wait()

    for name in ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.async_llm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv(engine.STACKS, "")
    monkeypatch.setattr(engine, "preload_openmp", lambda before: before)
    monkeypatch.setattr(engine, "claim_caches", lambda role: Caches(Path(), None))
    monkeypatch.setattr(engine, "EarlyProcess", contextlib.nullcontext)
    monkeypatch.setattr(engine, "engine_config", lambda *arguments: (None, None))
    monkeypatch.setattr(engine, "_make_llm", lambda *arguments: stub)
    monkeypatch.setattr(engine, "_prepare", prepare)

    async with asyncio.timeout(20):
        processes: Any = stub
        start = asyncio.ensure_future(start_engine(GeneratorApp(model="m"), processes))
        await loaded.wait()
        start.cancel()
        assert await asyncio.to_thread(stub.ends.wait, 10)
        start.cancel()  # as by a client that has no patience
        await asyncio.gather(start, return_exceptions=True)
        stub.may_end.set()
        await stub.ended.wait()
    assert start.cancelled()
