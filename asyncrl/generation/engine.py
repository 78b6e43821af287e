"""One vLLM engine as a plain class: token ids in, log-probs and version spans out, weights changed
under running generations.

Knows neither Ray nor Serve. vLLM is imported in `start`, so that this module costs nothing to
import.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from asyncrl.contracts.errors import (
    EngineDiedError,
    GenerationTimeoutError,
    InvalidRequestError,
    StaleReplicaError,
)
from asyncrl.contracts.messages import Details, GenerateRequest, Piece, Tokens
from asyncrl.contracts.rows import TRUNCATED, Completion, VersionSpan
from asyncrl.generation.ahead import AheadProcess, fatal_error, handed_to_vllm, import_engine
from asyncrl.generation.engine_stats import EngineStats, stat_logger
from asyncrl.generation.settings import GeneratorApp
from asyncrl.runtime.environment import Caches, claim_caches, passed_on, preload_openmp
from asyncrl.runtime.stacks import stack_here
from asyncrl.runtime.temporary import TemporaryPlace
from asyncrl.text.stops import Stops, load_stops, special_token, text_before
from asyncrl.text.streaming import TextStream
from asyncrl.text.tokenizer import decode, load_tokenizer, refuse_lossy, tokenizer_hash
from asyncrl.weights.engine import BACKEND, OWNED, STACKS, TOKENIZER_MODE

__all__ = ["PAUSE", "Engine", "engine_environment", "version_spans"]

PAUSE: dict[str, dict[str, Any]] = {
    "keep": {"mode": "keep", "clear_cache": False},
    "recompute": {"mode": "keep", "clear_cache": True},
    "drain": {"mode": "wait", "clear_cache": True},
}
"""`generator.in_flight` → arguments of vLLM's pause. Not clearing the cache is what keeps the old
KV."""

UNREAD_S = 1.0
"""Seconds to read an answer that has arrived, before the engine counts as silent."""

REASON_LENGTH = 400
"""Characters of vLLM's words on a request that it refuses: they may repeat the request."""

STOP_TIMEOUT_S = 10.0
"""Seconds that vLLM's processes get to end by themselves."""


