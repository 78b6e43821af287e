"""Settings that are derived from others by default, and the reason for each value.

This module is pure, except that it reads the sizes of the model files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncrl.config.schema import LOGPROB_BYTES
from asyncrl.config.settings import Settings

SLOWEST_TOKENS_PER_S = 5.0
"""Lowest expected tokens per second of one completion in a full engine. A large model on one GPU
makes 10 to 20."""
SLOWEST_READ = 100 << 20
"""Lowest expected rate at which a replica reads model files, in bytes per second: shared storage
under load."""
SLOWEST_FETCH = 250 << 20
"""Lowest expected rate at which a published version reaches a replica, in bytes per second: 10
Gbit/s, shared by several replicas of a node."""
SLOWEST_APPLY = 1 << 30
"""Lowest expected rate at which an engine copies weights from shared memory, in bytes per second.
"""
MOST_SEQUENCES = {"cpu": 128, "cuda": 1024}
"""Most sequences of an engine. More of them do not raise its tokens per second, and vLLM reserves
logits for all of them."""
FEWEST_SEQUENCES = 64
"""Fewest sequences of an engine: evaluations use what rollouts leave free."""
SHORTEST_DEADLINE_S, SHORTEST_PLACEMENT_S, SHORTEST_START_S = 300.0, 30.0, 600.0
SHORTEST_STALL_S, SHORTEST_PUSH_S = 120.0, 300.0


@dataclass(frozen=True, slots=True)
class Derived:
    """The value of a setting that the user left out."""

    name: str
    value: float
    reason: str
    unit: Literal["s", "sequences", "MiB"] = "s"
    """How the value is shown. One in MiB is in bytes."""

    def text(self) -> str:
        """One line for the user."""
        shown = self.value / (1 << 20) if self.unit == "MiB" else self.value
        return f"{self.name} = {shown:g} {self.unit}: {self.reason}"


def stored_bytes(model: str) -> int:
    """Bytes of the safetensors files in a checkpoint directory; 0 if there are none."""
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))


def sequences(settings: Settings) -> Derived:
    """generator.max_num_seqs."""
    generator, most = settings.engines, MOST_SEQUENCES[settings.engines.device]
    name = "generator.max_num_seqs"
    if not settings.owns_generators:
        return Derived(name, most, f"the most on {generator.device}", "sequences")
    share = math.ceil(_completions_at_once(settings) / generator.num_replicas)
    reason = (
        f"{settings.groups_at_once} groups x {settings.completions_per_group} completions /"
        f" {generator.num_replicas} replica(s) = {share}, at least {FEWEST_SEQUENCES} and on"
        f" {generator.device} at most {most}"
    )
    return Derived(name, min(max(share, FEWEST_SEQUENCES), most), reason, "sequences")


def deadline(settings: Settings, tokens: int | None = None) -> Derived:
    """rollout.deadline_s for completions of at most `tokens` (default: those of rollouts)."""
    if settings.environment is not None:
        environment = settings.environment
        at_once, waves = session_slots(settings), session_waves(settings)
        queued = f", in {waves} waves, as {at_once} run at once" if waves > 1 else ""
        return Derived(
            "rollout.deadline_s",
            _seconds(SHORTEST_DEADLINE_S, 2 * waves * environment.deadline_s),
            f"twice environment.deadline_s = {environment.deadline_s:g} s, because a session may"
            f" begin again{queued}, at least {SHORTEST_DEADLINE_S:g} s",
        )
    tokens = settings.rollout.max_completion_length if tokens is None else tokens
    waves = math.ceil(
        _completions_at_once(settings) / (max_num_seqs(settings) * settings.engines.num_replicas)
    )
    queued = f", in {waves} waves, as not all completions run at once" if waves > 1 else ""
    reason = (
        f"{tokens} tokens at {SLOWEST_TOKENS_PER_S:g} tokens/s{queued}, at least"
        f" {SHORTEST_DEADLINE_S:g} s"
    )
    seconds = _seconds(SHORTEST_DEADLINE_S, waves * tokens / SLOWEST_TOKENS_PER_S)
    return Derived("rollout.deadline_s", seconds, reason)


def session_slots(settings: Settings) -> int:
    """Sessions that the environment processes of all rollout workers run at once, in a run with an
    environment."""
    environment = settings.environment
    assert environment is not None
    return settings.rollout.num_workers * environment.processes * environment.concurrency


def session_waves(settings: Settings) -> int:
    """Into how many waves the most sessions are divided that a run with an environment may start at
    once. Of more than one, the last waits until the others have ended."""
    return math.ceil(_completions_at_once(settings) / session_slots(settings))


def request_deadline_s(tokens: int) -> float:
    """Deadline of an HTTP request for at most this many tokens, in seconds."""
    return _seconds(SHORTEST_DEADLINE_S, tokens / SLOWEST_TOKENS_PER_S)


def placement(settings: Settings) -> Derived:
    """placement_timeout_s."""
    processes = (
        settings.learner.world_size
        + settings.engines.num_replicas * settings.owns_generators
        + settings.reward.tasks
        + settings.rollout.num_workers
    )
    reason = (
        f"1 s for each of {processes} processes, at least {SHORTEST_PLACEMENT_S:g} s; set more"
        " where a cluster starts nodes on demand"
    )
    return Derived("placement_timeout_s", max(SHORTEST_PLACEMENT_S, float(processes)), reason)


def start(model: str) -> Derived:
    """generator.start_timeout_s."""
    return _reading(
        "generator.start_timeout_s", SHORTEST_START_S, model, "{} of model files", SLOWEST_READ
    )


def stall(model: str) -> Derived:
    """generator.stall_timeout_s."""
    return _reading(
        "generator.stall_timeout_s", SHORTEST_STALL_S, model, "an update of {}", SLOWEST_APPLY
    )


def fetch_timeout(model: str) -> Derived:
    """fetch_timeout_s of standing generators."""
    return _reading("fetch_timeout_s", SHORTEST_PUSH_S, model, "{}", SLOWEST_FETCH)


def _reading(name: str, shortest: float, model: str, what: str, rate: int) -> Derived:
    """The time to read all weights at this rate, in bytes per second, added to the shortest."""
    size = stored_bytes(model)
    read = what.format(f"{size / (1 << 30):.1f} GiB")
    reason = f"{shortest:g} s, and {read} at {rate >> 20} MiB/s"
    return Derived(name, float(math.ceil(shortest + size / rate)), reason)


def push(settings: Settings) -> Derived:
    """weights.push_timeout_s. With in_flight: drain, generators take a version only after their
    longest completion."""
    fetched, drains = fetch_timeout(settings.model.path), settings.updates_drain
    seconds = max(fetched.value, 2 * stall_timeout_s(settings)) + deadline_s(settings) * drains
    waits = f", and {deadline_s(settings):g} s for completions that drain" if drains else ""
    reason = f"{fetched.reason}, at least twice generator.stall_timeout_s{waits}"
    return Derived("weights.push_timeout_s", seconds, reason)


def grace(settings: Settings) -> Derived:
    """weights.commit_grace_s."""
    seconds = push_timeout_s(settings)
    reason = f"a fifth of weights.push_timeout_s = {seconds:g} s"
    return Derived("weights.commit_grace_s", seconds / 5, reason)


def logprob_bytes(device: str) -> Derived:
    """learner.logprob_memory_bytes."""
    reason = f"chunks of logits that suit {device}"
    return Derived("learner.logprob_memory_bytes", LOGPROB_BYTES[device], reason, "MiB")


def max_num_seqs(settings: Settings) -> int:
    """Sequences that one engine runs at once."""
    return settings.engines.max_num_seqs or int(sequences(settings).value)


def deadline_s(settings: Settings) -> float:
    """Seconds after which a group's generation fails."""
    return settings.rollout.deadline_s or deadline(settings).value


