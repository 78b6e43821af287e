"""What the requests, the updates and the rest of one engine share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.contracts.errors import EngineDiedError, StaleReplicaError
from asyncrl.generation.engine.adapters import Adapters
from asyncrl.generation.engine.early_process import fatal_error
from asyncrl.generation.engine.kept_requests import KeptRequests
from asyncrl.generation.engine.stats import EngineStats
from asyncrl.generation.settings import GeneratorApp

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class EngineState:
    """vLLM's engine, the version of its weights, and whether it takes requests."""

    def __init__(
        self,
        app: GeneratorApp,
        llm: AsyncLLM,
        folder: Path,
        stats: EngineStats,
        opened: asyncio.Event,
    ) -> None:
        """
        Args:
            folder: temporary files of vLLM.
            opened: set while the engine takes requests: between updates, and not in a rest.
        """
        self.app, self.folder, self.stats, self.opened = app, folder, stats, opened
        self.version = 0
        self.updates = 0
        """Updates applied: a salt for the prefix cache. The version alone is not enough, since
        another run or attempt may publish other weights under the same number."""
        self.broken: str | None = None
        """Why the engine cannot be used: an update failed halfway, or the engine hung."""
        self.adapters = Adapters(app.max_loras)
        self.kept = KeptRequests(opened)
        self._llm: AsyncLLM | None = llm

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's engine. Raises StaleReplicaError after `take_llm`."""
        if self._llm is None:
            raise StaleReplicaError("the engine has been stopped")
        return self._llm

    @property
    def stopped(self) -> bool:
        """Whether `take_llm` was called."""
        return self._llm is None

    @property
    def ended(self) -> bool:
        """Whether the engine was stopped, or its process has died."""
        return self._llm is None or self._llm.errored

    def take_llm(self) -> AsyncLLM | None:
        """vLLM's engine, which nobody can use from now on. None if it was taken before."""
        llm, self._llm = self._llm, None
        return llm

    def refuse_lost(self) -> None:
        """Raise StaleReplicaError if the engine cannot be used."""
        if self.broken is not None:
            raise StaleReplicaError(self.broken)
        if self.llm.errored:
            raise StaleReplicaError("the vLLM engine's process has died")

    def died(self) -> EngineDiedError:
        """The error for a request whose engine died, with the cause."""
        cause = fatal_error(self.folder)
        return EngineDiedError(f"the vLLM engine's process has died{f': {cause}' if cause else ''}")

    def lose(self, reason: str) -> None:
        """Note that the engine is unusable, and let waiting requests learn it."""
        self.broken = reason
        self.opened.set()

    @contextlib.contextmanager
    def unusable_after(self, failure: str) -> Iterator[None]:
        """If the body fails, the engine is unusable.

        After an update, the weights may be half old and half new, and vLLM cannot undo it. So the
        engine must not generate, even after a cancellation.

        Raises:
            RuntimeError: the failure with its cause.
        """
        try:
            yield
        except BaseException as error:
            reason = f"{failure}: {type(error).__name__}: {error}"
            self.lose(reason)
            if not isinstance(error, Exception):
                raise
            raise RuntimeError(reason) from error
