"""The engine's process, started before vLLM asks for it: both sides of an engine import vLLM at the
same time.

That import takes most of an engine's start, and vLLM would run one import after the other. A
fork of a process that has imported vLLM does not help. With torch, Ray or CUDA loaded it is unsafe,
and vLLM does not fork in a Ray actor.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import multiprocessing
import multiprocessing.util
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Any

FATAL = "fatal.txt"

_handing = threading.Lock()


class EarlyProcess:
    """A spawned process that prepares itself and then waits for its target. It ends with the
    process that spawned it.

    vLLM uses it both as a multiprocessing context and as the process that this context makes. It
    calls `Process(...)` and `start()`, and then uses the attributes of a process. As a context
    manager it kills the process if the block fails or has not started it.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        context = multiprocessing.get_context("spawn")
        receiver, self._sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run_target, args=(prepare, receiver))
        self._process.start()
        receiver.close()
        # At exit Python waits for each process that it spawned, and this one would wait for its
        # target.
        self._at_exit = multiprocessing.util.Finalize(None, self._process.kill, exitpriority=0)
        self._target: tuple[Callable[..., None], Mapping[str, object]] | None = None

    def __enter__(self) -> EarlyProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None or not self._sender.closed:
            self._process.kill()
            self._process.join()
            self._sender.close()
            self._at_exit.cancel()

    def Process(
        self, *, target: Callable[..., None], name: str, kwargs: Mapping[str, object]
    ) -> EarlyProcess:  # multiprocessing's name
        """Set the target and return this process.

        Raises:
            RuntimeError: it has a target already.
        """
        if self.taken:
            raise RuntimeError(
                "vLLM asks for a second process of the engine, and only one was started ahead"
            )
        self._process.name = name
        self._target = target, kwargs
        return self

    @property
    def taken(self) -> bool:
        """Whether the process has a target."""
        return self._target is not None

    def start(self) -> None:
        """Run the target, in the calling process's current environment."""
        # If the process has ended, vLLM learns that from its exit code.
        with contextlib.suppress(BrokenPipeError):
            self._sender.send((self._process.name, dict(os.environ)))
            self._sender.send(self._target)
        self._sender.close()
        self._at_exit.cancel()

    def __getattr__(self, name: str) -> object:
        return getattr(self._process, name)


def keep_fatal_error(folder: str, record: logging.LogRecord) -> bool:
    """A logging filter that passes every record. It records the exception that vLLM logs before
    its engine's process ends: the parent process learns only that the process has ended."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        (Path(folder) / FATAL).write_text(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return True


def fatal_error(folder: Path) -> str | None:
    """The error that ended an engine's process, as one line; None if the process wrote none."""
    try:
        return (folder / FATAL).read_text()
    except OSError:
        return None


def import_engine(folder: str) -> None:
    """Prepare the process of an engine: import vLLM, and keep its last error in `folder`. It
    imports no model and no worker: some of these read, at import, variables that vLLM sets while it
    makes its config."""
    import vllm.v1.engine.core  # noqa: F401
    from vllm.utils.system_utils import set_process_title

    # A title overwrites the memory of the process's first environment. A process that has no title
    # when its environment changes cannot get one later.
    set_process_title("EngineCore")
    # A filter, since vLLM configures its logging again and would remove a handler.
    logging.getLogger("vllm.v1.engine.core").addFilter(functools.partial(keep_fatal_error, folder))


@contextlib.contextmanager
def handed_to_vllm(process: EarlyProcess) -> Iterator[None]:
    """Inside the block, an engine that vLLM makes uses this process instead of spawning one.

    Raises:
        RuntimeError: vLLM made no engine, or spawned a process nevertheless.
    """
    utils: Any = importlib.import_module("vllm.v1.engine.utils")
    with _handing:
        get_mp_context = utils.get_mp_context
        get_mp_context()  # for the environment variables that it sets
        utils.get_mp_context = lambda: process
        try:
            yield
        finally:
            utils.get_mp_context = get_mp_context
    if not process.taken:
        raise RuntimeError(
            "vLLM did not take the engine's process that was started ahead: is this the version of"
            " vLLM that pyproject.toml names?"
        )


def _run_target(prepare: Callable[[], None], receiver: Connection) -> None:
    prepare()
    try:
        about, task = receiver.recv_bytes(), receiver.recv_bytes()
    except (EOFError, OSError):  # the parent process is gone
        return
    receiver.close()
    multiprocessing.current_process().name, environment = ForkingPickler.loads(about)
    os.environ.update(environment)  # before the task's modules are imported
    target, kwargs = ForkingPickler.loads(task)
    target(**kwargs)
