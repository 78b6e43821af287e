"""Pushes a version to all replicas: announces it to the version registry, then broadcasts it until
enough replicas have applied it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field

import ray
from ray.serve.exceptions import DeploymentUnavailableError

from asyncrl.contracts.errors import GpuMemoryError
from asyncrl.contracts.messages import Manifest, PushReport, WeightsId
from asyncrl.runtime.ray.objects import Actor
from asyncrl.runtime.ray.serve_calls import Handle, ask_all
from asyncrl.weights.fingerprint import difference_text, published_fingerprints
from asyncrl.weights.manifest import ManifestError

STATUS_S = 10.0
"""Seconds to wait for a replica's status."""

SILENT = "a replica that does not answer"
"""Placeholder for the unknown id of a replica that has not sent its status."""

NO_ANSWER = (TimeoutError, ray.exceptions.RayError, DeploymentUnavailableError)
"""Errors of a broadcast when Serve does not list the replicas, or none is running (the only one
died and its successor is still loading)."""

ROUND_S = 15.0
"""Seconds of one broadcast before the replicas' statuses are requested."""

FINGERPRINTS_S = 120.0
"""Seconds to wait for the fingerprints of the replicas' weights."""

ANSWER_S = 1.0
"""Seconds to wait for the status of a replica that a push does not depend on, and for one that need
not wake with the others."""

BETWEEN_ROUNDS_S = 0.2
"""Seconds between two rounds."""

ANNOUNCE_EVERY_S = 10.0
"""Seconds between repeated announcements of the newest version to the version registry."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Which live replicas have a version."""

    at: dict[str, dict[str, float]] = field(default_factory=dict)
    """Replicas at the version or above, with the timings of their last update."""
    behind: list[str] = field(default_factory=list)
    """Ids of the replicas below the version, and `SILENT` for each that does not answer."""
    tokens: int = 0
    """Tokens that the replicas below the version have generated."""

    @property
    def live(self) -> int:
        return len(self.at) + len(self.behind)

    def commits(self, known: Counter[str], graced: bool) -> bool:
        """Whether the version is committed: at least half of the live replicas have it, and the
        push need not wait for the others. Until the grace period ends, it waits for all but those
        `known` to be behind."""
        return (
            bool(self.at)
            and 2 * len(self.at) >= self.live
            and (graced or Counter(self.behind) <= known)
        )


