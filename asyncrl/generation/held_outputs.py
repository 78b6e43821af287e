"""vLLM plugin for the engine's process: sends the tokens of unfinished completions less often.

vLLM's engine sends the new token of every completion after every step. With a small model, both
processes spend more time on these messages than on the model. A completion that is returned whole
does not need its tokens early. So the engine holds them for up to `HOLD_S`, or until the completion
ends, and sends them together.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

__all__ = ["HeldOutputs", "hold_outputs", "holding"]

HOLD_S = 0.1
"""Longest time in seconds for which the engine holds a token, apart from the time of a step.
Counters of tokens lag by this."""

Messages: TypeAlias = dict[int, EngineCoreOutputs]
"""Number of a front end → the outputs for it. An engine of asyncrl has one front end."""


class HeldOutputs:
    """The outputs that an engine holds. All are of one weight version."""

    def __init__(self) -> None:
        self._held: dict[int, dict[str, list[EngineCoreOutput]]] = {}
        """Number of a front end → request → its outputs, the oldest first."""
        self._version: str | None = None
        self._since = 0.0
        """When the oldest output came, on the monotonic clock."""

    def add(self, messages: Messages, requests: Mapping[str, Request], now: float) -> Messages:
        """Hold those outputs of a step that may wait. Returns what must be sent: the others, each
        with the held tokens of its request, or everything if the oldest output has waited enough.

        Args:
            messages: of one step, of the weight version that the held outputs have.
            requests: the unfinished requests.
            now: on the monotonic clock.
        """
        due: Messages = {}
        for client, message in messages.items():
            held, now_due = self._held.setdefault(client, {}), []
            self._version = message.weight_version
            for output in message.outputs:
                if _may_wait(output, requests.get(output.request_id)):
                    self._since = self._since or now
                    held.setdefault(output.request_id, []).append(output)
                else:
                    now_due.append(_joined([*held.pop(output.request_id, ()), output]))
            message.outputs = now_due
            waited = self._since and now - self._since >= HOLD_S
            if waited:
                message.outputs = now_due + [_joined(outputs) for outputs in held.values()]
                held.clear()
            if message.outputs or message.finished_requests or not held:
                due[client] = message
        if not any(self._held.values()):
            self._since = 0.0
        return due

    def differs(self, messages: Messages) -> bool:
        """Whether the outputs of a step have another weight version than the held ones."""
        return any(message.weight_version != self._version for message in messages.values())

    def release(self) -> Messages:
        """Everything that is held. Nothing is held afterwards."""
        messages = {
            client: EngineCoreOutputs(
                outputs=[_joined(outputs) for outputs in held.values()],
                weight_version=self._version,
            )
            for client, held in self._held.items()
            if held
        }
        self._held, self._since = {}, 0.0
        return messages


def _may_wait(output: EngineCoreOutput, request: Request | None) -> bool:
    """Whether an output has only tokens and log-probs of an unfinished completion that is returned
    whole. The front end searches for stop strings, so these completions do not wait."""
    if output.finish_reason is not None or request is None or request.sampling_params is None:
        return False
    params = request.sampling_params
    return (
        params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.stop
        and not output.events
        and output.prefill_stats is None
        and output.new_prompt_logprobs_tensors is None
        and output.prompt_token_id_logprobs is None
        and output.new_sampling_mask is None
        and output.routed_experts is None
        and not output.num_nans_in_logits
    )


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
    return LogprobsLists(
        np.concatenate([one.logprob_token_ids for one in found]),
        np.concatenate([one.logprobs for one in found]),
        np.concatenate([one.sampled_token_ranks for one in found]),
    )


_of_engine: WeakKeyDictionary[EngineCoreProc, HeldOutputs] = WeakKeyDictionary()

Step: TypeAlias = "Callable[[EngineCoreProc], tuple[Messages | None, bool]]"


def hold_outputs() -> None:
    """Make the engines of this process hold outputs. A second call has no effect."""
    if getattr(EngineCoreProc.pause_scheduler, "releases_outputs", False):
        return
    EngineCoreProc.step = holding(EngineCoreProc.step)
    EngineCoreProc.step_with_batch_queue = holding(EngineCoreProc.step_with_batch_queue)
    original = EngineCoreProc.pause_scheduler

    @functools.wraps(original)
    def pause_scheduler(self: EngineCoreProc, *arguments: object, **settings: object) -> object:
        # An aborted request ends here, and the counts of a pause need all tokens.
        _send(self, _held(self).release())
        return original(self, *arguments, **settings)

    pause_scheduler.releases_outputs = True  # type: ignore[attr-defined]
    EngineCoreProc.pause_scheduler = pause_scheduler


def holding(original: Step) -> Step:
    """An engine's step that holds outputs."""

    @functools.wraps(original)
    def step(self: EngineCoreProc) -> tuple[Messages | None, bool]:
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
    return _of_engine.setdefault(engine, HeldOutputs())


def _send(engine: EngineCoreProc, messages: Messages) -> None:
    for message in messages.items():
        engine.output_queue.put_nowait(message)
