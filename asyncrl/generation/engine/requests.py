"""Requests of an engine: token ids in, completions with log-probs and version spans out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.contracts.errors import (
    EngineDiedError,
    GenerationTimeoutError,
    InvalidRequestError,
)
from asyncrl.contracts.messages import Details, GenerateRequest, StreamPiece
from asyncrl.contracts.rows import Completion
from asyncrl.generation.engine.adapters import Adapter
from asyncrl.generation.engine.arguments import (
    greedy,
    sampling_params,
    scoring_params,
    sibling_params,
    stream_params,
)
from asyncrl.generation.engine.outputs import scores, to_completion, to_piece, tokens_so_far
from asyncrl.generation.engine.state import EngineState
from asyncrl.text.stops import Stops, special_token
from asyncrl.text.streaming import TextStream
from asyncrl.text.tokenizer import load_tokenizer, tokenizer_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput

REASON_LENGTH = 400
"""Characters kept of vLLM's reason for refusing a request, which may repeat the request."""


class Answered(NamedTuple):
    """What a request generated: the n completions, and then the greedy one if it has a baseline."""

    completions: tuple[Completion, ...]
    cached_tokens: tuple[int, ...]
    """For each of them, see `Generated.cached_tokens`."""
    times: tuple[tuple[float, float], ...] = ()
    """For each of them, see `Generated.times`; or none."""


class Ended(NamedTuple):
    """One completion of a request, as vLLM returned it."""

    output: CompletionOutput
    cached_tokens: int
    times: tuple[float, float] | None


