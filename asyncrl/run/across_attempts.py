"""Resources that the attempts of a run share: the Ray cluster, and the run's own generators."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from asyncrl.config import Config, RunSettings
from asyncrl.contracts.errors import PartDiedError, PlacementLostError
from asyncrl.contracts.state import State
from asyncrl.generation.run_generators import RunGenerators
from asyncrl.run.closing import close_part
from asyncrl.run.cluster.cluster import ray_cluster
from asyncrl.runtime.files.opening import replace_text
from asyncrl.runtime.files.removal import remove_folder
from asyncrl.runtime.redact import redact

THREADS_END_S = 10.0
"""Seconds that calls in threads get to return at the end of an attempt."""
LARGEST_LOG = 10 << 20
"""Bytes. Of larger log files of a Ray session, the end is kept."""


class AcrossAttempts:
    """Holds the Ray cluster and the run's own generators across the attempts of a run."""

    def __init__(self, asked: float | None = None) -> None:
        """
        Args:
            asked: when the user's command began, on the monotonic clock. None: now.
        """
        self.asked = time.monotonic() if asked is None else asked
        """When the next attempt was asked for: by the command, or by the end of the last one."""
        self.generators: RunGenerators | None = None
        self.placed: Config | None = None
        """The config with which `generators` were placed."""
        self.failed: list[str] = []
        """Stations of the attempt that did not close in time. What they hold is freed only when the
        cluster ends."""
        self._cluster: ExitStack | None = None
        self._session_logs: Path | None = None

    @asynccontextmanager
    async def attempt(
        self, config: RunSettings, state: State, logs: Path, restarts_left: Callable[[], int]
    ) -> AsyncIterator[None]:
        """Provide the cluster while the body runs.

        On exit the generators and then the cluster end. They are kept for a further attempt if
        another part died and all others closed.

        Args:
            restarts_left: automatic restarts that are left after this attempt.

        Raises:
            Whatever `ray_cluster` raises.
        """
        keep = False
        self.failed.clear()
        try:
            if self._cluster is None:
                with ExitStack() as stack:
                    self._session_logs = stack.enter_context(ray_cluster(config))
                    self._cluster = stack.pop_all()
            yield
        except PartDiedError as error:
            keep = restarts_left() > 0 and not isinstance(error, PlacementLostError)
            raise
        finally:
            self.asked = time.monotonic()
            keep = (
                keep
                and not self.failed
                and self.generators is not None
                # Awake engines would hold the memory with which the next learner starts.
                and not (self.placed is not None and self.placed.takes_shifts_on_gpus)
                and await self.generators.release(state.run_id, state.attempt)
            )
            try:
                if not keep:
                    await self._end_generators()
                # A thread that calls Ray after the end of the cluster would kill this process.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(
                        asyncio.get_running_loop().shutdown_default_executor(), THREADS_END_S
                    )
            finally:
                if not keep:
                    self._end_cluster()
                if self._session_logs is not None:
                    kept = _keep_logs(self._session_logs, logs / "ray")
                    if kept and self._cluster is None:
                        _remove_session(self._session_logs.parent)

    def end(self) -> None:
        """End what an attempt kept for a further attempt that did not start."""
        if self._cluster is not None:
            asyncio.run(self._end_generators())
            self._end_cluster()
            if self._session_logs is not None:
                _remove_session(self._session_logs.parent)

    def config(self, config: Config) -> Config:
        """The config of an attempt, which attaches to generators that an earlier attempt kept."""
        return (
            config
            if self.generators is None
            else config.model_copy(update={"generator": self.generators.attached})
        )

    async def _end_generators(self) -> None:
        generators, self.generators, self.placed = self.generators, None, None
        if generators is not None:
            await close_part("generators", generators.end, self.failed)

    def _end_cluster(self) -> None:
        stack, self._cluster = self._cluster, None
        if stack is not None:
            stack.close()


def _keep_logs(session: Path, target: Path) -> bool:
    """Copy the logs of the Ray session (Ray's, vLLM's and DeepSpeed's) without secrets. Returns
    whether all could be copied."""
    failed = 0
    for file in session.rglob("*"):
        try:
            if file.is_file() and (size := file.stat().st_size):
                with file.open("rb") as log:
                    log.seek(max(0, size - LARGEST_LOG))
                    if size > LARGEST_LOG:
                        log.readline()  # a secret may be cut
                    text = log.read(LARGEST_LOG).decode(errors="replace")
                replace_text(target / file.relative_to(session), redact(text))
        except FileNotFoundError:
            continue  # a process of Ray that is still ending has removed it
        except OSError:
            failed += 1
    return not failed


def _remove_session(session: Path) -> None:
    """Remove the folder that Ray leaves of a cluster that has ended, and Ray's link to it."""
    latest = session.with_name("session_latest")
    with contextlib.suppress(OSError):
        if os.readlink(latest) == str(session):
            latest.unlink()
    remove_folder(session)