def engine_environment(device: str) -> dict[str, str]:
    """Environment variables of a process that holds an engine; its child processes inherit them.
    What the user has set for torch, vLLM and the like passes through
    (`asyncrl.runtime.environment`), but for what asyncrl itself needs."""
    ours = {
        OWNED: "1",
        "VLLM_PLUGINS": "asyncrl_weights",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        # One thread per engine: two replicas share two cores with the learner, and vLLM would pin
        # threads to cores of its own choice. Without TORCH_COMPILE_DISABLE the first generation
        # calls a C++ compiler for one small kernel of the sampler, for about 15 s.
        chosen = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "TORCH_COMPILE_DISABLE": "1",
        }
        return chosen | passed_on(os.environ) | ours
    return passed_on(os.environ) | ours


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Seconds of a start: importing vLLM, which the engine's process does meanwhile; its config
    (the model's class is inspected, in a process of its own the first time on a machine); what the
    engine's process then still needs (its workers, the model, the cache); the first generation. And
    whether compile caches were damaged."""

    import_s: float
    config_s: float
    engine_s: float
    first_generation_s: float
    caches_removed: float
    """1 if this process's compile caches held a damaged file and were removed, else 0."""


class Engine:
    """vLLM's AsyncLLM with versioned weights. Use from one event loop: `await start()`, then the
    rest, then `stop()`."""

    def __init__(self, app: GeneratorApp) -> None:
        self.app = app
        self.version = 0
        self._updates = 0
        """Updates applied: a salt for the prefix cache. The same version of another run or attempt
        is another one."""
        self.broken: str | None = None
        """Why the weights are in an unknown state, if an update failed after it had begun."""
        self.stats = EngineStats()
        self.stops = Stops({})
        """What ends every completion, beside a request's own strings."""
        self.tokenizer_hash = ""
        self.load: LoadTimes | None = None
        self.kv_cache_tokens = 0
        """Tokens that the KV cache holds."""
        self._llm: Any = None
        self._ids = itertools.count()
        self._open = asyncio.Event()
        self._processes: list[psutil.Process] = []
        self._temporary: TemporaryPlace | None = None
        """Temporary files and sockets of vLLM and this process, and where the engine's processes
        say what they do when they are asked."""
        self._probe: asyncio.Future[bool] | None = None
        """The last question whether the engine's loop still turns, answered or not."""
        self._probed_at = 0.0

    async def start(self) -> LoadTimes:
        """Load the model and generate one token. The weights are the checkpoint's, version 0."""
        caches = claim_caches("generator")
        self._temporary = TemporaryPlace("engine")
        os.environ[STACKS] = str(self._temporary.path)
        try:
            return await self._load(caches)
        except Exception:
            self._temporary.close()
            raise
        # When cancelled, the thread that makes the engine goes on: what it still makes belongs in
        # that folder, which goes after this process.

    async def _load(self, caches: Caches) -> LoadTimes:
        begun = time.monotonic()
        if self.app.generator.device == "cpu":
            os.environ["LD_PRELOAD"] = preload_openmp(os.environ.get("LD_PRELOAD", ""))
        before = {process.pid for process in psutil.Process().children(recursive=True)}
        assert self._temporary is not None
        with AheadProcess(functools.partial(import_engine, str(self._temporary.path))) as process:
            from vllm.v1.engine.async_llm import AsyncLLM

            imported = time.monotonic()
            vllm_config, executor = _engine_config(self.app)
            configured = time.monotonic()

            def make() -> Any:
                with handed_to_vllm(process):
                    return AsyncLLM(
                        vllm_config,
                        executor,
                        log_stats=False,
                        log_requests=False,
                        stat_loggers=[stat_logger(self.stats, lambda: not self._open.is_set())],
                    )

            # The constructor blocks for as long as the engine's process loads; the output loop has
            # to be made by this event loop.
            self._llm = await asyncio.to_thread(make)
        self.kv_cache_tokens = int(vllm_config.cache_config.num_gpu_blocks or 0) * int(
            vllm_config.cache_config.block_size
        )
        # Python's resource tracker is not the engine's: it ends with this process.
        self._processes = [
            p
            for p in psutil.Process().children(recursive=True)
            if p.pid not in before and not any("resource_tracker" in a for a in p.cmdline())
        ]
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        refuse_lossy(self._tokenizer, self.app.model, self._llm.get_tokenizer())
        self.tokenizer_hash = tokenizer_hash(self._tokenizer)
        self.stops = load_stops(
            self.app.model, self._tokenizer, self.app.rollout_stop, self.app.rollout_stop_token_ids
        )
        loaded = time.monotonic()
        self._open.set()
        await self.generate(
            GenerateRequest(
                prompt_ids=(next(iter(self.stops.tokens), 0),),
                n=1,
                max_tokens=1,
                temperature=0.0,
                ignore_eos=True,
            )
        )
        times = (
            imported - begun,
            configured - imported,
            loaded - configured,
            time.monotonic() - loaded,
        )
        self.load = LoadTimes(*times, caches_removed=float(caches.damaged is not None))
        return self.load

    @property
    def _tokenizer(self) -> Any:
        """The one that the run's prompts are encoded with; vLLM has it as well."""
        return load_tokenizer(self.app.model)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, in tokens."""
        return int(self._llm.model_config.max_model_len)

    @property
    def vocabulary(self) -> int:
        """Token ids that the model knows: those below this."""
        return int(self._llm.model_config.get_vocab_size())

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token; for a tokenizer of bytes, its bytes, which are no
        fewer."""
        return max(map(len, self._llm.get_tokenizer().get_vocab()))

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        """n completions of one prompt.

        Raises:
            GenerationTimeoutError: not done `deadline_s` seconds from now; aborted.
            StaleReplicaError: the engine was lost in an update, or has been stopped.
            InvalidRequestError: the prompt leaves no room for max_tokens in the model's context, or
                vLLM refuses the request.
        """
        from vllm.exceptions import VLLMClientError

        self._refuse_stopped()
        self._refuse_long(request)
        try:
            async with asyncio.timeout(request.deadline_s):
                await self._open.wait()
                outputs = await self._run(request)
        except (ValueError, VLLMClientError) as error:  # vLLM's own checks of a request
            raise _invalid(error) from error
        except TimeoutError:
            raise _late(request) from None
        strings = self._stops(request).strings
        return tuple(_completion(output, self._tokenizer, strings) for output in outputs)

    async def stream(self, request: GenerateRequest, details: Details) -> AsyncGenerator[Piece]:
        """One completion (`request.n` is 1) in pieces, as the engine makes it. `max_tokens` 0: only
        the prompt is read. Closing the stream aborts it.

        Raises:
            Whatever `generate` does, also between two pieces.
        """
        self._refuse_stopped()
        self._refuse_long(request)
        text = TextStream(self._tokenizer, self._stops(request).strings)
        async with contextlib.aclosing(self._outputs(request, details)) as outputs:
            async for output in outputs:
                yield _piece(output, request, text, details)

    def _refuse_long(self, request: GenerateRequest) -> None:
        if len(request.prompt_ids) + request.max_tokens > self.max_model_len:
            asked = (
                f"prompt of {len(request.prompt_ids)} tokens + max_tokens = {request.max_tokens}"
            )
            raise InvalidRequestError(f"{asked} is above max_model_len = {self.max_model_len}")

    def _refuse_stopped(self) -> None:
        if self._llm is None:
            raise StaleReplicaError("the engine has been stopped, or was never started")

    async def logprobs(
        self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[float, ...]]:
        """Log-probs (nats, temperature 1) of each row's second ids, given its first.

        Raises:
            StaleReplicaError: the engine was lost.
        """
        self._refuse_stopped()
        await self._open.wait()
        return list(
            await asyncio.gather(
                *(self._score(list(prompt), list(completion)) for prompt, completion in rows)
            )
        )

    async def fingerprints(self) -> dict[str, Sequence[float]]:
        """What the engine holds: published name → fingerprint (`asyncrl.weights.fingerprint`).
        Generation rests meanwhile."""
        held: dict[str, Sequence[float]] = (await self._llm.collective_rpc("held_fingerprints"))[0]
        return held

    async def apply(self, update: Mapping[str, Any], version: int) -> dict[str, float]:
        """Change to a staged version: pause, load, label, resume. Returns pause_s, apply_s
        (seconds) and in_flight (completions).

        Raises:
            RuntimeError: the update failed after it had begun. The engine is stopped and must be
                replaced.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async def load() -> None:
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=dict(update)))
            await self._llm.finish_weight_update(weight_version=str(version))
            self.version = version
            self._updates += 1

        return await self._paused(load, f"the update of version {version} failed")

    async def pause_empty(self) -> dict[str, float]:
        """Pause and resume with nothing between: what an update costs at least."""

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
        self._processes = []
        if self._temporary is not None:
            self._temporary.close()

    async def stacks(self) -> list[str]:
        """What each of the engine's processes does just now: its main thread's innermost frames."""
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
        """Raise RuntimeError if the engine is dead or its weights are in an unknown state.

        An engine that hangs raises nothing: one that answers no probe for
        `generator.stall_timeout_s` is ended here, and with it its requests. Between any two steps
        it answers, however slow they are.
        """
        if self.broken is not None:
            raise RuntimeError(self.broken)
        if self._llm is None or self._llm.errored:
            raise RuntimeError("the vLLM engine's process has died")
        limit = self.app.stall_timeout_s
        if self._probe is not None and self._probe.done():
            self._probe.result()  # A question that failed is no answer.
        if self._probe is None or self._probe.done():
            self._probe, self._probed_at = (
                asyncio.ensure_future(self._llm.is_sleeping()),
                time.monotonic(),
            )
        elif time.monotonic() - self._probed_at > limit:
            # If it was this process that hung, the answer lies here unread.
            await asyncio.wait([self._probe], timeout=UNREAD_S)
            if self._probe.done():
                return
            self.broken = (
                f"the vLLM engine has answered nothing for generator.stall_timeout_s = {limit:g} s"
            )
            self._kill(self._processes)
            raise RuntimeError(self.broken)

    @staticmethod
    def _kill(processes: Sequence[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    async def _paused(self, work: Callable[[], Awaitable[None]], failure: str) -> dict[str, float]:
        # Requests that come now wait here: they would be salted and counted under the old version.
        self._open.clear()
        begun = time.monotonic()
        try:
            await self._llm.pause_generation(**PAUSE[self.app.generator.in_flight])
            lengths = [
                state.detokenizer.num_output_tokens()
                for state in self._llm.output_processor.request_states.values()
            ]
            self.stats.count_pause(lengths, self.app.generator.in_flight == "recompute")
            paused = time.monotonic()
            await work()
            applied = time.monotonic()
            await self._llm.resume_generation()
        except BaseException as error:
            # The weights may be half old, half new, and vLLM has no way back: nothing may be
            # generated from them. So also when cancelled.
            self.broken = f"{failure}: {type(error).__name__}: {error}"
            if not isinstance(error, Exception):
                raise
            raise RuntimeError(self.broken) from error
        finally:
            self._open.set()
        return {
            "pause_s": time.monotonic() - begun,
            "apply_s": applied - paused,
            "in_flight": float(len(lengths)),
        }

    async def _score(self, prompt: list[int], completion: list[int]) -> tuple[float, ...]:
        """One pass over both, as a prompt. vLLM always generates one token more: the context must
        have room for it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        tokens = prompt + completion
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._last_output(tokens, sampling, f"update {self._updates}")
        given = output.prompt_logprobs[len(prompt) :]
        return tuple(given[place][token].logprob for place, token in enumerate(completion))

    def _stops(self, request: GenerateRequest) -> Stops:
        """What ends its completions: the engine's stops, unless it ignores ends, and its own
        strings. Those that are special tokens end it as tokens."""
        stops = Stops({}) if request.ignore_eos else self.stops
        own = {text: special_token(self._tokenizer, text) for text in request.stop}
        tokens = {token: ("request",) for token in own.values() if token is not None}
        strings = (*stops.strings, *(text for text, token in own.items() if token is None))
        return Stops(tokens | stops.tokens, tuple(dict.fromkeys(strings)))

    async def _run(self, request: GenerateRequest) -> Sequence[Any]:
        prompt, sampling = list(request.prompt_ids), _sampling(request, self._stops(request))
        if self.app.generator.in_flight == "keep":
            # The cache outlives an update, and a sibling that is first scheduled after it would
            # find the prompt's KV of the old weights.
            alone = [_sibling(sampling, index) for index in range(request.n)]
            asked = [
                asyncio.ensure_future(
                    self._last_output(prompt, one, f"completion {next(self._ids)}")
                )
                for one in alone
            ]
            try:
                return [output.outputs[0] for output in await asyncio.gather(*asked)]
            except asyncio.CancelledError:
                ended = [
                    one.result()
                    for one in asked
                    if one.done() and not one.cancelled() and one.exception() is None
                ]
                self.stats.count_aborted([len(output.outputs[0].token_ids) for output in ended])
                raise
        output = await self._last_output(prompt, sampling, f"update {self._updates}")
        return sorted(output.outputs, key=lambda output: output.index)

    async def _last_output(self, prompt_ids: list[int], sampling: Any, salt: str) -> Any:
        """
        Args:
            salt: prompts share cached KV blocks with those of the same salt only.
        """
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        self._refuse_lost()
        prompt = tokens_input(prompt_ids, cache_salt=salt)
        name = f"request-{next(self._ids)}"
        answer = asyncio.ensure_future(self._answer(prompt, sampling, name))
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

    async def _outputs(self, request: GenerateRequest, details: Details) -> AsyncGenerator[Any]:
        """vLLM's outputs of one completion. Raises as `stream` does."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        deadline = time.monotonic() + request.deadline_s
        name, outputs, coming, ended = f"request-{next(self._ids)}", None, None, False
        try:
            async with asyncio.timeout(request.deadline_s):
                await self._open.wait()
            self._refuse_lost()
            # As in `_run`: where the cache outlives an update, no completion shares it.
            salt = (
                f"completion {next(self._ids)}"
                if self.app.generator.in_flight == "keep"
                else f"update {self._updates}"
            )
            sampling = _stream_sampling(request, self._stops(request), details)
            outputs = self._llm.generate(
                tokens_input(list(request.prompt_ids), cache_salt=salt), sampling, name
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
        self._refuse_stopped()
        if self._llm.errored:
            raise StaleReplicaError("the vLLM engine's process has died")

    def _died(self) -> EngineDiedError:
        cause = fatal_error(self._temporary.path if self._temporary is not None else None)
        return EngineDiedError(f"the vLLM engine's process has died{f': {cause}' if cause else ''}")

    async def _answer(self, prompt: Any, sampling: Any, name: str) -> Any:
        final = None
        async for output in self._llm.generate(prompt, sampling, name):
            final = output
        if final is None:
            raise EngineDiedError("the vLLM engine ended a request without an answer")
        return final

    def _count_aborted(self, name: str) -> None:
        """Count the completions of a request that is given up, those that had ended included; vLLM
        forgets them when it aborts."""
        processor = self._llm.output_processor
        states = [processor.request_states[one] for one in processor.external_req_ids.get(name, ())]
        self.stats.count_aborted([state.detokenizer.num_output_tokens() for state in states])
        parents = [state.parent_req for state in states if state.parent_req is not None]
        self.stats.count_aborted(
            [
                len(output.token_ids)
                for output in (parents[0].output_aggregator if parents else ())
                if output is not None
            ]
        )


def version_spans(labels: Sequence[Any], tokens: int) -> tuple[VersionSpan, ...]:
    """vLLM's weight-version spans with integer versions. Labels that are no number are the
    checkpoint's own weights: version 0."""
    spans: list[VersionSpan] = []
    for label in labels:
        version = int(label.version) if label.version.isdecimal() else 0
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, label.end)
        elif label.end > label.start:
            spans.append(VersionSpan(version, label.start, label.end))
    return tuple(spans) if spans or not tokens else (VersionSpan(0, 0, tokens),)


