"""Generators without an engine: random completions, also for the HTTP routes, and samples of a
transformers model."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from asyncrl.contracts.messages import (
    Details,
    EngineLoad,
    Generated,
    GenerateRequest,
    Manifest,
    PushReport,
    ReplicaStatus,
    ServedWeights,
    StreamPiece,
    Tokens,
    WeightsId,
)
from asyncrl.contracts.rows import Completion, VersionSpan
from asyncrl.contracts.text_listener import Heard
from asyncrl.serving.identity import ServedModel
from asyncrl.serving.metrics import HttpStatus, Traffic
from asyncrl.text.chat_messages import Message, MessagesError, Schema

if TYPE_CHECKING:  # most fakes need no transformers
    from transformers import PreTrainedModel


class FakeGenerate:
    """Seeded random completions over token ids 3 … vocabulary - 1. `version` may be changed between
    calls. The baseline depends on the prompt only."""

    def __init__(self, vocabulary: int = 40, version: int = 0, latency: float = 0.0) -> None:
        self.vocabulary, self.version, self.latency = vocabulary, version, latency

    async def generate(self, request: GenerateRequest, heard: Heard | None = None) -> Generated:
        if request.min_weights is not None and request.min_weights.version > self.version:
            raise AssertionError(
                f"version {request.min_weights.version} was requested, but this is version"
                f" {self.version}"
            )
        started_at = time.time()
        await asyncio.sleep(self.latency)
        finished_at = time.time()
        generated = Generated(
            tuple(self._completion(request, index) for index in range(request.n)),
            "fake",
            started_at,
            finished_at,
            times=((started_at, finished_at),) * request.n,
            baseline=(
                self._completion(replace(request, seed=None), 0) if request.baseline else None
            ),
        )
        _say(generated, heard)
        return generated

    async def logprobs(
        self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], min_weights: WeightsId | None
    ) -> dict[str, list[tuple[float, ...]]]:
        return {
            "fake": [
                tuple(-random.Random(f"{token}").random() for token in completion)
                for _, completion in rows
            ]
        }

    def _completion(self, request: GenerateRequest, index: int) -> Completion:
        random_ = random.Random(f"{request.seed}/{request.prompt_ids}/{index}")
        length = (
            request.max_tokens if request.ignore_eos else random_.randint(1, request.max_tokens)
        )
        ids = tuple(random_.randrange(3, self.vocabulary) for _ in range(length))
        logprobs = tuple(-random_.random() for _ in ids)
        reason = "length" if length == request.max_tokens else "stop"
        return Completion(
            ids,
            logprobs,
            (VersionSpan(self.version, 0, length),),
            reason,
            text=" ".join(map(str, ids)),
        )


def _say(generated: Generated, heard: Heard | None) -> None:
    """Pass on each text in two parts."""
    for index, completion in enumerate(generated.completions if heard is not None else ()):
        half = len(completion.text) // 2
        for part in (completion.text[:half], completion.text[half:]):
            if part and heard is not None:
                heard(index, part)


class FakeTokenizer:
    """A fake `asyncrl.serving.answers.ChatTokenizer`. Each character is a token, by its code
    point. In a chat, the roles user and assistant must alternate."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    async def encode(self, text: str, rendered: bool = False) -> list[int]:
        return [min(ord(character), self.vocabulary - 1) for character in text]

    async def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object],
        tools: Sequence[Schema] | None,
    ) -> str:
        if "chat_template" in variables:
            raise MessagesError("chat_template is not a variable of a template")
        roles = [message["role"] for message in messages if message["role"] != "system"]
        if roles != [("user", "assistant")[index % 2] for index in range(len(roles))]:
            raise MessagesError("roles must alternate")
        return (
            "".join(f"{str(message['role'])[0]}:{message['content']};" for message in messages)
            + "a:"
        )

    async def content_filter(self, prompt_ids: Sequence[int], tools: bool) -> Callable[[str], str]:
        return str

    async def read(
        self,
        prompt_ids: Sequence[int],
        ids: Sequence[int],
        text: str,
        tools: Sequence[Schema] | None,
    ) -> Message:
        return {"role": "assistant", "content": text}

    async def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    async def spell(self, ids: Iterable[int]) -> dict[int, str]:
        return {token: chr(token) for token in ids}


