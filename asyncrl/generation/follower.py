"""A further node of an engine: the workers that vLLM has there, and their copy of a version.

The node of the replica schedules, and its workers and these compute together. A follower runs what
`vllm serve --headless` runs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from asyncrl.contracts.messages import Manifest
from asyncrl.generation.engine.arguments import engine_config
from asyncrl.generation.rendezvous import NodeRank, use_own_address
from asyncrl.generation.settings import GeneratorApp
from asyncrl.runtime.files.temporary import ProcessTemporaryFolder
from asyncrl.runtime.processes.environment import claim_caches, preload_openmp
from asyncrl.weights.engine import STACKS
from asyncrl.weights.manifest import expected_tensors, tensors_of
from asyncrl.weights.staging import Staged, fetch_version, sweep

if TYPE_CHECKING:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class Follower:
    """One node's part of an engine. Use it in a process of its own, whose end ends the workers.
    `run` blocks; call the other methods from other threads."""

    def __init__(self, app: GeneratorApp) -> None:
        sweep()
        self.app = app
        self._expected = expected_tensors(app.model, app.dtype)
        self._executor: MultiprocExecutor | None = None
        self._staged: Staged | None = None
        self._temporary: ProcessTemporaryFolder | None = None

    def run(self, node: NodeRank) -> None:
        """Start this node's workers, and wait until one of them has ended.

        Raises:
            RuntimeError: always. A worker has ended, or could not start.
        """
        claim_caches("generator")
        self._temporary = ProcessTemporaryFolder("engine")
        os.environ[STACKS] = str(self._temporary.path)
        address = use_own_address()
        if self.app.generator.device == "cpu":
            os.environ["LD_PRELOAD"] = preload_openmp(os.environ.get("LD_PRELOAD", ""))
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        config, _ = engine_config(self.app, node)
        self._executor = MultiprocExecutor(config, monitor_workers=False)
        self._executor.start_worker_monitor(inline=True)
        raise RuntimeError(f"a vLLM worker on node {address} has ended")

    def stage(self, manifest: Manifest) -> tuple[dict[str, object], float]:
        """Fetch a version into this node's shared memory and check it. Returns what this node's
        workers need to map it, and the seconds that it took.

        Raises:
            ManifestError, StagingError: the version cannot be fetched; nothing has changed.
        """
        expected = tensors_of(manifest, self._expected, self.app.max_lora_rank)
        self._staged = fetch_version(manifest, expected, self.app.fetch_within_s)
        return self._staged.update_info(), self._staged.fetch_s

    def unstage(self) -> None:
        """Delete the copy of `stage`, if there is one."""
        if self._staged is not None:
            self._staged.remove()
        self._staged = None

    def stop(self) -> None:
        """End this node's workers."""
        if self._executor is not None:
            self._executor.shutdown()
        self.unstage()
        sweep()  # killed workers leave their queues
        if self._temporary is not None:
            self._temporary.close()
