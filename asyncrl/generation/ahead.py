"""The engine's process, started before vLLM asks for it, so that both sides of an engine import
vLLM at the same time.

That import is most of an engine's start, and vLLM makes one after the other. A fork of a process
that has it is no way out: with torch, Ray or CUDA loaded it is unsafe, and in a Ray actor vLLM
refuses it.
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

__all__ = ["AheadProcess", "fatal_error", "handed_to_vllm", "import_engine", "keep_fatal_error"]

FATAL = "fatal.txt"

_handing = threading.Lock()


class AheadProcess:
    """A spawned process that prepares itself and then waits for what it is to run. It ends with the
    one that spawned it.

    To vLLM it is the multiprocessing context and the process that it makes there: `Process(...)`,
    `start()`, and then all that a process has. As a context manager it kills the process if the
    block fails, or if nobody has given it work.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        context = multiprocessing.get_context("spawn")
        work, self._work = context.Pipe(duplex=False)
        self._process = context.Process(target=_run_what_comes, args=(prepare, work))
        self._process.start()
        work.close()
        # At its end Python waits for each process that it spawned, and this one would wait for its
        # work.
        self._at_exit = multiprocessing.util.Finalize(None, self._process.kill, exitpriority=0)
        self._target: tuple[Callable[..., None], Mapping[str, Any]] | None = None

    def __enter__(self) -> AheadProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None or not self._work.closed:
            self._process.kill()
            self._process.join()
            self._work.close()
            self._at_exit.cancel()

    def Process(
        self, *, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]
    ) -> AheadProcess:  # multiprocessing's name
        """This process, which is to run the target.

        Raises:
            RuntimeError: it has a target already.
        """
        if self.taken:
            raise RuntimeError(
                "vLLM asks for a second process of the engine, and one was started ahead"
            )
        self._process.name = name
        self._target = target, kwargs
        return self

    @property
    def taken(self) -> bool:
        """Whether it has a target."""
        return self._target is not None

    def start(self) -> None:
        """Run the target, in the environment that the calling process has now."""
        with contextlib.suppress(
            BrokenPipeError
        ):  # It has ended, as vLLM will see by its exit code.
            self._work.send((self._process.name, dict(os.environ)))
            self._work.send(self._target)
        self._work.close()
        self._at_exit.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


def keep_fatal_error(folder: str, record: logging.LogRecord) -> bool:
    """A logger's filter that lets everything through. It writes down the exception that vLLM logs
    before its engine's process ends: the process that waits for it learns only that it is gone."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        (Path(folder) / FATAL).write_text(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return True


def fatal_error(folder: Path | None) -> str | None:
    """What an engine's process died of, if it could still say so: one line."""
    try:
        return (folder / FATAL).read_text() if folder else None
    except OSError:
        return None


def import_engine(folder: str) -> None:
    """What the process of an engine does first; its last error will be in `folder`. It imports no
    model and no worker: some of them read, when they are imported, variables that vLLM sets while
    it makes its config."""
    import vllm.v1.engine.core  # noqa: F401
    from vllm.utils.system_utils import set_process_title

    # Titles lie where the process's first environment was: they can be set later only if one was
    # before that changed.
    set_process_title("EngineCore")
    # A handler would be gone when vLLM configures its logging once more.
    logging.getLogger("vllm.v1.engine.core").addFilter(functools.partial(keep_fatal_error, folder))


@contextlib.contextmanager
def handed_to_vllm(process: AheadProcess) -> Iterator[None]:
    """Within it, an engine that vLLM makes gets this process where it would have spawned one.

    Raises:
        RuntimeError: none was made, or vLLM spawned one after all.
    """
    utils: Any = importlib.import_module("vllm.v1.engine.utils")
    with _handing:
        get_mp_context = utils.get_mp_context
        get_mp_context()  # for what it sets in the environment
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


def _run_what_comes(prepare: Callable[[], None], work: Connection) -> None:
    prepare()
    try:
        about, task = work.recv_bytes(), work.recv_bytes()
    except (EOFError, OSError):  # nobody is there any more
        return
    work.close()
    multiprocessing.current_process().name, environment = ForkingPickler.loads(about)
    os.environ.update(environment)  # before the modules of the task are imported
    target, kwargs = ForkingPickler.loads(task)
    target(**kwargs)