class ServeWeightSync:
    """`WeightSync` over a Serve handle and the job's version registry."""

    def __init__(
        self,
        handle: Handle,
        registry: Actor,
        push_timeout_s: float,
        commit_grace_s: float = 60.0,
        drains: bool = False,
    ) -> None:
        """
        Args:
            push_timeout_s, commit_grace_s: as in `WeightsConfig`.
            drains: replicas finish their current generations before they apply a version. The
                timeout restarts whenever they have generated tokens.
        """
        self._handle = handle
        self._registry = registry
        self._timeout_s, self._grace_s, self._drains = push_timeout_s, commit_grace_s, drains
        self._last: Manifest | None = None
        self._learner_shift: bool | None = None
        self._learner_on_device = False
        self._behind: Counter[str] = Counter()
        """Replicas that did not apply the last push in time, `SILENT` for each that did not answer.
        The next push does not wait for them."""
        self._holding: str | None = None
        """The replica that keeps its version for an evaluation. Every push repeats it, so a replica
        that missed `release` is still released."""

    async def push(self, manifest: Manifest) -> PushReport:
        """Return when every live replica has applied the version, or, after `commit_grace_s`, when
        at least half of them have.

        The push does not wait for a held replica. It also skips replicas that did not apply the
        last push in time and have not caught up since. Replicas that start during the push get the
        version from the version registry, and count once they answer.

        Raises:
            RuntimeError: fewer than half applied it in time, or the manifest does not fit the
                model.
        """
        await self._tell_device(False)
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
                if isinstance(error, (ManifestError, GpuMemoryError)):
                    raise RuntimeError(
                        f"version {manifest.version} was refused: {_cause(error)}"
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
        """Let one replica keep the version that was pushed last, until `release`. Returns its id.
        None if fewer than two replicas have the version, or Serve does not answer."""
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
        """Let the replica take the newest version and count again. The replica may have died. If
        it misses this call, the next push releases it."""
        if self._holding == replica:
            self._holding = None
        with contextlib.suppress(*NO_ANSWER):
            await ask_all(self._handle, "release", replica, timeout_s=STATUS_S)

    async def rest(self) -> None:
        """Make every live replica rest. One that starts before `wake` rests within seconds.

        Then the learner takes the device, until the next `push` or `wake`. A replica whose rest
        frees its GPU does not start meanwhile. It does start during a rest, a push and a wake,
        which need a living replica.

        Raises:
            RuntimeError: a replica did not rest within weights.push_timeout_s.
        """
        await self._change_shift(True)
        await self._tell_device(True)

    async def wake(self) -> None:
        """End the replicas' rest.

        Raises:
            RuntimeError: a replica did not wake within weights.push_timeout_s.
        """
        await self._tell_device(False)
        await self._change_shift(False)

    async def _change_shift(self, learner: bool) -> None:
        """Make every live replica follow the version registry's shift. At a wake, half of them are
        enough: the others wake by themselves. A replica that has died counts no longer once Serve
        has noticed. Its successor asks the version registry."""
        self._learner_shift = learner
        deadline, reason = time.monotonic() + self._timeout_s, "no replica answered"
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(self._tell_shift(), remaining)
                answers = await ask_all(
                    self._handle,
                    "apply_shift",
                    timeout_s=min(ROUND_S, remaining),
                    grace_s=None if learner else ANSWER_S,
                )
            except NO_ANSWER as error:
                answers = [error]
            errors = [answer for answer in answers if isinstance(answer, BaseException)]
            for full in [error for error in errors if isinstance(error, GpuMemoryError)]:
                raise RuntimeError(_cause(full)) from full
            followed = sum(rests is learner for rests in answers)
            needed = len(answers) if learner else (len(answers) + 1) // 2
            if followed >= max(1, needed):
                return
            if errors:
                reason = f"{type(errors[0]).__name__}: {errors[0]}".splitlines()[0]
            await asyncio.sleep(BETWEEN_ROUNDS_S)
        verb = "rest" if learner else "wake"
        raise RuntimeError(
            f"the generators did not all {verb} within weights.push_timeout_s ="
            f" {self._timeout_s:g}: {reason}"
        )

    async def _tell_shift(self) -> None:
        await self._registry.set_learner_shift.remote(self._learner_shift)

    async def _tell_device(self, learner: bool) -> None:
        """Tell the version registry whether the learner takes the device. A registry that does not
        answer is told again by `keep_announced`."""
        if self._learner_on_device == learner:
            return
        self._learner_on_device = learner

        async def told() -> None:
            await self._registry.set_learner_on_device.remote(learner)

        with contextlib.suppress(*NO_ANSWER):
            await asyncio.wait_for(told(), ANSWER_S)

    async def keep_announced(self) -> None:
        """Announce the newest version to the version registry repeatedly, until canceled.

        A version registry whose process died is restarted empty. Without this, a replica that
        starts then would find no version until the next push.
        """
        while True:
            await asyncio.sleep(ANNOUNCE_EVERY_S)
            # The version registry may be starting, or have a newer version by now.
            with contextlib.suppress(ray.exceptions.RayError):
                await self._registry.set_learner_on_device.remote(self._learner_on_device)
                if self._learner_shift is not None:
                    await self._tell_shift()
                if self._last is not None:
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
        """A clause that names the tensor of the last pushed version that differs most between the
        published weights and a replica's weights.

        Raises:
            RuntimeError: no version was pushed yet, or no replica answers.
            ray.exceptions.RayError: the published buckets are lost.
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
                "no replica sent the fingerprints of its weights:"
                f" {answers[0] if answers else 'no replica is running'}"
            )
        buckets = await asyncio.to_thread(ray.get, list(self._last.buckets))
        published = await asyncio.to_thread(published_fingerprints, self._last, buckets)
        return difference_text(published, held, self._last.tensors[0].dtype)

    async def _still_behind(self) -> Counter[str]:
        """The replicas that did not apply the last push in time and have not caught up since."""
        if self._last is None or not self._behind:
            return self._behind
        survey = await self._survey(self._last, ANSWER_S, spare=0)
        return self._behind & Counter(survey.behind) if survey else self._behind

    async def _broadcast(
        self, manifest: Manifest, timeout_s: float, grace_s: float
    ) -> list[BaseException]:
        """Ask every live replica to apply the version. Returns the errors. After the grace period,
        the answers of half of them are enough."""
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
        """Find out which live replicas have the version, except a held replica. None if no
        replica is running: the caller then keeps the previous survey.

        Args:
            grace_s: seconds after which the answers of half of them are enough.
            spare: number of replicas not to wait for. Default: as many as are known to be behind.
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


def _cause(error: BaseException) -> str:
    """The line of a replica's error, without the stack that Ray's adds."""
    return str(getattr(error, "cause", error))


def _has(weights: WeightsId | None, manifest: Manifest) -> bool:
    return (
        weights is not None
        and (weights.run_id, weights.attempt) == (manifest.run_id, manifest.attempt)
        and weights.version >= manifest.version
    )
