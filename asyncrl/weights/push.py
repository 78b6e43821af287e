"""Brings a version to all replicas: the version registry first, then a broadcast, then again those
that have not acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.serve.exceptions import DeploymentUnavailableError

from asyncrl.contracts.messages import Manifest, PushReport, WeightsId
from asyncrl.runtime.serve_calls import ask_all
from asyncrl.weights.fingerprint import difference_text, published_fingerprints
from asyncrl.weights.manifest import ManifestError

__all__ = ["ServeWeightSync"]

STATUS_S = 10.0
"""Seconds a replica gets to say where it is."""

SILENT = "one that does not answer"
"""Stands for the id of a replica that has not said where it is."""

NO_ANSWER = (TimeoutError, ray.exceptions.RayError, DeploymentUnavailableError)
"""What a broadcast raises when Serve does not say which replicas there are, or when none is up (it
died, and its successor still loads)."""

ROUND_S = 15.0
"""Seconds of one broadcast before the replicas are asked where they are."""

FINGERPRINTS_S = 120.0
"""Seconds that the replicas get to say what they hold."""

ANSWER_S = 1.0
"""Seconds that a replica gets to say where it is when nobody has to wait for it."""

BETWEEN_ROUNDS_S = 0.2
"""Seconds between two rounds."""

ANNOUNCE_EVERY_S = 10.0
"""Seconds after which the version registry is told the newest version once more."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Where the live replicas are."""

    at: dict[str, dict[str, float]] = field(default_factory=dict)
    """Those at (or above) the version, with their timings."""
    behind: list[str] = field(default_factory=list)
    """The others: ids of those below it, `SILENT` for each that does not answer."""
    tokens: int = 0
    """Tokens that those below it have generated."""

    @property
    def live(self) -> int:
        return len(self.at) + len(self.behind)

    def commits(self, known: Counter[str], graced: bool) -> bool:
        """Whether the version is committed: at least half of the live replicas have it, and no
        other one is waited for. Before the grace is over, only those `known` to stay behind are
        not."""
        return (
            bool(self.at)
            and 2 * len(self.at) >= self.live
            and (graced or Counter(self.behind) <= known)
        )


