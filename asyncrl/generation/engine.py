"""One vLLM engine as a plain class. It takes token ids, returns completions with log-probs and
version spans, and changes weights while generations are in flight.

This module does not depend on Ray or Serve. `start` imports vLLM, which keeps this module cheap to
import.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypedDict, cast

import psutil

from asyncrl.contracts.errors import (
    EngineDiedError,
    GenerationTimeoutError,
    InvalidRequestError,
    StaleReplicaError,
)
from asyncrl.contracts.messages import Details, GenerateRequest, StreamPiece
from asyncrl.contracts.rows import Completion
from asyncrl.generation.adapters import Adapter, Adapters
from asyncrl.generation.arguments import (
    engine_config,
    greedy,
    sampling_params,
    scoring_params,
    sibling_params,
    stream_params,
)
from asyncrl.generation.early_process import (
    EarlyProcess,
    fatal_error,
    handed_to_vllm,
    import_engine,
)
from asyncrl.generation.engine_stats import EngineStats, stat_logger
from asyncrl.generation.outputs import scores, to_completion, to_piece, tokens_so_far
from asyncrl.generation.session_requests import SessionRequests
from asyncrl.generation.settings import GeneratorApp
from asyncrl.generation.sleep import Sleep
from asyncrl.runtime.files.temporary import ProcessTemporaryFolder
from asyncrl.runtime.processes.environment import Caches, claim_caches, preload_openmp
from asyncrl.runtime.processes.stacks import stack_here
from asyncrl.text.round_trip import refuse_another_decoder
from asyncrl.text.stops import Stops, load_stops, special_token
from asyncrl.text.streaming import TextStream
from asyncrl.text.tokenizer import load_tokenizer, tokenizer_hash
from asyncrl.weights.engine import STACKS
from asyncrl.weights.fingerprint import joined_fingerprints
from asyncrl.weights.staging import Staged, sweep

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine import PauseMode
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    from asyncrl.generation.rendezvous import NodeRank

Update: TypeAlias = Mapping[str, object] | Sequence[Mapping[str, object]]
"""The staging file of all workers of an engine (`Staged.update_info`), or of each by its rank."""


class Pause(TypedDict):
    """Arguments of vLLM's `pause_generation`."""

    mode: PauseMode
    clear_cache: bool


PAUSE: dict[str, Pause] = {
    "keep": {"mode": "keep", "clear_cache": False},
    "recompute": {"mode": "keep", "clear_cache": True},
    "drain": {"mode": "wait", "clear_cache": True},
}
"""`generator.in_flight` → how an update pauses vLLM. Completions continue with the old KV only if
the cache is not cleared."""

UNREAD_S = 1.0
"""Seconds for reading an answer that has already arrived, before the engine counts as hung."""

REASON_LENGTH = 400
"""Characters kept of vLLM's reason for refusing a request, which may repeat the request."""

STOP_TIMEOUT_S = 10.0
"""Seconds that vLLM's processes get to end before they are killed."""