def _engine_config(app: GeneratorApp) -> tuple[Any, Any]:
    """vLLM's config and executor class."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.executor import Executor, UniProcExecutor

    generator = app.generator
    device: dict[str, Any] = {"gpu_memory_utilization": generator.gpu_memory_utilization}
    length: dict[str, Any] = (
        {} if app.max_model_len is None else {"max_model_len": app.max_model_len}
    )
    if generator.device == "cpu":
        # A seeded request whose prefill comes in pieces (a recompute of many, too) makes vLLM
        # rewind its random generator, which torch's CPU generator cannot: the engine dies. So every
        # prefill is whole.
        device = {
            "kv_cache_memory_bytes": generator.kv_cache_memory_bytes,
            "enforce_eager": True,
            "enable_chunked_prefill": False,
        }
    arguments = AsyncEngineArgs(
        model=app.model,
        dtype=app.dtype,
        max_num_seqs=app.max_num_seqs,
        seed=app.seed,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls="asyncrl.weights.held.HeldWeights",
        trust_remote_code=False,
        tokenizer_mode=TOKENIZER_MODE,
        load_format="safetensors",
        **length,
        **device,
    )
    if generator.device == "cpu" and arguments.create_model_config().has_inner_state:
        # vLLM keeps the states of a prefix only where prefill comes in pieces.
        arguments.enable_prefix_caching = False
    config = arguments.create_engine_config()
    if generator.device == "cpu":
        # vLLM gives a CPU worker a process of its own so that it can bind its threads. Ours are not
        # bound, and without it an engine starts one import of vLLM earlier and does not spend a
        # core on polling between the two.
        config.parallel_config.distributed_executor_backend = "uni"
        return config, UniProcExecutor
    return config, Executor.get_class(config)


def _sampling(request: GenerateRequest, stops: Stops) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind

    ngram, times = request.repetition or (0, 0)
    return SamplingParams(
        n=request.n,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
        stop_token_ids=list(stops.tokens),
        repetition_detection=(
            RepetitionDetectionParams(max_pattern_size=ngram, min_count=times) if ngram else None
        ),
        stop=list(stops.strings),
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(stops.strings),  # vLLM looks for strings in the text alone
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _stream_sampling(request: GenerateRequest, stops: Stops, details: Details) -> Any:
    """Of one completion in pieces. vLLM makes at least one token, also where the prompt alone is
    read."""
    from vllm.sampling_params import RequestOutputKind

    sampling = _sampling(replace(request, max_tokens=max(request.max_tokens, 1)), stops)
    sampling.logprobs = details.top
    sampling.prompt_logprobs = details.top if details.prompt else None
    sampling.output_kind = (
        RequestOutputKind.FINAL_ONLY if details.whole else RequestOutputKind.DELTA
    )
    return sampling


def _sibling(sampling: Any, index: int) -> Any:
    """The parameters of one of n completions as a request of its own, with the seed that vLLM gives
    it among the n."""
    alone = sampling.clone()
    alone.n = 1
    alone.seed = None if sampling.seed is None else sampling.seed + index
    return alone


def _invalid(error: Exception) -> InvalidRequestError:
    return InvalidRequestError(" ".join(str(error).split())[:REASON_LENGTH])


def _late(request: GenerateRequest) -> GenerationTimeoutError:
    return GenerationTimeoutError(
        f"{request.n} completions of up to {request.max_tokens} tokens were not done in"
        f" {request.deadline_s:g} s"
    )


def _piece(output: Any, request: GenerateRequest, text: TextStream, details: Details) -> Piece:
    made = output.outputs[0]
    if output.finished:
        _refuse_abort(made)
    prompt = (
        _tokens(request.prompt_ids, output.prompt_logprobs, details)
        if details.prompt and output.prompt_logprobs
        else None
    )
    if not request.max_tokens:
        return Piece(Tokens((), ()), "", "length", (), prompt)
    gained = text.add(made.token_ids, output.finished)
    versions = version_spans(made.weight_versions or (), text.tokens) if output.finished else ()
    return Piece(
        _tokens(made.token_ids, made.logprobs, details),
        gained,
        made.finish_reason,
        versions,
        prompt,
    )


def _tokens(ids: Sequence[int], told: Any, details: Details) -> Tokens:
    """vLLM's flat log-probs: at each place the token itself, then the most probable ones; nothing
    at a prompt's first token."""
    places = list(zip(told.start_indices, told.end_indices, strict=True))
    logprobs = tuple(told.logprobs[start] if end > start else None for start, end in places)
    if not details.top:
        return Tokens(tuple(ids), logprobs)
    best = tuple(
        tuple(zip(told.token_ids[start + 1 : end], told.logprobs[start + 1 : end], strict=True))
        for start, end in places
    )
    return Tokens(tuple(ids), logprobs, best)


def _refuse_abort(output: Any) -> None:
    if output.finish_reason not in ("stop", *TRUNCATED):
        raise StaleReplicaError(f"the vLLM engine ended a completion with {output.finish_reason!r}")


def _completion(output: Any, tokenizer: Any, stop: Sequence[str]) -> Completion:
    ids = tuple(output.token_ids)
    _refuse_abort(output)
    return Completion(
        token_ids=ids,
        logprobs=tuple(output.logprobs.logprobs),
        versions=version_spans(output.weight_versions or (), len(ids)),
        finish_reason=output.finish_reason,
        text=text_before(decode(tokenizer, ids), stop),
    )