def stall_timeout_s(settings: Settings) -> float:
    """Seconds without any answer from an engine before it is replaced."""
    return settings.engines.stall_timeout_s or stall(settings.model.path).value


def push_timeout_s(settings: Settings) -> float:
    """Seconds that a replica may take to apply a version."""
    return settings.weights.push_timeout_s or push(settings).value


def derived_settings(settings: Settings) -> list[Derived]:
    """Every setting that the user did not set, with its derived value."""
    found = [
        (settings.rollout.deadline_s, deadline(settings)),
        (settings.engines.max_num_seqs, sequences(settings)),
        (settings.generator.start_timeout_s, start(settings.model.path)),
        (settings.engines.stall_timeout_s, stall(settings.model.path)),
        (settings.weights.push_timeout_s, push(settings)),
        (settings.weights.commit_grace_s, grace(settings)),
        (settings.learner.logprob_memory_bytes, logprob_bytes(settings.learner.device)),
        (settings.placement_timeout_s, placement(settings)),
    ]
    acts = {
        "generator.max_num_seqs": settings.owns_generators,
        "generator.stall_timeout_s": settings.owns_generators,
    }
    return [derived for given, derived in found if given is None and acts.get(derived.name, True)]


def _completions_at_once(settings: Settings) -> int:
    return settings.groups_at_once * settings.completions_per_group


def _seconds(shortest: float, needed: float) -> float:
    return max(shortest, float(math.ceil(needed)))