class FakeServed(FakeGenerate):
    """A fake `asyncrl.serving.http.Served`. It streams the completions of `FakeGenerate` in pieces
    of two tokens, and each token is a character."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model.vocabulary)
        self._model = model
        self.tokenizer = FakeTokenizer(model.vocabulary)
        self.traffic = Traffic()
        self.held = ServedWeights(None, None)
        self.requests: list[GenerateRequest] = []
        self.failure: Exception | None = None
        """The exception that the next calls raise, if any."""
        self.fails_after: int | None = None
        """Pieces that a stream yields before it raises `failure`. None: it raises at the start."""

    @property
    def model(self) -> ServedModel:
        return self._model

    async def stream(
        self, request: GenerateRequest, details: Details
    ) -> AsyncIterator[StreamPiece]:
        if (
            len(request.prompt_ids) + max(request.max_tokens, 1) > self._model.max_model_len
            or max(request.prompt_ids) >= self._model.vocabulary
        ):
            raise AssertionError(f"an engine would refuse {request}")
        if self.failure is not None and self.fails_after is None:
            raise self.failure
        self.requests.append(request)
        prompt = self._tokens(request.prompt_ids, details, first=True) if details.prompt else None
        if not request.max_tokens:
            yield StreamPiece(Tokens((), ()), "", "length", prompt=prompt)
            return
        whole = self._completion(request, 0)
        size = len(whole.token_ids) if details.whole else 2
        for number, start in enumerate(range(0, len(whole.token_ids), size)):
            if number == self.fails_after and self.failure is not None:
                raise self.failure
            await asyncio.sleep(self.latency)
            ids, last = whole.token_ids[start : start + size], start + size >= len(whole.token_ids)
            yield StreamPiece(
                self._tokens(ids, details, first=False),
                "".join(map(chr, ids)),
                whole.finish_reason if last else None,
                whole.versions if last else (),
                prompt=prompt if not start else None,
            )

    def _tokens(self, ids: Sequence[int], details: Details, first: bool) -> Tokens:
        """Return the tokens with log-probs of -id / 100. The most probable tokens are 3, 4, …"""
        logprobs = tuple(-token / 100 for token in ids)
        best = tuple(
            tuple((3 + rank, -(3 + rank) / 100) for rank in range(details.top)) for _ in ids
        )
        return Tokens(
            tuple(ids),
            (None, *logprobs[1:]) if first else logprobs,
            (((), *best[1:]) if first else best) if details.top else (),
        )

    async def served_weights(self) -> ServedWeights:
        return self.held

    async def http_statuses(self) -> list[HttpStatus]:
        status = replace(
            fake_status("fake"),
            weights=self.held.weights,
            applied={"pause_s": 0.04},
            tokens_generated=12,
            load=EngineLoad("fake", kv_use=0.5, waiting=1, preemptions=0, aborted=(0, 2)),
            kv_cache_tokens=128,
            max_model_len=self._model.max_model_len,
        )
        return [HttpStatus(status, self.traffic)]

    async def check_health(self) -> None:
        if self.failure is not None:
            raise self.failure


def fake_status(replica: str) -> ReplicaStatus:
    """Return the status of a replica that has the checkpoint's weights and generated nothing."""
    return ReplicaStatus(
        replica=replica,
        weights=None,
        held=False,
        rests=False,
        pid=0,
        package="",
        broken=None,
        start_times={},
        applied={},
        tokens_at_pause=(),
        tokens_generated=0,
        load=EngineLoad(replica, 0.0, 0, 0),
        kv_cache_tokens=0,
        memory_bytes=0,
        stop_token_ids=(),
        stop_strings=(),
        tokenizer="",
        max_model_len=0,
        app={},
        parameters=0,
        base_weights="",
    )


class SeededGenerator:
    """`Generate` and `WeightSync` on a transformers model. It samples from the current weights, one
    token at a time and without a cache.

    The completions depend only on weights and seeds, so two runs with equal weights generate equal
    tokens.
    """

    def __init__(self, model: PreTrainedModel, eos_token_id: int) -> None:
        """
        Args:
            model: a causal LM in float32. Its weights may be changed between calls.
        """
        self.model, self.eos_token_id = model, eos_token_id
        self.version = 0

    async def generate(self, request: GenerateRequest, heard: Heard | None = None) -> Generated:
        started_at = time.time()
        generated = Generated(
            tuple(self._sample(request, index) for index in range(request.n)),
            "seeded",
            started_at,
            time.time(),
            baseline=self._sample(request, 0, greedy=True) if request.baseline else None,
        )
        _say(generated, heard)
        return generated

    async def logprobs(
        self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], min_weights: WeightsId | None
    ) -> dict[str, list[tuple[float, ...]]]:
        import torch

        scored = []
        with torch.no_grad():
            for prompt, completion in rows:
                logits = self.model(torch.tensor([[*prompt, *completion]])).logits[
                    0, len(prompt) - 1 : -1
                ]
                scored.append(
                    tuple(
                        logits.log_softmax(-1)
                        .gather(-1, torch.tensor(completion)[:, None])[:, 0]
                        .tolist()
                    )
                )
        return {"seeded": scored}

    async def push(self, manifest: Manifest) -> PushReport:
        """Load a version's weights from the object store."""
        import torch

        buckets = await asyncio.gather(*manifest.buckets)
        parameters = dict(self.model.named_parameters())
        if set(parameters) != {entry.name for entry in manifest.tensors}:
            raise AssertionError(
                "the manifest does not list the model's parameters; the difference is"
                f" {set(parameters) ^ {entry.name for entry in manifest.tensors}}"
            )
        with torch.no_grad():
            for entry in manifest.tensors:
                data = torch.frombuffer(
                    bytearray(buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes]),
                    dtype=getattr(torch, entry.dtype),
                )
                parameters[entry.name].copy_(data.view(entry.shape))
        self.version = manifest.version
        return PushReport(manifest.version, {"seeded": {"pause_s": 0.0}})

    def _sample(self, request: GenerateRequest, index: int, greedy: bool = False) -> Completion:
        import torch

        generator = torch.Generator().manual_seed((request.seed or 0) * 1_000 + index)
        ids: list[int] = []
        logprobs: list[float] = []
        with torch.no_grad():
            while len(ids) < request.max_tokens and (
                request.ignore_eos or self.eos_token_id not in ids
            ):
                logits = self.model(torch.tensor([[*request.prompt_ids, *ids]])).logits[0, -1]
                distribution = (logits / request.temperature).log_softmax(-1)
                ids.append(
                    int(distribution.argmax())
                    if greedy
                    else int(torch.multinomial(distribution.exp(), 1, generator=generator))
                )
                logprobs.append(float(distribution[ids[-1]]))
        reason = "stop" if ids[-1] == self.eos_token_id else "length"
        return Completion(
            tuple(ids), tuple(logprobs), (VersionSpan(self.version, 0, len(ids)),), reason
        )
