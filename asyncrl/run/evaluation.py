"""Evaluation: completes sets of held-out prompts at one committed version, scores them in the
isolated reward processes, and keeps them as Parquet."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from asyncrl.algorithms.pass_at_k import pass_at_k
from asyncrl.config import Config, EvalSet
from asyncrl.config.schema import Source
from asyncrl.contracts.errors import EvaluationLostError, GenerationTimeoutError, StaleReplicaError
from asyncrl.contracts.group_table import reward_parts_type
from asyncrl.contracts.messages import Generated, GenerateRequest, WeightsId
from asyncrl.contracts.protocols import Generate
from asyncrl.contracts.rows import ANSWER_COLUMNS, TRUNCATED, Completion, Prompt, VersionSpan
from asyncrl.contracts.text_listener import Heard
from asyncrl.rewards.contract import RewardError, ScoredSession
from asyncrl.runtime.all_or_nothing import all_or_nothing
from asyncrl.runtime.failure_reasons import reason_key
from asyncrl.runtime.files import parquet
from asyncrl.runtime.files.opening import make_directory
from asyncrl.runtime.functions import short

if TYPE_CHECKING:
    from asyncrl.rollout.session_groups import Sessions
    from asyncrl.sessions.session import TurnRequest

logger = logging.getLogger("asyncrl")


Score = Callable[..., Awaitable[Mapping[str, Sequence[float | None]]]]
"""Scores completions of one prompt, and with an environment their sessions: reward function → the
raw reward of each completion."""

FAILED = ("env_error", "agent_error", "reward_error")
"""Ends of sessions without a reward."""
AT_A_LIMIT = ("length", "turns", "deadline")
"""Ends of sessions that count as 0 in an evaluation, if they have no reward."""
SEEDS = 1 << 48
"""Number of sampling seeds."""
STATUSES = ("ok", "unscored", "late", "failed")
"""`ok`: the reward named by `eval.accuracy` scored it. `unscored`: that reward returned None.
`late`: no answer within rollout.deadline_s. `failed`: the request failed otherwise."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one completion request."""

    completion: Completion | None
    """The completion. None if it was late or failed."""
    status: str
    """One of STATUSES."""
    reason: str = ""
    """Why the completion is missing."""
    replica: str | None = None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """Reward function → its reward, or None if it returned None."""
    session: ScoredSession | None = None
    """None without an environment."""

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """The versions that sampled the completion."""
        return () if self.completion is None else self.completion.versions


@dataclass(frozen=True, slots=True)
class _Target:
    """What answers an evaluation."""

    version: int
    replica: str | None
    """The one replica that is held at the version. None: all replicas answer."""