class EngineRequests:
    """Generates, streams and scores."""

    def __init__(self, state: EngineState, stops: Stops) -> None:
        """
        Args:
            stops: what ends every completion, in addition to a request's own strings.
        """
        self._state = state
        self.stops = stops
        self._ids = itertools.count()

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that encodes the run's prompts; vLLM uses it too."""
        return load_tokenizer(self._state.app.model)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, in tokens."""
        return int(self._state.llm.model_config.max_model_len)

    @property
    def vocabulary(self) -> int:
        """Size of the model's vocabulary: a token id is below it."""
        return int(self._state.llm.model_config.get_vocab_size())

    @cached_property
    def tokenizer_hash(self) -> str:
        return tokenizer_hash(self._tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Length of the longest token in characters, or an upper bound: a byte-level tokenizer has
        one character for each byte."""
        return max(map(len, self._state.llm.get_tokenizer().get_vocab()))

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
                await self._state.opened.wait()
                await self._state.adapters.wait_for_slot()
                with self._state.adapters.using(self._state.llm) as adapter:
                    outputs = await self._run(request, adapter)
        except (ValueError, VLLMClientError) as error:  # vLLM's own checks of a request
            raise _invalid(error) from error
        except TimeoutError:
            raise _late(request) from None
        strings = self._stops(request).strings
        version = None if adapter is None else adapter.version
        return Answered(
            tuple(to_completion(one.output, self._tokenizer, strings, version) for one in outputs),
            tuple(one.cached_tokens for one in outputs),
            tuple(one.times for one in outputs if one.times is not None),
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
                await self._state.opened.wait()
                await self._state.adapters.wait_for_slot()
        except TimeoutError:
            raise _late(request) from None
        with self._state.adapters.using(self._state.llm) as adapter:
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
        self._state.refuse_lost()
        await self._state.opened.wait()
        return list(
            await asyncio.gather(
                *(self._score(list(prompt), list(completion)) for prompt, completion in rows)
            )
        )

    async def _score(self, prompt: list[int], completion: list[int]) -> tuple[float, ...]:
        """One pass over both, as a prompt. vLLM generates one more token, so the context must have
        room for it."""
        await self._state.adapters.wait_for_slot()
        with self._state.adapters.using(self._state.llm) as adapter:
            output, _ = await self._last_output(prompt + completion, scoring_params(), adapter)
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
        """Whether a request for n completions becomes n requests, each of which is submitted again
        if it has no token at an update (`asyncrl.generation.engine.kept_requests`). With adapters
        it does not: a request keeps its adapter, and vLLM's cache knows adapters by name and path.
        """
        app = self._state.app
        return app.in_flight == "keep" and app.max_lora_rank is None

    @property
    def _salt(self) -> str:
        """A new request's salt: requests share cached KV blocks only under the same salt, and only
        with the same adapter. So the KV of older weights is never shared."""
        return f"update {self._state.updates}"

    async def _run(self, request: GenerateRequest, adapter: Adapter | None) -> list[Ended]:
        """The completions."""
        prompt, stops = list(request.prompt_ids), self._stops(request)
        params = sampling_params(request, stops)
        wanted = (
            [sibling_params(params, index) for index in range(request.n)]
            if self._splits
            else [params]
        )
        if request.baseline:
            wanted.append(sampling_params(greedy(request), stops))
        parts = [asyncio.ensure_future(self._last_output(prompt, part, adapter)) for part in wanted]
        try:
            answers = await asyncio.gather(*parts)
        except asyncio.CancelledError:
            ended = [
                part.result()[0]
                for part in parts
                if part.done() and not part.cancelled() and part.exception() is None
            ]
            self._state.stats.count_aborted(
                [len(output.token_ids) for answer in ended for output in answer.outputs]
            )
            raise
        return [
            Ended(output, answer.num_cached_tokens or 0, times[output.index] if times else None)
            for answer, times in answers
            for output in sorted(answer.outputs, key=lambda output: output.index)
        ]

    async def _last_output(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        adapter: Adapter | None,
    ) -> tuple[RequestOutput, list[tuple[float, float]]]:
        """A request's output, and the times of its completions in their order, if vLLM told them
        (`EngineStats.times_of`)."""
        from vllm.v1.engine.exceptions import EngineDeadError

        self._state.refuse_lost()
        name, stats = f"request-{next(self._ids)}", self._state.stats
        stats.watch(name)
        outputs = self._start_request(prompt_ids, params, name, adapter)
        answer = asyncio.ensure_future(_last(outputs))
        try:
            await asyncio.wait([answer])
            output = answer.result()
            await stats.told(name, len(output.outputs))
            lengths = {one.index: len(one.token_ids) for one in output.outputs}
            return output, stats.times_of(name, [lengths[index] for index in sorted(lengths)])
        except asyncio.CancelledError:
            self._count_aborted(name)
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            raise
        except EngineDeadError:
            raise self._state.died() from None
        finally:
            stats.forget(name)

    def _start_request(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        name: str,
        adapter: Adapter | None,
    ) -> AsyncGenerator[RequestOutput]:
        """vLLM's outputs of a request."""
        from vllm.inputs.engine import tokens_input

        def submit() -> AsyncGenerator[RequestOutput]:
            self._state.refuse_lost()
            return self._state.llm.generate(
                tokens_input(prompt_ids, cache_salt=self._salt),
                params,
                name,
                lora_request=None if adapter is None else adapter.request,
            )

        return self._state.kept.outputs(name, submit) if self._splits else submit()

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
                await self._state.opened.wait()
            self._state.refuse_lost()
            params = stream_params(request, self._stops(request), details)
            outputs = self._start_request(list(request.prompt_ids), params, name, adapter)
            while not ended:
                coming = asyncio.ensure_future(anext(outputs, None))
                if not (await asyncio.wait([coming], timeout=deadline - time.monotonic()))[0]:
                    raise TimeoutError
                if (output := coming.result()) is None:
                    raise EngineDiedError("the vLLM engine ended a request without an answer")
                ended = output.finished
                yield output
        except EngineDeadError:
            raise self._state.died() from None
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

    def _count_aborted(self, name: str) -> None:
        """Count the completions of a request that is given up, including those that have ended:
        vLLM forgets these when it aborts."""
        if self._state.stopped:
            return
        processor = self._state.llm.output_processor
        states = [processor.request_states[id] for id in processor.external_req_ids.get(name, ())]
        self._state.stats.count_aborted([tokens_so_far(state) for state in states])
        parents = [state.parent_req for state in states if state.parent_req is not None]
        self._state.stats.count_aborted(
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


def _invalid(error: Exception) -> InvalidRequestError:
    return InvalidRequestError(" ".join(str(error).split())[:REASON_LENGTH])


def _late(request: GenerateRequest) -> GenerationTimeoutError:
    return GenerationTimeoutError(
        f"{request.n} completions of up to {request.max_tokens} tokens were not done in"
        f" {request.deadline_s:g} s"
    )
