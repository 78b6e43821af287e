"""One vLLM engine without Ray or Serve. It takes token ids, returns completions with log-probs and
version spans, and changes weights while generations are in flight.

`start_engine` imports vLLM, which keeps this module cheap to import.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from asyncrl.contracts.messages import GenerateRequest
from asyncrl.generation.engine.arguments import engine_config
from asyncrl.generation.engine.early_process import EarlyProcess, handed_to_vllm, import_engine
from asyncrl.generation.engine.processes import END_S, EngineProcesses
from asyncrl.generation.engine.requests import EngineRequests
from asyncrl.generation.engine.rest import EngineRest
from asyncrl.generation.engine.state import EngineState
from asyncrl.generation.engine.stats import EngineStats, stat_logger
from asyncrl.generation.engine.updates import EngineUpdates
from asyncrl.generation.settings import GeneratorApp
from asyncrl.runtime.processes.environment import Caches, claim_caches, preload_openmp
from asyncrl.text.round_trip import refuse_another_decoder
from asyncrl.text.stops import Stops, load_stops
from asyncrl.text.tokenizer import load_tokenizer
from asyncrl.weights.engine import STACKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    from asyncrl.generation.rendezvous import NodeRank

UNREAD_S = 1.0
"""Seconds for reading an answer that has already arrived, before the engine counts as hung."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Seconds that each part of an engine's start took."""

    import_s: float
    """Importing vLLM. The engine's process imports it at the same time."""
    config_s: float
    """Making vLLM's config. vLLM inspects the model's class, the first time on a machine in another
    process."""
    engine_s: float
    """What the engine's process still needs after that: its workers, the model, the KV cache."""
    first_generation_s: float
    caches_removed: float
    """1 if this process's compile caches contained a damaged file and were removed, else 0."""


class Engine:
    """vLLM's AsyncLLM with versioned weights. `start_engine` makes it. Use it from one event loop,
    and end it with `stop`."""

    def __init__(
        self,
        state: EngineState,
        processes: EngineProcesses,
        requests: EngineRequests,
        load: LoadTimes,
    ) -> None:
        self._state = state
        self.processes, self.requests, self.load = processes, requests, load
        self.rest = EngineRest(state)
        self.updates = EngineUpdates(state, self.rest)
        self._probe: asyncio.Future[bool] | None = None
        """The latest liveness probe of the engine's loop, pending or done."""
        self._probed_at = 0.0

    @property
    def version(self) -> int:
        return self._state.version

    @property
    def broken(self) -> str | None:
        """Why the engine cannot be used. None: it can."""
        return self._state.broken

    @property
    def stats(self) -> EngineStats:
        return self._state.stats

    @property
    def kv_cache_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        cache = self._state.llm.vllm_config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size)

    @property
    def cache_block(self) -> int:
        """Tokens of a block of the prefix cache; 0 without one."""
        cache = self._state.llm.vllm_config.cache_config
        return int(cache.block_size) if cache.enable_prefix_caching else 0

    async def check(self) -> None:
        """Raise RuntimeError if the engine is dead, hangs, or has weights in an unknown state.

        Each call probes the engine's loop unless a probe is pending. A probe without an answer for
        `generator.stall_timeout_s` means that the engine hangs: its processes are killed, and its
        requests end. A slow engine is safe, since it answers between any two steps.
        """
        if self._state.broken is not None:
            raise RuntimeError(self._state.broken)
        if self._state.ended:
            raise RuntimeError("the vLLM engine's process has died")
        limit = self._state.app.stall_timeout_s
        if self._probe is not None and self._probe.done():
            self._probe.result()  # A probe that failed is not an answer.
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._state.llm.is_sleeping())
            self._probed_at = time.monotonic()
        elif time.monotonic() - self._probed_at > limit:
            # If this process hung, and not the engine, the answer has arrived unread.
            await asyncio.wait([self._probe], timeout=UNREAD_S)
            if self._probe.done():
                return
            self._state.broken = (
                f"the vLLM engine has not answered for generator.stall_timeout_s = {limit:g} s"
            )
            self.processes.kill()
            raise RuntimeError(self._state.broken)

    def lose(self, reason: str) -> None:
        """End the engine's processes on this node, because another node of the engine is gone.
        Requests in progress fail."""
        self._state.lose(self.broken or reason)
        self.processes.kill()

    async def stop(self) -> None:
        """End the engine and every process that it started."""
        llm = self._state.take_llm()
        if self._probe is not None:
            self._probe.cancel()
        # A caller that is canceled does not leave processes behind.
        await asyncio.shield(_end(llm, self.processes))