class Evaluator:
    """Completes every prompt of every set, n times each. A late or failed completion is counted and
    reported, and does not end the evaluation."""

    def __init__(
        self,
        config: Config,
        generate: Generate,
        score: Score,
        prompts: Mapping[str | tuple[Source, ...], Sequence[Prompt]],
        run_id: str,
        attempt: int,
        directory: Path,
        sessions: Sessions | None = None,
    ) -> None:
        """
        Args:
            prompts: data file of a set in `config.evaluation_sets` → its prompts.
            directory: where the completions are kept.
            sessions: plays sessions instead of single completions.
        """
        self.sessions = sessions
        self.config, self.generate, self.score = config, generate, score
        self.prompts, self.run_id, self.attempt, self.directory = (
            prompts,
            run_id,
            attempt,
            directory,
        )
        self.errors = 0
        """Unexpected exceptions of the current evaluation."""

    async def __call__(self, version: int, replica: str | None = None) -> dict[str, float]:
        """Evaluate a version.

        Args:
            replica: the replica that is held at the version. None: all replicas, which stay at the
                version or, with `eval.in_flight`, continue to newer ones.

        Returns:
            Metrics of each set as `eval/<set>_<name>` (see `measure`), and `eval/accuracy` and
            `eval/prompts` of the first set. Over all sets: `eval/failed_ratio` (late ones
            included), `eval/errors` (unexpected exceptions), `eval/newest_version` of the tokens,
            and `eval/seconds`.

        Raises:
            EvaluationLostError: the replica is gone. Nothing of the current set is kept.
            RewardError: a reward failed under policy `fail`.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        self.errors = 0
        sets = self.config.evaluation_sets
        metrics: dict[str, float] = {}
        statuses: Counter[str] = Counter()
        newest = version
        for name, settings in sets.items():
            answers = await self._answers(settings, _Target(version, replica))
            found = measure(answers, self.config.accuracy, self.config.eval.pass_threshold)
            metrics.setdefault("eval/accuracy", found["accuracy"])
            metrics.setdefault("eval/prompts", found["prompts"])
            metrics |= {f"eval/{name}_{key}": value for key, value in found.items()}
            statuses.update(answer.status for siblings in answers for answer in siblings)
            newest = max(
                [
                    newest,
                    *(
                        span.version
                        for siblings in answers
                        for answer in siblings
                        for span in answer.spans
                    ),
                ]
            )
            await asyncio.to_thread(self._keep, name, settings, version, answers)
        metrics["eval/failed_ratio"] = (statuses["late"] + statuses["failed"]) / statuses.total()
        metrics["eval/errors"] = float(self.errors)
        metrics["eval/newest_version"] = float(newest)
        metrics["eval/seconds"] = clock() - started
        return metrics

    def _prompts(self, settings: EvalSet) -> Sequence[Prompt]:
        assert settings.data is not None
        return self.prompts[settings.data][: settings.max_prompts]

    async def _answers(self, settings: EvalSet, target: _Target) -> list[list[Answer]]:
        """The n answers of each prompt, in order. As many requests are in flight as the engines
        that answer can run at once."""
        generator = self.config.engines
        room = asyncio.Semaphore(
            self.config.max_num_seqs * (generator.num_replicas if target.replica is None else 1)
        )
        prompts = self._prompts(settings)
        seeds = [
            [self.config.seed + index + sample * len(prompts) for sample in range(settings.n)]
            for index in range(len(prompts))
        ]
        return await all_or_nothing(
            self._siblings(settings, target, prompt, prompt_seeds, room)
            for prompt, prompt_seeds in zip(prompts, seeds, strict=True)
        )

    async def _siblings(
        self,
        settings: EvalSet,
        target: _Target,
        prompt: Prompt,
        seeds: Sequence[int],
        room: asyncio.Semaphore,
    ) -> list[Answer]:
        """One answer per seed; the answers are scored together, as a group is."""
        requests = [self._request(settings, target, prompt, seed) for seed in seeds]
        answers = await all_or_nothing(
            self._answer(request, target.version, room)
            if self.sessions is None
            else self._play(self.sessions, prompt, sample, request, target.version, room)
            for sample, request in enumerate(requests)
        )
        completed = [
            (index, answer.completion, answer.session)
            for index, answer in enumerate(answers)
            if answer.completion is not None
        ]
        if completed:
            sessions = [session for *_, session in completed if session is not None]
            parts = await self._parts(
                prompt, [completion for _, completion, _ in completed], sessions
            )
            for at, (index, *_) in enumerate(completed):
                answers[index] = self._scored(
                    answers[index], {name: values[at] for name, values in parts.items()}
                )
        return answers

    async def _parts(
        self, prompt: Prompt, completions: Sequence[Completion], sessions: Sequence[ScoredSession]
    ) -> Mapping[str, Sequence[float | None]]:
        """The rewards of one prompt's completions; all None after an unexpected error."""
        try:
            return await self.score(prompt, completions, *([sessions] if sessions else []))
        except RewardError:
            raise
        except Exception as error:
            self._count_error("the completions of a prompt could not be scored", error)
            return {name: [None] * len(completions) for name in self.config.reward.functions}

    def _count_error(self, what: str, error: Exception) -> None:
        self.errors += 1
        if self.errors == 1:
            logger.error("%s", what, exc_info=error)

    def _request(
        self, settings: EvalSet, target: _Target, prompt: Prompt, seed: int
    ) -> GenerateRequest:
        """The request for one completion, which ends in the same ways as in rollouts."""
        config, rollout = self.config, self.config.rollout
        assert (
            settings.temperature is not None
            and settings.top_p is not None
            and settings.top_k is not None
            and settings.min_p is not None
        )
        return GenerateRequest(
            prompt.token_ids,
            n=1,
            max_tokens=settings.max_completion_length
            or config.completion_room(len(prompt.token_ids)),
            temperature=settings.temperature,
            seed=seed,
            deadline_s=config.evaluation_deadline_s(settings.max_completion_length),
            min_weights=WeightsId(self.run_id, self.attempt, target.version),
            ignore_eos=rollout.ignore_eos,
            repetition=rollout.repetition,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            replica=target.replica,
        )

    async def _answer(
        self, request: GenerateRequest, version: int, room: asyncio.Semaphore
    ) -> Answer:
        try:
            async with room:
                generated = await self.generate.generate(request)
        # An error of an engine, a replica or Ray costs one completion, not the evaluation.
        except Exception as error:
            return self._lost(error, request)
        return self._kept(generated.completions[0], generated.replica, version)

    async def _play(
        self,
        sessions: Sessions,
        prompt: Prompt,
        sample: int,
        request: GenerateRequest,
        version: int,
        room: asyncio.Semaphore,
    ) -> Answer:
        """One session. Each of its turns has a request like this one."""
        errors: list[Exception] = []
        replicas: list[str] = []

        async def generate(
            turn: TurnRequest, seed: int, session: str, heard: Heard | None
        ) -> Generated:
            assert request.min_weights is not None
            newest = turn.min_version if request.replica is None else None
            least = max(request.min_weights.version, newest or 0)
            try:
                asked = replace(
                    request,
                    prompt_ids=tuple(turn.prompt_ids),
                    n=turn.n,
                    max_tokens=min(request.max_tokens, turn.max_tokens),
                    # Other seeds than those of rollouts.
                    seed=((request.seed or 0) + seed) % SEEDS,
                    min_weights=replace(request.min_weights, version=least),
                    session=session,
                    stop=turn.stop,
                    schema=turn.schema_text,
                )
                generated = await (
                    self.generate.generate(asked)
                    if heard is None
                    else self.generate.generate(asked, heard)
                )
            except Exception as error:
                errors.append(error)
                raise
            replicas.append(generated.replica)
            return generated

        try:
            async with room:
                played = await sessions.play(prompt, sample, generate)
        except Exception as error:
            return self._lost(errors[-1] if errors else error, request)
        ended = played.ended
        answer = self._kept(played.trajectory().completion, (replicas or [""])[-1], version)
        session = ScoredSession(
            played.session.chat_so_far, ended.end, ended.reward, ended.parts, ended.output
        )
        reason = "" if ended.end == "done" else f"{ended.end}: {ended.note}"
        return replace(answer, session=session, reason=answer.reason or reason)

    def _lost(self, error: Exception, request: GenerateRequest) -> Answer:
        """The answer to a request that failed."""
        if isinstance(error, GenerationTimeoutError):
            return Answer(None, "late", _one_line(error))
        if request.replica is not None and isinstance(error, StaleReplicaError):
            raise EvaluationLostError(_one_line(error)) from None
        # Imported here because it imports Ray, which readers of evaluations do not need.
        from asyncrl.rollout.worker import RETRIED

        if not isinstance(error, RETRIED):
            self._count_error("a completion of an evaluation failed", error)
        return Answer(None, "failed", f"{type(error).__name__}: {_one_line(error)}")

    def _kept(self, completion: Completion, replica: str, version: int) -> Answer:
        """The answer of a completion, unless other versions made it."""
        if not self.config.eval.in_flight and any(
            span.version != version for span in completion.versions
        ):
            return Answer(
                None,
                "failed",
                f"made by versions {[span.version for span in completion.versions]}, not only by"
                f" {version}",
                replica,
            )
        return Answer(completion, "ok", replica=replica)

    def _scored(self, answer: Answer, parts: Mapping[str, float | None]) -> Answer:
        if answer.session is not None and answer.session.end in AT_A_LIMIT:
            # It did not finish. Left out, it would make the accuracy too high.
            parts = {**parts, self.config.accuracy: parts[self.config.accuracy] or 0.0}
        status = "unscored" if parts[self.config.accuracy] is None else "ok"
        return replace(answer, status=status, parts=parts)

    def _keep(
        self, name: str, settings: EvalSet, version: int, answers: Sequence[Sequence[Answer]]
    ) -> None:
        """Write the completions, and log how many were lost and the most frequent reason."""
        if why := lost_text(answers):
            logger.warning("evaluation set %s at version %d: %s", name, version, why)
        make_directory(self.directory)
        weights = {
            reward: function.weight for reward, function in self.config.reward.functions.items()
        }
        table = answers_table(
            name,
            self.attempt,
            version,
            self._prompts(settings),
            answers,
            weights,
            self.config.accuracy,
        )
        parquet.write_table(
            table,
            self.directory / f"attempt_{self.attempt:04d}-version_{version:08d}-{name}.parquet",
        )


