"""What a generator is asked and what it answers. Used by rollout workers, evaluation and the Serve replica; imports no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.control.protocols import EngineLoad
from asyncrl.types import Completion, VersionSpan

__all__ = [
    "Details",
    "EngineDied",
    "Generate",
    "GenerateRequest",
    "Generated",
    "GenerationTimeout",
    "InvalidRequest",
    "Piece",
    "StaleReplica",
    "Standing",
    "Tokens",
    "WeightsId",
]


@dataclass(frozen=True, slots=True)
class WeightsId:
    """Identity of one version's weights: ordered by version, and only within one run and attempt."""

    run_id: str
    attempt: int
    version: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Completions wanted for one prompt, as token ids."""

    prompt_ids: tuple[int, ...]
    n: int
    """Completions."""
    max_tokens: int
    """Longest completion, in tokens."""
    temperature: float
    """0 = greedy. Log-probs are those of the distribution sampled from (at 0: of the model's own)."""
    seed: int | None = None
    deadline_s: float = 300.0
    """Seconds from arrival at the replica until the request is aborted."""
    min_weights: WeightsId | None = None
    """Oldest weights that may answer. None = whatever is loaded."""
    ignore_eos: bool = False
    repetition: tuple[int, int] | None = None
    """End a completion whose last tokens are one n-gram of at most so many tokens, so many times in a row. None = never."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, beside the generator's own. The tokens that spell one stay in it, the text goes up to it."""
    top_p: float = 1.0
    """Sample from the most probable tokens that together have this probability. 1 = from all. Log-probs are then those among the kept tokens."""
    top_k: int = 0
    """Sample from this many most probable tokens. 0 = from all."""
    min_p: float = 0.0
    """Sample from tokens of at least this times the most probable one's probability. 0 = from all."""
    replica: str | None = None
    """Id of the only replica that may answer, and with no other weights than `min_weights`: it is held at them for an evaluation. None = any replica."""


@dataclass(frozen=True, slots=True)
class Generated:
    """n completions and the id of the replica that made them."""

    completions: tuple[Completion, ...]
    replica: str
    started_at: float
    finished_at: float
    """When the replica, with the weights asked for, took the request, and when it was done: by its process's `steady_time`."""
    load: EngineLoad | None = None
    """Of its engine, when they were done."""


@dataclass(frozen=True, slots=True)
class Details:
    """What a stream of pieces tells."""

    whole: bool = False
    """The completion as one piece, at its end. That costs less."""
    top: int = 0
    """Most probable tokens at each place, with their log-probs."""
    prompt: bool = False
    """The prompt's tokens as well: log-probs at temperature 1."""
    spelled: bool = False
    """Whether the tokens' texts are needed. Nothing that an engine knows of."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """T tokens in a row, with T log-probs (nats)."""

    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    """None for a prompt's first token, which nothing predicts."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Of each token, the ids and log-probs of the most probable ones at its place, best first. Empty unless they were asked for."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a completion has gained since its last piece."""

    tokens: Tokens
    text: str
    finish_reason: str | None = None
    """With the last piece."""
    versions: tuple[VersionSpan, ...] = ()
    """With the last piece: of the whole completion."""
    prompt: Tokens | None = None
    """With the first piece, if it was asked for."""


class StaleReplica(Exception):
    """The replica has not the version asked for and cannot have it now: ask another."""


class EngineDied(StaleReplica):
    """The engine ended under the request; its replica will be replaced."""


class InvalidRequest(ValueError):
    """The engine does not take the request; the message says why, in the engine's words."""


class GenerationTimeout(Exception):
    """The request was aborted at its deadline."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Which weights a replica holds, and for whom."""

    weights: WeightsId | None
    """None: the checkpoint's own."""
    lease: str | None
    """The job that has the application, or None."""

    @property
    def text(self) -> str:
        """In words."""
        if self.weights is None:
            held = "the checkpoint's own weights"
        else:
            held = f"version {self.weights.version} of run {self.weights.run_id}, attempt {self.weights.attempt}"
        if self.lease is not None:
            return f"serving {held}; leased by {self.lease}"
        return (
            f"serving {held}; no lease"
            if self.weights is None
            else f"serving {held}, the last of an ended lease"
        )


class Generate(Protocol):
    """One generator, or many behind a router."""

    async def generate(self, request: GenerateRequest) -> Generated:
        """Raises StaleReplica or GenerationTimeout."""
        ...

    async def logprobs(
        self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], min_weights: WeightsId | None
    ) -> dict[str, list[tuple[float, ...]]]:
        """Log-probs (nats, temperature 1) of each row's second ids, given its first, by replica: what each one's model says of tokens that are fixed."""
        ...