class ServeWeightSync:
    """`WeightSync` over a Serve handle and the job's version registry."""

    def __init__(
        self,
        handle: Any,
        registry: Any,
        push_timeout_s: float,
        commit_grace_s: float = 60.0,
        drains: bool = False,
    ) -> None:
        """
        Args:
            push_timeout_s, commit_grace_s: as in `WeightsConfig`.
            drains: generations under way end before a replica applies a version: while they make
                tokens, no time passes.
        """
        self._handle = handle
        self._registry = registry
        self._timeout_s, self._grace_s, self._drains = push_timeout_s, commit_grace_s, drains
        self._last: Manifest | None = None
        self._behind: Counter[str] = Counter()
        """Replicas that the last push waited for in vain, and how many were silent. The next one
        does not wait for these."""
        self._holding: str | None = None
        """The replica that keeps its version for an evaluation. Every push repeats it, so that a
        replica which missed a word is not held for ever."""

    async def push(self, manifest: Manifest) -> PushReport:
        """Return when every live replica has applied the version, or, after `commit_grace_s`, when
        at least half of them have. Those that were waited for in vain the last time, and have not
        caught up since, are not waited for again. The one that is held is not at all.

        Replicas that start meanwhile take it from the version registry and are counted once they
        answer.

        Raises:
            RuntimeError: fewer than half applied it in time, or the manifest does not fit the
                model.
        """
        self._behind = await self._still_behind()
        self._last = manifest
        began = time.monotonic()
        deadline, grace_ends = began + self._timeout_s, began + self._grace_s
        await self._announce(manifest)
        found, tokens = Survey(), -1
        reason = "no replica answered"
        while (remaining := deadline - time.monotonic()) > 0:
            errors = await self._broadcast(
                manifest, min(ROUND_S, remaining), max(grace_ends - time.monotonic(), 0.0)
            )
            for error in errors:
                if isinstance(error, ManifestError):
                    raise RuntimeError(
                        f"version {manifest.version} was refused: {error}"
                    ) from error
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
            survey = await self._survey(manifest, max(grace_ends - time.monotonic(), ANSWER_S))
            found = survey or found
            if survey and survey.commits(self._behind, graced=time.monotonic() >= grace_ends):
                break
            if (
                survey
                and self._drains
                and survey.tokens > tokens
                and all(isinstance(error, TimeoutError) for error in errors)
            ):
                tokens, deadline = survey.tokens, time.monotonic() + self._timeout_s
            await asyncio.sleep(BETWEEN_ROUNDS_S)
        if found.commits(self._behind, graced=True):
            self._behind = Counter(found.behind)
            return PushReport(manifest.version, found.at, tuple(found.behind))
        raise RuntimeError(
            f"{len(found.at) or 'no'} replica{'s' if len(found.at) > 1 else ''} of"
            f" {max(1, found.live)} applied version {manifest.version} within"
            f" weights.push_timeout_s = {self._timeout_s:g}: {reason}"
        )

    async def hold(self, version: int) -> str | None:
        """Let one replica keep the version that was pushed last, until `release`. None: fewer than
        two have it, or Serve does not answer."""
        if self._last is None or self._last.version != version:
            return None
        weights = WeightsId(self._last.run_id, self._last.attempt, version)
        with contextlib.suppress(*NO_ANSWER):
            answers = await ask_all(self._handle, "status", timeout_s=STATUS_S)
            able = sorted(
                answer.replica
                for answer in answers
                if not isinstance(answer, BaseException) and answer.weights == weights
            )
            if len(able) > 1:
                self._holding = able[-1]
                if True in await ask_all(
                    self._handle, "hold", self._holding, weights, timeout_s=STATUS_S
                ):
                    return self._holding
        self._holding = None
        return None

    async def release(self, replica: str) -> None:
        """The replica takes the newest version, and counts again. It need not live; one that does
        not hear it learns it from the next push."""
        if self._holding == replica:
            self._holding = None
        with contextlib.suppress(*NO_ANSWER):
            await ask_all(self._handle, "release", replica, timeout_s=STATUS_S)

    async def keep_announced(self) -> None:
        """Tell the version registry the newest version again and again, until cancelled: one whose
        process died is started empty, and a replica that starts then would find nothing before the
        next version."""
        while True:
            await asyncio.sleep(ANNOUNCE_EVERY_S)
            if self._last is not None:
                with contextlib.suppress(
                    ray.exceptions.RayError
                ):  # a version registry that is just starting; one that has a newer version by now
                    await self._registry.announce.remote(self._last)

    async def _announce(self, manifest: Manifest) -> None:
        async def announced() -> None:
            await self._registry.announce.remote(manifest)

        try:
            await asyncio.wait_for(announced(), self._timeout_s)
        except TimeoutError:
            raise RuntimeError(
                f"the version registry did not take version {manifest.version} within"
                f" weights.push_timeout_s = {self._timeout_s:g}"
            ) from None

    async def differing_tensor(self) -> str:
        """Which tensor of the version pushed last differs most between what was published and what
        a replica holds: half a sentence.

        Raises:
            RuntimeError, ray.exceptions.RayError: nothing was pushed yet, or a side does not
                answer.
        """
        if self._last is None:
            raise RuntimeError("no version has been pushed yet")
        answers = await ask_all(self._handle, "fingerprints", timeout_s=FINGERPRINTS_S)
        held = dict(
            answer
            for answer in answers
            if not isinstance(answer, BaseException) and answer[0] != self._holding
        )
        if not held:
            raise RuntimeError(
                f"no replica said what it holds: {answers[0] if answers else 'none is up'}"
            )
        buckets = await asyncio.to_thread(ray.get, list(self._last.buckets))
        published = await asyncio.to_thread(published_fingerprints, self._last, buckets)
        return difference_text(published, held, self._last.tensors[0].dtype)

    async def _still_behind(self) -> Counter[str]:
        """Who was waited for in vain the last time, and has not caught up since."""
        if self._last is None or not self._behind:
            return self._behind
        survey = await self._survey(self._last, ANSWER_S, spare=0)
        return self._behind & Counter(survey.behind) if survey else self._behind

    async def _broadcast(
        self, manifest: Manifest, timeout_s: float, grace_s: float
    ) -> list[BaseException]:
        """Ask every live replica to apply the version; return what went wrong. After the grace the
        answers of half of them are enough."""
        spare = self._behind.total()
        try:
            answers = await ask_all(
                self._handle,
                "apply_version",
                manifest,
                self._holding,
                timeout_s=timeout_s,
                spare=spare,
                grace_s=grace_s,
            )
        except NO_ANSWER as error:
            return [error]
        return [answer for answer in answers if isinstance(answer, BaseException)]

    async def _survey(
        self, manifest: Manifest, grace_s: float, spare: int | None = None
    ) -> Survey | None:
        """Where the live replicas are; the one that is held is left out. None if none is up just
        now: what was known before stays.

        Args:
            grace_s: seconds after which the answers of half of them are enough.
            spare: replicas that are not waited for. Default: as many as stay behind.
        """
        spare = self._behind.total() if spare is None else spare
        try:
            answers = await ask_all(
                self._handle, "status", timeout_s=STATUS_S, spare=spare, grace_s=grace_s
            )
        except NO_ANSWER:
            return None
        live = [
            answer
            for answer in answers
            if not isinstance(answer, BaseException) and answer.replica != self._holding
        ]
        at = {answer.replica: answer.applied for answer in live if _has(answer.weights, manifest)}
        silent = [SILENT for answer in answers if isinstance(answer, TimeoutError)]
        behind = [answer for answer in live if answer.replica not in at]
        return Survey(
            at,
            [*(answer.replica for answer in behind), *silent],
            sum(answer.tokens_generated for answer in behind),
        )


def _has(weights: Any, manifest: Manifest) -> bool:
    return (
        weights is not None
        and (weights.run_id, weights.attempt) == (manifest.run_id, manifest.attempt)
        and weights.version >= manifest.version
    )