async def start_engine(
    app: GeneratorApp, processes: EngineProcesses | None = None, node: NodeRank | None = None
) -> Engine:
    """Load the model and generate one token. The weights are the checkpoint's, version 0.

    Args:
        processes: lets the caller kill the engine's processes while the engine starts.
        node: rank of this node in an engine of several. The other nodes start at the same time.
    """
    caches = claim_caches("generator")
    processes = processes or EngineProcesses()
    os.environ[STACKS] = str(processes.folder)
    try:
        return await _load(app, caches, processes, node)
    except Exception:
        await processes.end()
        raise
    # A cancellation while vLLM loads leaves the folder, since the thread that starts the engine
    # continues and still writes there. The folder is removed once this process has ended.


async def _load(
    app: GeneratorApp, caches: Caches, processes: EngineProcesses, node: NodeRank | None
) -> Engine:
    started = time.monotonic()
    if app.generator.device == "cpu":
        os.environ["LD_PRELOAD"] = preload_openmp(os.environ.get("LD_PRELOAD", ""))
    stats, opened = EngineStats(), asyncio.Event()
    with EarlyProcess(functools.partial(import_engine, str(processes.folder))) as process:
        import vllm.v1.engine.async_llm  # noqa: F401  # here, to measure it

        imported = time.monotonic()
        config, executor = engine_config(app, node)
        configured = time.monotonic()
        # The constructor blocks until the engine's process has loaded the model. In a thread it
        # starts no output loop, so the first request starts that on this event loop.
        llm = await asyncio.to_thread(_make_llm, process, config, executor, stats, opened)
    try:
        processes.started()
        stops = await _prepare(app, llm)
        loaded = time.monotonic()
        state = EngineState(app, llm, processes.folder, stats, opened)
        requests = EngineRequests(state, stops)
        opened.set()
        await _generate_first(requests)
    except BaseException:
        # Also a cancellation, and a second one does not stop this: nothing else would end vLLM.
        await asyncio.shield(_end(llm, processes))
        raise
    load = LoadTimes(
        import_s=imported - started,
        config_s=configured - imported,
        engine_s=loaded - configured,
        first_generation_s=time.monotonic() - loaded,
        caches_removed=float(caches.damaged is not None),
    )
    return Engine(state, processes, requests, load)


async def _end(llm: AsyncLLM | None, processes: EngineProcesses) -> None:
    """End vLLM, and then what is left of its processes."""
    try:
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, END_S)
    except Exception:
        logger.exception("vLLM did not shut down by itself, so its processes are killed")
    finally:
        await processes.end()


def _make_llm(
    process: EarlyProcess,
    config: VllmConfig,
    executor: type[Executor],
    stats: EngineStats,
    opened: asyncio.Event,
) -> AsyncLLM:
    from vllm.v1.engine.async_llm import AsyncLLM

    with handed_to_vllm(process):
        return AsyncLLM(
            config,
            executor,
            log_stats=False,
            log_requests=False,
            stat_loggers=[stat_logger(stats, lambda: not opened.is_set())],
        )


async def _prepare(app: GeneratorApp, llm: AsyncLLM) -> Stops:
    """Set up weight transfer, and refuse another tokenizer. Returns what ends every completion."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
    if app.generator.pipeline_parallel_size > 1 and app.generator.device == "cpu":
        # Only a dummy run makes the buffers of what the parts of a pipeline pass on, and without
        # compilation vLLM does none on CPU.
        await llm.collective_rpc("execute_dummy_batch")
    tokenizer = load_tokenizer(app.model)
    # vLLM's type is wider, but `EngineTokenizer` makes its tokenizer.
    theirs = cast("PreTrainedTokenizerBase", llm.get_tokenizer())
    refuse_another_decoder(tokenizer, app.model, theirs)
    return load_stops(
        app.model,
        tokenizer,
        app.rollout_stop,
        app.rollout_stop_token_ids,
        app.chat_template_kwargs,
    )


async def _generate_first(requests: EngineRequests) -> None:
    await requests.generate(
        GenerateRequest(
            prompt_ids=(next(iter(requests.stops.tokens), 0),),
            n=1,
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
        )
    )