class Answered(NamedTuple):
    """What a request generated: the n completions, and then the greedy one if it has a baseline."""

    completions: tuple[Completion, ...]
    cached_tokens: tuple[int, ...]
    """For each of them, see `Generated.cached_tokens`."""


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
    """vLLM's AsyncLLM with versioned weights. Use it from one event loop: first `await start()`,
    last `await stop()`."""

    def __init__(self, app: GeneratorApp) -> None:
        self.app = app
        self.version = 0
        self._updates = 0
        """Updates applied: a salt for the prefix cache. The version alone is not enough, since
        another run or attempt may publish other weights under the same number."""
        self.broken: str | None = None
        """Why the engine cannot be used: an update failed halfway, or the engine hung."""
        self.stats = EngineStats()
        self._adapters = Adapters(app.max_loras)
        self.stops = Stops({})
        """What ends every completion, in addition to a request's own strings."""
        self.tokenizer_hash = ""
        self.load: LoadTimes | None = None
        self.kv_cache_tokens = 0
        """Capacity of the KV cache in tokens."""
        self.cache_block = 0
        """Tokens of a block of the prefix cache; 0 without one."""
        self._llm: AsyncLLM | None = None
        self._ids = itertools.count()
        self._open = asyncio.Event()
        """Set while the engine takes requests: after the start, between updates, and not while it
        rests."""
        self._turns = SessionRequests(self._open)
        self._rests = False
        """Whether the engine rests (see `rest`)."""
        self._sleep = Sleep(app.generator.gpu_share) if app.sleeps else None
        """Frees the GPU in a rest; None: a rest keeps all memory."""
        self._before: set[int] = set()
        """This process's children before the start, which are not the engine's."""
        self._processes: list[psutil.Process] = []
        self._temporary: ProcessTemporaryFolder | None = None
        """Temporary files and sockets of vLLM and this process. The engine's processes also write
        their stacks there on request."""
        self._probe: asyncio.Future[bool] | None = None
        """The latest liveness probe of the engine's loop, pending or done."""
        self._probed_at = 0.0

    async def start(self, node: NodeRank | None = None) -> LoadTimes:
        """Load the model and generate one token. The weights are the checkpoint's, version 0.

        Args:
            node: rank of this node in an engine of several. The other nodes start at the same time.
        """
        caches = claim_caches("generator")
        self._temporary = ProcessTemporaryFolder("engine")
        os.environ[STACKS] = str(self._temporary.path)
        try:
            return await self._load(caches, self._temporary.path, node)
        except Exception:
            self._temporary.close()
            raise
        # A cancellation leaves the folder, since the thread that starts the engine continues and
        # still writes there. The folder is removed once this process has ended.

    async def _load(self, caches: Caches, folder: Path, node: NodeRank | None) -> LoadTimes:
        started = time.monotonic()
        if self.app.generator.device == "cpu":
            os.environ["LD_PRELOAD"] = preload_openmp(os.environ.get("LD_PRELOAD", ""))
        self._before = {process.pid for process in psutil.Process().children(recursive=True)}
        with EarlyProcess(functools.partial(import_engine, str(folder))) as process:
            import vllm.v1.engine.async_llm  # noqa: F401  # here, to measure it

            imported = time.monotonic()
            config, executor = engine_config(self.app, node)
            configured = time.monotonic()
            # The constructor blocks until the engine's process has loaded the model. In a thread it
            # starts no output loop, so the first request starts that on this event loop.
            self._llm = await asyncio.to_thread(self._make_llm, process, config, executor)
        self._processes = self._children()
        await self._prepare(self._llm)
        loaded = time.monotonic()
        self._open.set()
        await self._generate_first()
        self.load = LoadTimes(
            import_s=imported - started,
            config_s=configured - imported,
            engine_s=loaded - configured,
            first_generation_s=time.monotonic() - loaded,
            caches_removed=float(caches.damaged is not None),
        )
        return self.load

    def _make_llm(
        self, process: EarlyProcess, config: VllmConfig, executor: type[Executor]
    ) -> AsyncLLM:
        from vllm.v1.engine.async_llm import AsyncLLM

        with handed_to_vllm(process):
            return AsyncLLM(
                config,
                executor,
                log_stats=False,
                log_requests=False,
                stat_loggers=[stat_logger(self.stats, lambda: not self._open.is_set())],
            )

    def _children(self) -> list[psutil.Process]:
        """The engine's processes on this node."""
        return [
            child
            for child in psutil.Process().children(recursive=True)
            if child.pid not in self._before and not _is_resource_tracker(child)
        ]

    async def _prepare(self, llm: AsyncLLM) -> None:
        """Set up weight transfer, and learn the engine's cache size, tokenizer and stops."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        cache = llm.vllm_config.cache_config
        self.kv_cache_tokens = int(cache.num_gpu_blocks or 0) * int(cache.block_size)
        self.cache_block = int(cache.block_size) if cache.enable_prefix_caching else 0
        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        if self.app.generator.pipeline_parallel_size > 1 and self.app.generator.device == "cpu":
            # Only a dummy run makes the buffers of what the parts of a pipeline pass on, and
            # without compilation vLLM does none on CPU.
            await llm.collective_rpc("execute_dummy_batch")
        # vLLM's type is wider, but `EngineTokenizer` makes its tokenizer.
        theirs = cast("PreTrainedTokenizerBase", llm.get_tokenizer())
        refuse_another_decoder(self._tokenizer, self.app.model, theirs)
        self.tokenizer_hash = tokenizer_hash(self._tokenizer)
        self.stops = load_stops(
            self.app.model,
            self._tokenizer,
            self.app.rollout_stop,
            self.app.rollout_stop_token_ids,
            self.app.chat_template_kwargs,
        )

    async def _generate_first(self) -> None:
        await self.generate(
            GenerateRequest(
                prompt_ids=(next(iter(self.stops.tokens), 0),),
                n=1,
                max_tokens=1,
                temperature=0.0,
                ignore_eos=True,
            )
        )

    def _running(self) -> AsyncLLM:
        """vLLM's engine. Raises StaleReplicaError before the start and after `stop`."""
        if self._llm is None:
            raise StaleReplicaError("the engine has been stopped, or was never started")
        return self._llm

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that encodes the run's prompts; vLLM uses it too."""
        return load_tokenizer(self.app.model)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, in tokens."""
        return int(self._running().model_config.max_model_len)

    @property
    def vocabulary(self) -> int:
        """Size of the model's vocabulary: a token id is below it."""
        return int(self._running().model_config.get_vocab_size())

    @cached_property
    def longest_token(self) -> int:
        """Length of the longest token in characters, or an upper bound: a byte-level tokenizer has
        one character for each byte."""
        return max(map(len, self._running().get_tokenizer().get_vocab()))

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        """The completions of `answer`, which may raise."""
        return (await self.answer(request)).completions

    async def answer(self, request: GenerateRequest) -> Answered:
        """Generate n completions of one prompt, and the greedy one if the request has a baseline.

        Raises:
            GenerationTimeoutError: not done within `deadline_s` seconds; aborted.
            StaleReplicaError: the engine was lost in an update, or has been stopped.
            InvalidRequestError: the prompt leaves no room for max_tokens in the model's context, or
                vLLM refuses the request.
        """
        from vllm.exceptions import VLLMClientError

        self._refuse_long(request)
        try:
            async with asyncio.timeout(request.deadline_s):
                await self._open.wait()
                await self._adapters.wait_for_slot()
                with self._adapters.using(self._running()) as adapter:
                    outputs = await self._run(request, adapter)
        except (ValueError, VLLMClientError) as error:  # vLLM's own checks of a request
            raise _invalid(error) from error
        except TimeoutError:
            raise _late(request) from None
        strings = self._stops(request).strings
        version = None if adapter is None else adapter.version
        return Answered(
            tuple(
                to_completion(output, self._tokenizer, strings, version) for output, _ in outputs
            ),
            tuple(cached for _, cached in outputs),
        )

    async def stream(
        self, request: GenerateRequest, details: Details
    ) -> AsyncGenerator[StreamPiece]:
        """Yield one completion (`request.n` is 1) in pieces, as the engine generates it. With
        `max_tokens` 0 the engine only reads the prompt. Closing the stream aborts the request. The
        text includes that of the request's `continued` tokens.

        Raises:
            The errors of `generate`, also between two pieces.
        """
        self._refuse_long(request)
        text = TextStream(self._tokenizer, self._stops(request).strings)
        before = text.add(request.prompt_ids[len(request.prompt_ids) - request.continued :])
        deadline = time.monotonic() + request.deadline_s
        try:
            async with asyncio.timeout(request.deadline_s):
                await self._open.wait()
                await self._adapters.wait_for_slot()
        except TimeoutError:
            raise _late(request) from None
        with self._adapters.using(self._running()) as adapter:
            version = None if adapter is None else adapter.version
            outputs_of = self._outputs(request, details, adapter, deadline)
            async with contextlib.aclosing(outputs_of) as outputs:
                async for output in outputs:
                    piece = to_piece(output, request, text, details, version)
                    yield replace(piece, text=before + piece.text) if before else piece
                    before = ""

    def _refuse_long(self, request: GenerateRequest) -> None:
        longest = self.max_model_len
        if len(request.prompt_ids) + request.max_tokens > longest:
            raise InvalidRequestError(
                f"prompt of {len(request.prompt_ids)} tokens + max_tokens = {request.max_tokens} is"
                f" above max_model_len = {longest}"
            )

    async def logprobs(
        self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[float, ...]]:
        """Log-probs (nats, temperature 1) of each row's second ids, given its first.

        Raises:
            StaleReplicaError: the engine was lost.
        """
        self._running()  # an engine that never started would never open
        await self._open.wait()
        return list(
            await asyncio.gather(
                *(self._score(list(prompt), list(completion)) for prompt, completion in rows)
            )
        )

    async def fingerprints(self) -> dict[str, Sequence[float]]:
        """Fingerprints of the engine's weights by published name (`asyncrl.weights.fingerprint`).
        Generation pauses while they are computed. Raises RuntimeError while the weights are on the
        host."""
        if self.asleep:
            raise RuntimeError("the engine rests, so its weights are not on the GPU")
        llm, held = self._running(), dict[str, Sequence[float]]()
        with self._adapters.using(llm) as adapter:
            held |= joined_fingerprints(
                await llm.collective_rpc("held_shards"), self.app.generator.tensor_parallel_size
            )
            if adapter is not None:
                of = (adapter.id, adapter.scale)
                held |= (await llm.collective_rpc("held_adapter", args=of))[0]
        return held

    async def apply(self, update: Update, version: int) -> dict[str, float]:
        """Change to a staged version: pause, load, label, resume.

        Args:
            update: where the workers find the version.

        Returns:
            pause_s and apply_s (seconds), and in_flight (completions).

        Raises:
            GpuMemoryError: the weights do not fit beside the learner's. Nothing has changed.
            RuntimeError: the update failed halfway. The engine is unusable and must be replaced.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async def load() -> None:
            llm = self._running()
            await llm.start_weight_update()
            info = dict(update) if isinstance(update, Mapping) else [dict(one) for one in update]
            await llm.update_weights(WeightTransferUpdateRequest(update_info=info))
            await llm.finish_weight_update(weight_version=str(version))
            self.version = version
            self._updates += 1
            await self._turns.submit_again(llm)

        failure = f"the update of version {version} failed"
        await self._load_weights(failure)
        return await self._paused(load, failure)

    async def apply_adapter(
        self, staged: Staged, settings: Mapping[str, object], version: int
    ) -> dict[str, float]:
        """Load a staged adapter and use it for new requests. Nothing pauses: a request in progress
        ends with the adapter that it began with.

        Args:
            settings: the content of PEFT's adapter_config.json.

        Returns:
            The timings of `apply`, with pause_s 0 and in_flight: requests that continue with older
            adapters.

        Raises:
            ManifestError: vLLM refuses the adapter. Nothing has changed.
            StagingError: the adapter's files cannot be written. Nothing has changed.
            EngineDiedError: the engine is dead.
            GpuMemoryError: the weights do not fit beside the learner's. Nothing has changed.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        assert self._temporary is not None  # since `start`
        await self._load_weights(f"the update of version {version} failed")
        began = time.monotonic()
        try:
            older = await self._adapters.load(
                self._running(), self._temporary.path, staged, settings, version
            )
        except EngineDeadError:
            raise self._died() from None
        self.version = version
        return {"pause_s": 0.0, "apply_s": time.monotonic() - began, "in_flight": float(older)}

    @property
    def rests(self) -> bool:
        """Whether the engine rests."""
        return self._rests

    @property
    def asleep(self) -> bool:
        """Whether the engine rests without its weights on the GPU."""
        return self._sleep is not None and self._sleep.asleep

    async def rest(self) -> None:
        """Generate nothing until `wake`, so that other processes can use the device. Requests in
        progress stay as they are (with `in_flight: drain` they end first), and new ones wait.
        Versions are applied meanwhile. With `sleeps`, the weights and the KV cache leave the GPU.

        Raises:
            RuntimeError: vLLM did not pause. The engine is unusable and must be replaced.
        """
        if self._rests and (self._sleep is None or self.asleep):
            return
        self._open.clear()
        with self._unusable_after("a rest failed"):
            if self._sleep is None:
                await self._pause()
            else:
                await self._sleep.begin(self._running())
                self._count_pause(recomputes=True)
            self._rests = True
        self.stats.count_rest()

    async def _load_weights(self, failure: str) -> None:
        """Bring the weights of a resting engine back to the GPU, for an update."""
        if self._sleep is not None and self._sleep.asleep:
            await self._sleep.check_room(self._running())
            with self._unusable_after(failure):
                await self._sleep.load_weights(self._running())

    async def wake(self) -> None:
        """End the rest. Does nothing if the engine does not rest.

        Raises:
            GpuMemoryError: the learner has not left the GPU. The engine still rests.
            RuntimeError: vLLM did not resume. The engine is unusable and must be replaced.
        """
        if not self._rests:
            return
        if self._sleep is not None:
            await self._sleep.check_room(self._running())
        with self._unusable_after("the end of a rest failed"):
            if self._sleep is not None:
                await self._sleep.end(self._running())
            await self._running().resume_generation()
        self._rests = False
        self._open.set()

    async def pause_empty(self) -> dict[str, float]:
        """Pause and resume without an update, to measure the least that an update costs."""

        async def nothing() -> None:
            return None

        return await self._paused(nothing, "an empty update failed")

    async def stop(self) -> None:
        """End the engine and every process that it started."""
        llm, self._llm = self._llm, None
        if self._probe is not None:
            self._probe.cancel()
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, STOP_TIMEOUT_S)
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._processes, STOP_TIMEOUT_S)
        self._kill(alive)
        await asyncio.to_thread(sweep)  # killed workers leave their queues
        self._processes = []
        if self._temporary is not None:
            self._temporary.close()

    async def stacks(self) -> list[str]:
        """The innermost frames of the main thread of each of the engine's processes."""
        folder = self._temporary.path if self._temporary is not None else Path()
        return list(
            await asyncio.gather(
                *(
                    stack_here(process.pid, folder / f"{process.pid}.txt")
                    for process in self._processes
                )
            )
        )

    async def check(self) -> None:
        """Raise RuntimeError if the engine is dead, hangs, or has weights in an unknown state.

        Each call probes the engine's loop unless a probe is pending. A probe without an answer for
        `generator.stall_timeout_s` means that the engine hangs: its processes are killed, and its
        requests end. A slow engine is safe, since it answers between any two steps.
        """
        if self.broken is not None:
            raise RuntimeError(self.broken)
        if self._llm is None or self._llm.errored:
            raise RuntimeError("the vLLM engine's process has died")
        limit = self.app.stall_timeout_s
        if self._probe is not None and self._probe.done():
            self._probe.result()  # A probe that failed is not an answer.
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._llm.is_sleeping())
            self._probed_at = time.monotonic()
        elif time.monotonic() - self._probed_at > limit:
            # If this process hung, and not the engine, the answer has arrived unread.
            await asyncio.wait([self._probe], timeout=UNREAD_S)
            if self._probe.done():
                return
            self.broken = (
                f"the vLLM engine has not answered for generator.stall_timeout_s = {limit:g} s"
            )
            self._kill(self._processes)
            raise RuntimeError(self.broken)

    def lose(self, reason: str) -> None:
        """End the engine's processes on this node, also during `start`, because another node of the
        engine is gone. Requests in progress fail."""
        self.broken = self.broken or reason
        self._open.set()
        self._kill(self._processes or self._children())

    @staticmethod
    def _kill(processes: Sequence[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    async def _paused(self, work: Callable[[], Awaitable[None]], failure: str) -> dict[str, float]:
        # New requests wait: they would be salted and counted under the old version.
        self._open.clear()
        started = time.monotonic()
        with self._unusable_after(failure):
            in_flight = await self._pause()
            paused = time.monotonic()
            await work()
            applied = time.monotonic()
            if not self._rests:
                await self._running().resume_generation()
        if not self._rests:
            self._open.set()
        return {
            "pause_s": time.monotonic() - started,
            "apply_s": applied - paused,
            "in_flight": float(in_flight),
        }

    async def _pause(self) -> int:
        """Pause vLLM unless the engine rests. Returns the number of unfinished completions."""
        in_flight = self.app.generator.in_flight
        if not self._rests:
            await self._running().pause_generation(**PAUSE[in_flight])
        return self._count_pause(in_flight == "recompute")

    def _count_pause(self, recomputes: bool) -> int:
        """Count the unfinished completions of a pause."""
        states = self._running().output_processor.request_states.values()
        lengths = [tokens_so_far(state) for state in states]
        self.stats.count_pause(lengths, recomputes)
        return len(lengths)

    @contextlib.contextmanager
    def _unusable_after(self, failure: str) -> Iterator[None]:
        """If the body fails, record that the engine is unusable, and let waiting requests learn it.

        After an update, the weights may be half old and half new, and vLLM cannot undo it. So the
        engine must not generate, even after a cancellation."""
        try:
            yield
        except BaseException as error:
            self.broken = f"{failure}: {type(error).__name__}: {error}"
            self._open.set()
            if not isinstance(error, Exception):
                raise
            raise RuntimeError(self.broken) from error

    async def _score(self, prompt: list[int], completion: list[int]) -> tuple[float, ...]:
        """One pass over both, as a prompt. vLLM generates one more token, so the context must have
        room for it."""
        await self._adapters.wait_for_slot()
        with self._adapters.using(self._running()) as adapter:
            output = await self._last_output(prompt + completion, scoring_params(), None, adapter)
        return scores(output, len(prompt), completion)

    def _stops(self, request: GenerateRequest) -> Stops:
        """What ends a request's completions: the engine's stops, unless the request ignores ends,
        and its own strings. A string that is a special token ends a completion as a token."""
        stops = Stops({}) if request.ignore_eos else self.stops
        own = {text: special_token(self._tokenizer, text) for text in request.stop}
        tokens = {token: ("request",) for token in own.values() if token is not None}
        strings = (*stops.strings, *(text for text, token in own.items() if token is None))
        return Stops(tokens | stops.tokens, tuple(dict.fromkeys(strings)))

    @property
    def _splits(self) -> bool:
        """Whether a request for n completions becomes n requests (see `_salt`). With adapters it
        does not: a request keeps its adapter, and vLLM's cache knows adapters by name and path."""
        return self.app.generator.in_flight == "keep" and self.app.max_lora_rank is None

    def _salt(self, session: str | None = None) -> str:
        """A new request's salt: requests share cached KV blocks only under the same salt, and only
        with the same adapter.

        The cache outlives an update under `keep`: a completion that is first scheduled after it
        would use the prompt's KV of the old weights. So no two completions share blocks, except
        those of one session, whose requests are submitted again in that case
        (`asyncrl.generation.session_requests`).
        """
        if not self._splits:
            return f"update {self._updates}"
        if session is None:
            return f"completion {next(self._ids)}"
        return f"update {self._updates} session {session}"

    async def _run(
        self, request: GenerateRequest, adapter: Adapter | None
    ) -> list[tuple[CompletionOutput, int]]:
        """The completions with their cached tokens."""
        prompt, stops = list(request.prompt_ids), self._stops(request)
        params = sampling_params(request, stops)
        wanted = (
            [sibling_params(params, index) for index in range(request.n)]
            if self._splits
            else [params]
        )
        if request.baseline:
            wanted.append(sampling_params(greedy(request), stops))
        parts = [
            asyncio.ensure_future(self._last_output(prompt, part, request.session, adapter))
            for part in wanted
        ]
        try:
            answers = await asyncio.gather(*parts)
        except asyncio.CancelledError:
            ended = [
                part.result()
                for part in parts
                if part.done() and not part.cancelled() and part.exception() is None
            ]
            self.stats.count_aborted(
                [len(output.token_ids) for answer in ended for output in answer.outputs]
            )
            raise
        return [
            (output, answer.num_cached_tokens or 0)
            for answer in answers
            for output in sorted(answer.outputs, key=lambda output: output.index)
        ]

    async def _last_output(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        session: str | None,
        adapter: Adapter | None,
    ) -> RequestOutput:
        from vllm.v1.engine.exceptions import EngineDeadError

        self._refuse_lost()
        name = f"request-{next(self._ids)}"
        outputs = self._start_request(prompt_ids, session, params, name, adapter)
        answer = asyncio.ensure_future(_last(outputs))
        try:
            await asyncio.wait([answer])
            return answer.result()
        except asyncio.CancelledError:
            self._count_aborted(name)
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            raise
        except EngineDeadError:
            raise self._died() from None

    def _start_request(
        self,
        prompt_ids: list[int],
        session: str | None,
        params: SamplingParams,
        name: str,
        adapter: Adapter | None,
    ) -> AsyncGenerator[RequestOutput]:
        """vLLM's outputs of a request."""
        from vllm.inputs.engine import tokens_input

        def submit() -> AsyncGenerator[RequestOutput]:
            self._refuse_lost()
            return self._running().generate(
                tokens_input(prompt_ids, cache_salt=self._salt(session)),
                params,
                name,
                lora_request=None if adapter is None else adapter.request,
            )

        if session is None or not self._splits:
            return submit()
        return self._turns.outputs(name, submit)

    async def _outputs(
        self, request: GenerateRequest, details: Details, adapter: Adapter | None, deadline: float
    ) -> AsyncGenerator[RequestOutput]:
        """vLLM's outputs of one completion. Raises as `stream` does.

        Args:
            deadline: on the monotonic clock, in seconds.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        name, ended = f"request-{next(self._ids)}", False
        outputs: AsyncGenerator[RequestOutput] | None = None
        coming: asyncio.Future[RequestOutput | None] | None = None
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._open.wait()
            self._refuse_lost()
            params = stream_params(request, self._stops(request), details)
            outputs = self._start_request(
                list(request.prompt_ids), request.session, params, name, adapter
            )
            while not ended:
                coming = asyncio.ensure_future(anext(outputs, None))
                if not (await asyncio.wait([coming], timeout=deadline - time.monotonic()))[0]:
                    raise TimeoutError
                if (output := coming.result()) is None:
                    raise EngineDiedError("the vLLM engine ended a request without an answer")
                ended = output.finished
                yield output
        except EngineDeadError:
            raise self._died() from None
        except (ValueError, VLLMClientError) as error:
            raise _invalid(error) from error
        except TimeoutError:
            raise _late(request) from None
        finally:
            if outputs is not None and not ended:
                self._count_aborted(name)
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
            if outputs is not None:
                await outputs.aclose()

    def _refuse_lost(self) -> None:
        if self.broken is not None:
            raise StaleReplicaError(self.broken)
        if self._running().errored:
            raise StaleReplicaError("the vLLM engine's process has died")

    def _died(self) -> EngineDiedError:
        cause = fatal_error(self._temporary.path if self._temporary is not None else None)
        return EngineDiedError(f"the vLLM engine's process has died{f': {cause}' if cause else ''}")

    def _count_aborted(self, name: str) -> None:
        """Count the completions of a request that is given up, including those that have ended:
        vLLM forgets these when it aborts."""
        if self._llm is None:
            return
        processor = self._llm.output_processor
        states = [processor.request_states[id] for id in processor.external_req_ids.get(name, ())]
        self.stats.count_aborted([tokens_so_far(state) for state in states])
        parents = [state.parent_req for state in states if state.parent_req is not None]
        self.stats.count_aborted(
            [
                len(output.token_ids)
                for output in (parents[0].output_aggregator if parents else ())
                if output is not None
            ]
        )


async def _last(outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
    """The last output of a request."""
    final = None
    async for output in outputs:
        final = output
    if final is None:
        raise EngineDiedError("the vLLM engine ended a request without an answer")
    return final


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Whether this is Python's resource tracker, which ends with this process and not with the
    engine."""
    return any("resource_tracker" in argument for argument in process.cmdline())


def _invalid(error: Exception) -> InvalidRequestError:
    return InvalidRequestError(" ".join(str(error).split())[:REASON_LENGTH])


def _late(request: GenerateRequest) -> GenerationTimeoutError:
    return GenerationTimeoutError(
        f"{request.n} completions of up to {request.max_tokens} tokens were not done in"
        f" {request.deadline_s:g} s"
    )
