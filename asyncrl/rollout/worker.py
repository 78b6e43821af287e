"""A rollout worker: it makes groups through a generator, and keeps each until its scored row is
safe."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from asyncrl.config import completion_room
from asyncrl.contracts.errors import GenerationTimeoutError, RolloutFailedError, StaleReplicaError
from asyncrl.contracts.group_table import groups_to_table, table_to_ipc
from asyncrl.contracts.messages import (
    EngineLoad,
    Finished,
    Generated,
    GenerateRequest,
    WeightsId,
)
from asyncrl.contracts.rows import Baseline, Group, Prompt, Trajectory
from asyncrl.contracts.text_listener import Heard
from asyncrl.rollout.outbox import Outbox
from asyncrl.rollout.spec import SessionsSpec, WorkerSpec
from asyncrl.runtime.clock import steady_time
from asyncrl.runtime.failures import unforeseen
from asyncrl.runtime.ray.many_calls import Calls
from asyncrl.runtime.ray.objects import DEATHS

if TYPE_CHECKING:
    from asyncrl.rollout.session_groups import Played, Sessions
    from asyncrl.sessions.session import TurnRequest

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
RETRIED = (StaleReplicaError, *DEATHS, ConnectionError)
"""Errors after which a request is tried again: its replica is behind, has died or restarts."""


def rollout_seed(seed: int, ordinal: int) -> int:
    """Sampling seed of a group, the same in every process and attempt. It is below 2**48, so that
    the engine can add a trajectory's index."""
    return int.from_bytes(
        hashlib.blake2b(f"{seed}:{ordinal}".encode(), digest_size=6).digest(), "big"
    )


