"""vLLM plugin for the engine's process: sends the tokens of unfinished completions less often.

vLLM's engine sends the new token of every completion after every step. With a small model, both
processes spend more time on these messages than on the model. A completion that is returned whole
does not need its tokens early. So the engine holds them for up to `HOLD_S`, or until the completion
ends, and sends them together.

vLLM loads this module in every process of an engine, so it imports nothing of vLLM at the top.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

from asyncrl.weights.engine import OWNED

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.request import Request

HOLD_S = 0.1
"""Longest time in seconds for which the engine holds a token, apart from the time of a step.
Counters of tokens lag by this. Tokens of an aborted completion that the engine still holds are
never counted."""

Messages: TypeAlias = "dict[int, EngineCoreOutputs]"
"""Index of the front end → the outputs for it. An engine of asyncrl has one front end."""

Step: TypeAlias = "Callable[[EngineCoreProc], tuple[Messages | None, bool]]"


class HeldOutputs:
    """The outputs that an engine holds. All are of one weight version."""

    def __init__(self) -> None:
        from vllm.sampling_params import RequestOutputKind

        self._whole = RequestOutputKind.FINAL_ONLY
        self._held: dict[int, dict[str, list[EngineCoreOutput]]] = {}
        """Index of the front end → request → its outputs, the oldest first."""
        self._version: str | None = None
        self._sent_all = -math.inf
        """When everything was sent last, on the monotonic clock."""

    def add(self, messages: Messages, requests: Mapping[str, Request], now: float) -> Messages:
        """Hold those outputs of a step that may wait. Returns what must be sent: the others, each
        with the held tokens of its request. If everything was sent more than `HOLD_S` ago, nothing
        waits.

        A message whose outputs all wait is not sent. Its statistics are lost, also those that count
        since the step before (prefix cache, speculative decoding).

        Args:
            messages: of one step, of the weight version that the held outputs have.
            requests: the unfinished requests.
            now: on the monotonic clock.
        """
        due: Messages = {}
        waits = now - self._sent_all < HOLD_S
        for client, message in messages.items():
            self._version = message.weight_version
            held = self._of_live(client, message, requests)
            send = []
            for output in message.outputs:
                if waits and self._may_wait(output, requests.get(output.request_id)):
                    held.setdefault(output.request_id, []).append(output)
                else:
                    send.append(_joined([*held.pop(output.request_id, ()), output]))
            if not waits:
                send += [_joined(outputs) for outputs in held.values()]
                held.clear()
            message.outputs = send
            if send or message.finished_requests or not held:
                due[client] = message
        if not waits:
            self._sent_all = now
        return due

    def _of_live(
        self, client: int, message: EngineCoreOutputs, requests: Mapping[str, Request]
    ) -> dict[str, list[EngineCoreOutput]]:
        """What is held for this front end, without requests that were aborted."""
        ending = {output.request_id for output in message.outputs}
        self._held[client] = {
            name: outputs
            for name, outputs in self._held.get(client, {}).items()
            if name in requests or name in ending
        }
        return self._held[client]

    def _may_wait(self, output: EngineCoreOutput, request: Request | None) -> bool:
        """Whether an output has only tokens and log-probs of an unfinished completion that is
        returned whole. The front end searches for stop strings, so these do not wait."""
        if output.finish_reason is not None or request is None or request.sampling_params is None:
            return False
        params = request.sampling_params
        return (
            params.output_kind == self._whole
            and not params.stop
            and not output.events
            and output.prefill_stats is None
            and output.new_prompt_logprobs_tensors is None
            and output.prompt_token_id_logprobs is None
            and output.new_sampling_mask is None
            and output.routed_experts is None
            and not output.num_nans_in_logits
        )

    def differs(self, messages: Messages) -> bool:
        """Whether the outputs of a step have another weight version than the held ones."""
        return any(message.weight_version != self._version for message in messages.values())

    def release(self) -> Messages:
        """Everything that is held. Nothing is held afterwards, and the next step does not wait."""
        from vllm.v1.engine import EngineCoreOutputs

        messages = {
            client: EngineCoreOutputs(
                outputs=[_joined(outputs) for outputs in held.values()],
                weight_version=self._version,
            )
            for client, held in self._held.items()
            if held
        }
        self._held, self._sent_all = {}, -math.inf
        return messages


def _joined(outputs: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """One output with the tokens of all. The other fields are those of the last one: the others
    have none."""
    last = outputs[-1]
    if len(outputs) > 1:
        last.new_token_ids = [token for one in outputs for token in one.new_token_ids]
        found = [one.new_logprobs for one in outputs if one.new_logprobs is not None]
        last.new_logprobs = _joined_logprobs(found) if found else None
    return last


def _joined_logprobs(found: Sequence[LogprobsLists]) -> LogprobsLists:
    """The rows of all. A row has as many columns as the request of the same step that asks for the
    most. Its own come first, so the narrowest rows have them all."""
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    columns = min(one.logprobs.shape[1] for one in found)
    return LogprobsLists(
        np.concatenate([one.logprob_token_ids[:, :columns] for one in found]),
        np.concatenate([one.logprobs[:, :columns] for one in found]),
        np.concatenate([one.sampled_token_ranks for one in found]),
    )


_of_engine: WeakKeyDictionary[EngineCoreProc, HeldOutputs] = WeakKeyDictionary()


def hold_outputs() -> None:
    """Make the engine of this process hold outputs. A second call has no effect, and neither has
    one in a process without an engine, or with one that asyncrl did not start."""
    core = sys.modules.get("vllm.v1.engine.core")
    if core is None or not os.environ.get(OWNED):
        return
    engine = core.EngineCoreProc
    if getattr(engine.pause_scheduler, "releases_outputs", False):
        return
    engine.step = holding(engine.step)
    engine.step_with_batch_queue = holding(engine.step_with_batch_queue)
    original = engine.pause_scheduler

    @functools.wraps(original)
    def pause_scheduler(self: EngineCoreProc, *arguments: object, **settings: object) -> object:
        # The counts of a pause need all tokens. A pause with mode `abort` ends the requests.
        _send(self, _held(self).release())
        return original(self, *arguments, **settings)

    pause_scheduler.releases_outputs = True  # type: ignore[attr-defined]
    engine.pause_scheduler = pause_scheduler


def holding(original: Step) -> Step:
    """An engine's step that holds outputs."""

    @functools.wraps(original)
    def step(self: EngineCoreProc) -> tuple[Messages | None, bool]:
        from vllm.v1.core.sched.interface import PauseState

        messages, executed = original(self)
        if not messages:
            return messages, executed
        held = _held(self)
        paused = self.scheduler.pause_state != PauseState.UNPAUSED
        if paused or held.differs(messages):
            _send(self, held.release())
        if paused:
            return messages, executed
        requests: Mapping[str, Request] = self.scheduler.requests  # type: ignore[attr-defined]
        return held.add(messages, requests, time.monotonic()), executed

    return step


def _held(engine: EngineCoreProc) -> HeldOutputs:
    if engine not in _of_engine:
        _of_engine[engine] = HeldOutputs()
    return _of_engine[engine]


def _send(engine: EngineCoreProc, messages: Messages) -> None:
    for message in messages.items():
        engine.output_queue.put_nowait(message)