def lost_text(answers: Sequence[Sequence[Answer]]) -> str:
    """How many completions were late or failed, with the most frequent reason; "" if none did.
    With an environment, sessions that failed are counted too."""
    lost = [
        answer.reason
        for siblings in answers
        for answer in siblings
        if answer.completion is None
        or (answer.session is not None and answer.session.end in FAILED)
    ]
    if not lost:
        return ""
    key, times = Counter(map(reason_key, lost)).most_common(1)[0]
    reason = next(reason for reason in lost if reason_key(reason) == key)
    return f"{len(lost)} completions were late or failed, most often ({times} times): {reason}"


def measure(
    answers: Sequence[Sequence[Answer]], accuracy: str, pass_threshold: float
) -> dict[str, float]:
    """The metrics of one evaluation set, from n answers to each of its prompts.

    Returns:
        prompts: number of prompts.
        accuracy: mean of the reward named `accuracy` over the completions that it scored. A late or
            failed completion counts as 0.
        NAME of each reward part: mean over the completions that it scored.
        scored, unscored_ratio, late_ratio, failed_ratio: completions that `accuracy` scored, and
            shares of all requested completions.
        completion_tokens, truncated_ratio: over the completions that arrived.
        avg_at_N, pass_at_K: with n above 1, means over prompts; k = 1, 2, 4, … and n. A completion
            without a score is left out, and so is a prompt with fewer than k of them. A late or
            failed completion does not pass.
        NaN where there is nothing to average.
    """
    requested = [answer for siblings in answers for answer in siblings]
    arrived = [answer for answer in requested if answer.completion is not None]
    statuses = Counter(answer.status for answer in requested)
    judged = [_judged(siblings, accuracy) for siblings in answers]
    found = {
        **{
            name: _mean(
                value for answer in arrived if (value := answer.parts.get(name)) is not None
            )
            for name in _part_names(requested)
        },
        "prompts": float(len(answers)),
        "accuracy": _mean(value for values in judged for value in values),
        "scored": float(statuses["ok"]),
        **{f"{status}_ratio": statuses[status] / len(requested) for status in STATUSES[1:]},
        "completion_tokens": _mean(
            len(answer.completion.token_ids) for answer in arrived if answer.completion
        ),
        "truncated_ratio": _mean(
            answer.completion.finish_reason in TRUNCATED for answer in arrived if answer.completion
        ),
    }
    n = max(len(siblings) for siblings in answers)
    if n > 1:
        found[f"avg_at_{n}"] = _mean(_mean(values) for values in judged if values)
        for k in _ks(n):
            found[f"pass_at_{k}"] = _mean(
                pass_at_k(len(v), sum(value >= pass_threshold for value in v), k)
                for v in judged
                if len(v) >= k
            )
    return found


