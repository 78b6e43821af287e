"""Generators without an engine: random completions, the same behind the HTTP routes, and samples of a plain transformers model."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from asyncrl.control.protocols import Manifest, PushReport
from asyncrl.generation.openai import ServedModel
from asyncrl.generation.protocol import Generated, GenerateRequest, Standing, WeightsId
from asyncrl.types import Completion, VersionSpan

__all__ = ["FakeGenerate", "FakeServed", "SeededGenerator"]


class FakeGenerate:
    """Seeded random completions over token ids 3 … vocabulary - 1, at version `version` (may be changed between calls)."""

    def __init__(self, vocabulary: int = 40, version: int = 0, latency: float = 0.0) -> None:
        self.vocabulary, self.version, self.latency = vocabulary, version, latency

    async def generate(self, request: GenerateRequest) -> Generated:
        if request.min_weights is not None and request.min_weights.version > self.version:
            raise AssertionError(f"version {request.min_weights.version} was asked for, and {self.version} is there")
        started_at = time.time()
        await asyncio.sleep(self.latency)
        return Generated(tuple(self._completion(request, index) for index in range(request.n)), "fake", started_at, time.time())

    async def logprobs(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], min_weights: WeightsId | None) -> dict[str, list[tuple[float, ...]]]:
        return {"fake": [tuple(-random.Random(f"{token}").random() for token in completion) for _, completion in rows]}

    def _completion(self, request: GenerateRequest, index: int) -> Completion:
        random_ = random.Random(f"{request.seed}/{request.prompt_ids}/{index}")
        length = request.max_tokens if request.ignore_eos else random_.randint(1, request.max_tokens)
        ids = tuple(random_.randrange(3, self.vocabulary) for _ in range(length))
        logprobs = tuple(-random_.random() for _ in ids)
        reason = "length" if length == request.max_tokens else "stop"
        return Completion(ids, logprobs, (VersionSpan(self.version, 0, length),), reason, text=" ".join(map(str, ids)))


class FakeServed(FakeGenerate):
    """`asyncrl.generation.http.Served`: characters are tokens, by their code points."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model.vocabulary)
        self._model = model
        self.held = Standing(None, None)
        self.requests: list[GenerateRequest] = []
        self.failure: Exception | None = None
        """What the next calls raise."""

    @property
    def model(self) -> ServedModel:
        return self._model

    async def encode(self, text: str) -> list[int]:
        return [min(ord(character), self._model.vocabulary - 1) for character in text]

    async def generate(self, request: GenerateRequest) -> Generated:
        if len(request.prompt_ids) + request.max_tokens > self._model.max_model_len or max(request.prompt_ids) >= self._model.vocabulary:
            raise AssertionError(f"an engine would not take {request}")
        if self.failure is not None:
            raise self.failure
        self.requests.append(request)
        return await super().generate(request)

    async def standing(self) -> Standing:
        return self.held

    async def check_health(self) -> None:
        if self.failure is not None:
            raise self.failure


class SeededGenerator:
    """`Generate` and `WeightSync` around a plain transformers model: samples from its current weights, one token, completion and request after the
    other, without a cache. What it gives depends on weights and seeds alone, so two runs with equal weights make equal tokens."""

    def __init__(self, model: Any, eos_token_id: int) -> None:
        """`model` is a causal LM in float32; its weights may be changed from outside between calls."""
        self.model, self.eos_token_id = model, eos_token_id
        self.version = 0

    async def generate(self, request: GenerateRequest) -> Generated:
        started_at = time.time()
        return Generated(tuple(self._sample(request, index) for index in range(request.n)), "seeded", started_at, time.time())

    async def logprobs(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], min_weights: WeightsId | None) -> dict[str, list[tuple[float, ...]]]:
        import torch

        scored = []
        with torch.no_grad():
            for prompt, completion in rows:
                logits = self.model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
                scored.append(tuple(logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0].tolist()))
        return {"seeded": scored}

    async def push(self, manifest: Manifest) -> PushReport:
        """Take a version's weights from the object store."""
        import torch

        buckets = await asyncio.gather(*manifest.buckets)
        parameters = dict(self.model.named_parameters())
        if set(parameters) != {entry.name for entry in manifest.tensors}:
            raise AssertionError(f"the manifest has not the model's parameters: {set(parameters) ^ {entry.name for entry in manifest.tensors}}")
        with torch.no_grad():
            for entry in manifest.tensors:
                data = torch.frombuffer(bytearray(buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes]), dtype=getattr(torch, entry.dtype))
                parameters[entry.name].copy_(data.view(entry.shape))
        self.version = manifest.version
        return PushReport(manifest.version, {"seeded": {"pause_s": 0.0}})

    def _sample(self, request: GenerateRequest, index: int) -> Completion:
        import torch

        generator = torch.Generator().manual_seed((request.seed or 0) * 1_000 + index)
        ids: list[int] = []
        logprobs: list[float] = []
        with torch.no_grad():
            while len(ids) < request.max_tokens and (request.ignore_eos or self.eos_token_id not in ids):
                logits = self.model(torch.tensor([[*request.prompt_ids, *ids]])).logits[0, -1]
                distribution = (logits / request.temperature).log_softmax(-1)
                ids.append(int(torch.multinomial(distribution.exp(), 1, generator=generator)))
                logprobs.append(float(distribution[ids[-1]]))
        reason = "stop" if ids[-1] == self.eos_token_id else "length"
        return Completion(tuple(ids), tuple(logprobs), (VersionSpan(self.version, 0, len(ids)),), reason)