class RolloutWorker:
    """A plain asyncio class, which `asyncrl.rollout.driver` runs as a Ray actor. All groups of one
    worker share its event loop."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec, self._run_id, self._attempt = spec, spec.run_id, spec.attempt
        self._generate = spec.generate()
        self._committed = 0
        self._outbox: Outbox[pa.Table] = Outbox()
        self._under_way = 0
        self._calls: Calls[int, Finished] = Calls()
        self._sessions: Sessions | None = None

    async def ready(self) -> None:
        """Return once the worker can make groups.

        Raises:
            EnvironmentFailedError: the environment cannot be imported.
        """
        if self._spec.sessions is not None:
            await self._playing(self._spec.sessions).start()

    async def begin(self, prompts: Sequence[Prompt], committed: int) -> None:
        """Start to make the groups of these prompts. `ended` returns what becomes of them."""
        for prompt in prompts:
            self._calls.start(prompt.ordinal, partial(self.rollout, prompt, committed))

    async def ended(self, life: str = "", received: int = 0) -> tuple[str, int, object]:
        """Wait for groups that are finished or have failed. See `Calls.ended`. The caller learns of
        this process's death from the call's error."""
        return await self._calls.ended(life, received)

    async def give_up(self, ordinals: Sequence[int]) -> None:
        """Stop making these groups, and abort the generator's requests."""
        self._calls.cancel(ordinals)

    async def committed(self, version: int) -> None:
        self._committed = max(self._committed, version)

    async def rollout(self, prompt: Prompt, committed: int) -> Finished:
        """Make the group of one prompt and keep it for scoring.

        Raises:
            RolloutFailedError: not done within rollout.deadline_s, including retries, or an
                unexpected exception, whose stack the message contains.
        """
        await self.committed(committed)
        self._under_way += 1
        admitted_at = steady_time()
        try:
            group, table, load = await self._make(prompt, admitted_at)
            await self._outbox.put(prompt.ordinal, table)
        except RolloutFailedError:
            raise
        # Every other error of an engine, a replica or Ray fails only this group.
        except Exception as error:
            raise RolloutFailedError(unforeseen(f"group {prompt.ordinal}", error)) from None
        finally:
            self._under_way -= 1
        tokens = sum(len(t.completion.token_ids) for t in group.trajectories)
        baseline = group.baseline
        return Finished(
            prompt.ordinal,
            committed if group.oldest_version is None else group.oldest_version,
            tokens,
            load,
            baseline_tokens=0 if baseline is None else len(baseline.completion.token_ids),
        )

    async def take(self, reader: str, most: int, wait_s: float) -> pa.Buffer | None:
        """Up to `most` finished groups as one table (an IPC stream), one row each; None if none
        finishes within `wait_s` seconds. Raises OutboxClosedError.
        """
        tables = await self._outbox.take(reader, most, wait_s)
        if not tables:
            return None
        # In one chunk: each further chunk costs as many bytes as a short group.
        return table_to_ipc(pa.concat_tables(tables, promote_options="permissive").combine_chunks())

    async def has_reader(self) -> bool:
        """Whether the scoring stream has asked for groups yet."""
        return self._outbox.has_reader

    async def ack(self, ordinals: Sequence[int]) -> None:
        await self._outbox.ack(ordinals)

    async def unacknowledged(self) -> int:
        return len(self._outbox)

    async def under_way(self) -> int:
        """The number of groups that are being generated."""
        return self._under_way

    async def close_outbox(self) -> None:
        """End the takes, and with them the scoring reader."""
        await self._outbox.close()

    async def end_sessions(self) -> None:
        """See `EnvironmentPool.end_sessions`."""
        if self._sessions is not None:
            await self._sessions.end_sessions()

    async def close(self) -> None:
        """End the environment processes. They also end with this process."""
        if self._sessions is not None:
            await self._sessions.close()

    async def _make(
        self, prompt: Prompt, admitted_at: float
    ) -> tuple[Group, pa.Table, EngineLoad | None]:
        """A group, its one-row table, and the load of an engine that generated it."""
        ends = time.monotonic() + self._spec.deadline_s
        if self._spec.sessions is None:
            generated = await self._generate_until(
                ends, prompt.ordinal, lambda left_s: self._request(prompt, left_s)
            )
            group = replace(self._group(prompt, generated), admitted_at=admitted_at)
            return group, groups_to_table([group]), generated.load
        played = await self._playing(self._spec.sessions).play_all(
            prompt,
            range(self._spec.rollout.n_samples_per_prompt),
            lambda turn, seed, session, heard: self._generate_until(
                ends,
                prompt.ordinal,
                lambda left_s: self._turn_request(turn, seed, session, left_s),
                heard,
            ),
        )
        from asyncrl.rollout.session_groups import session_table

        group = replace(self._group_of_sessions(prompt, played), admitted_at=admitted_at)
        return group, session_table(group, played), played[-1].load

    def _playing(self, spec: SessionsSpec) -> Sessions:
        """Imported and made at the first use: it needs a tokenizer."""
        if self._sessions is None:
            from asyncrl.rollout.session_groups import Sessions

            self._sessions = Sessions(spec, self._spec.seed)
        return self._sessions

    async def _generate_until(
        self,
        ends: float,
        ordinal: int,
        request: Callable[[float], GenerateRequest],
        heard: Heard | None = None,
    ) -> Generated:
        """What a request generates. It is sent again, until the group's deadline, if its replica is
        behind or has died.

        Args:
            ends: the group's deadline, by `time.monotonic`.
            request: takes the seconds until then.
            heard: see `Generate.generate`. A request whose text has been heard is not sent again.
        """
        spoken = False

        def hear(index: int, text: str) -> None:
            nonlocal spoken
            spoken = True
            assert heard is not None
            heard(index, text)

        pause, reason = FIRST_PAUSE_S, "no answer"
        try:
            async with asyncio.timeout(max(0.0, ends - time.monotonic())):
                while True:
                    try:
                        asked = request(ends - time.monotonic())
                        if heard is None:
                            return await self._generate.generate(asked)
                        return await self._generate.generate(asked, hear)
                    except RETRIED as error:
                        if spoken:
                            raise RolloutFailedError(
                                f"a turn of group {ordinal} broke off after a part of its text:"
                                f" {type(error).__name__}: {_last_line(error)}"
                            ) from error
                        reason = f"{type(error).__name__}: {_last_line(error)}"
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)
        except (TimeoutError, GenerationTimeoutError):
            raise RolloutFailedError(
                f"group {ordinal} was not generated within rollout.deadline_s ="
                f" {self._spec.deadline_s:g} s (last: {reason}); raise that if completions take"
                " longer"
            ) from None

    def _request(self, prompt: Prompt, remaining_s: float) -> GenerateRequest:
        rollout = self._spec.rollout
        return GenerateRequest(
            prompt_ids=prompt.token_ids,
            n=rollout.n_samples_per_prompt,
            max_tokens=completion_room(
                rollout.max_completion_length, self._spec.data.max_length, len(prompt.token_ids)
            ),
            temperature=rollout.temperature,
            seed=rollout_seed(self._spec.seed, prompt.ordinal),
            deadline_s=max(remaining_s, 0.001),
            min_weights=WeightsId(self._run_id, self._attempt, self._committed),
            ignore_eos=rollout.ignore_eos,
            repetition=rollout.repetition,
            baseline=self._spec.needs_baseline,
            **rollout.kept_tokens,
        )

    def _turn_request(
        self, turn: TurnRequest, seed: int, session: str, remaining_s: float
    ) -> GenerateRequest:
        rollout = self._spec.rollout
        least = max(self._committed, turn.min_version or 0)
        return GenerateRequest(
            prompt_ids=tuple(turn.prompt_ids),
            n=turn.n,
            max_tokens=min(turn.max_tokens, rollout.max_completion_length),
            temperature=rollout.temperature,
            seed=seed,
            deadline_s=max(remaining_s, 0.001),
            min_weights=WeightsId(self._run_id, self._attempt, least),
            ignore_eos=rollout.ignore_eos,
            repetition=rollout.repetition,
            stop=turn.stop,
            schema=turn.schema_text,
            session=session,
            **rollout.kept_tokens,
        )

    def _group_of_sessions(self, prompt: Prompt, played: Sequence[Played]) -> Group:
        turns = [node for one in played for node in one.session.nodes if node.sampled]
        now = steady_time()
        return Group(
            self._attempt,
            prompt,
            tuple(one.trajectory() for one in played),
            turns[-1].replica if turns else "",
            min((turn.started_at for turn in turns), default=now),
            max((turn.finished_at for turn in turns), default=now),
        )

    def _group(self, prompt: Prompt, generated: Generated) -> Group:
        wanted = self._spec.rollout.n_samples_per_prompt
        if len(generated.completions) != wanted:
            raise RuntimeError(
                f"replica {generated.replica} returned {len(generated.completions)} completions for"
                f" group {prompt.ordinal}, not {wanted}"
            )
        if self._spec.needs_baseline and generated.baseline is None:
            raise RuntimeError(
                f"replica {generated.replica} returned no greedy completion for group"
                f" {prompt.ordinal}, which algorithm.advantage: remax needs"
            )
        trajectories = tuple(
            Trajectory(completion, (1,) * len(completion.token_ids))
            for completion in generated.completions
        )
        return Group(
            self._attempt,
            prompt,
            trajectories,
            generated.replica,
            generated.started_at,
            generated.finished_at,
            baseline=None if generated.baseline is None else Baseline(generated.baseline),
            generated=generated.times,
        )


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