def _judged(siblings: Sequence[Answer], accuracy: str) -> list[float]:
    """The accuracy of one prompt's completions: 0 for late and failed ones, and without those that
    have no score."""
    values = [0.0 if answer.completion is None else answer.parts[accuracy] for answer in siblings]
    return [value for value in values if value is not None]


def _ks(n: int) -> list[int]:
    """1, 2, 4, … below n, and n."""
    return [*(1 << power for power in range((n - 1).bit_length())), n]


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else math.nan


def answers_table(
    name: str,
    attempt: int,
    version: int,
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[Answer]],
    weights: Mapping[str, float],
    accuracy: str,
) -> pa.Table:
    """The rows of evaluations/*.parquet.

    Args:
        answers: n of each prompt, in order.
        weights: reward function → its weight.
    """
    rows = [
        (prompt, index, answer)
        for prompt, siblings in zip(prompts, answers, strict=True)
        for index, answer in enumerate(siblings)
    ]
    completions = [answer.completion for _, _, answer in rows]
    columns = {
        "set": [name] * len(rows),
        "attempt": [attempt] * len(rows),
        "version": [version] * len(rows),
        "ordinal": [prompt.ordinal for prompt, _, _ in rows],
        "index": [index for _, index, _ in rows],
        "status": [answer.status for _, _, answer in rows],
        "reason": [answer.reason or None for _, _, answer in rows],
        "accuracy": [answer.parts.get(accuracy) for _, _, answer in rows],
        "reward": [_reward(answer, weights) for _, _, answer in rows],
        "prompt_text": [prompt.text for prompt, _, _ in rows],
        "prompt_ids": [prompt.token_ids for prompt, _, _ in rows],
        "completion": [each and each.text for each in completions],
        "completion_ids": [each and each.token_ids for each in completions],
        "logprobs": [each and each.logprobs for each in completions],
        "versions": [
            each and [{"version": s.version, "start": s.start, "end": s.end} for s in each.versions]
            for each in completions
        ],
        "finish_reason": [each and each.finish_reason for each in completions],
        "replica": [answer.replica for _, _, answer in rows],
    }
    arrays = {column: pa.array(columns[column], kind) for column, kind in ANSWER_COLUMNS.items()}
    names = _part_names([answer for _, _, answer in rows]) or list(weights)
    parts = [
        {part: answer.parts.get(part) for part in names} if answer.completion else None
        for _, _, answer in rows
    ]
    arrays["reward_parts"] = pa.array(parts, reward_parts_type(names).value_type)
    return pa.table(arrays)


def _part_names(answers: Iterable[Answer]) -> list[str]:
    return list(dict.fromkeys(name for answer in answers for name in answer.parts))


def _reward(answer: Answer, weights: Mapping[str, float]) -> float | None:
    """The weighted sum of the parts; None if a part with a weight is None."""
    parts = [(weight, answer.parts.get(name)) for name, weight in weights.items() if weight]
    values = [weight * part for weight, part in parts if part is not None]
    return sum(values) if answer.completion is not None and len(values) == len(parts) else None


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return short(lines[-1]) if lines else type(error).__name__
