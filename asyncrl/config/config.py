"""The config of a run: its settings, and those that are derived from others by default, with the
reason for each value.

This module is pure, except that it reads the sizes of the model files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from asyncrl.config.rules import check_rules
from asyncrl.config.schema import LOGPROB_BYTES, InFlight
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
MOST_SEQUENCES = {"cpu": 128, "cuda": 512}
"""Most sequences of an engine. More of them do not raise its tokens per second, and vLLM reserves
logits for all of them. On most GPUs, vLLM's CUDA graphs end at 512."""
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


class Config(Settings):
    """Every setting of a run."""

    @model_validator(mode="after")
    def settings_fit_together(self) -> Config:
        check_rules(self)
        if self.owns_generators and self.push_timeout_s <= self.stall_timeout_s:
            raise ValueError(
                f"weights.push_timeout_s = {self.push_timeout_s:g} is not above"
                f" generator.stall_timeout_s = {self.stall_timeout_s:g}: a stalled generator would"
                " end the run before it is replaced; raise push_timeout_s, or lower stall_timeout_s"
            )
        return self

    @property
    def deadline_s(self) -> float:
        """Seconds after which a group's generation fails."""
        return self.rollout.deadline_s or deadline(self).value

    def evaluation_deadline_s(self, tokens: int | None) -> float:
        """Seconds after which a completion of an evaluation is late. `tokens` is its longest
        completion; None = as in rollouts."""
        return self.rollout.deadline_s or deadline(self, tokens).value

    @property
    def max_num_seqs(self) -> int:
        """Sequences that one engine runs at once."""
        return self.engines.max_num_seqs or int(sequences(self).value)

    @property
    def start_timeout_s(self) -> float:
        """Seconds from a replica's placement to its first answer."""
        return self.generator.start_timeout_s or start(self.model.path).value

    @property
    def stall_timeout_s(self) -> float:
        """Seconds without any answer from an engine before it is replaced."""
        return self.engines.stall_timeout_s or stall(self.model.path).value

    @property
    def push_timeout_s(self) -> float:
        """Seconds that a replica may take to apply a version."""
        return self.weights.push_timeout_s or push(self).value

    @property
    def commit_grace_s(self) -> float:
        """Seconds that a version waits for all live replicas."""
        given = self.weights.commit_grace_s
        return grace(self).value if given is None else given

    @property
    def placement_wait_s(self) -> float:
        return self.placement_timeout_s or placement(self).value

    @property
    def in_flight(self) -> InFlight:
        """How generations in flight continue: generator.in_flight, or what suits the run."""
        keeps = (
            self.engines.device == "cuda"
            and self.lora is None
            and self.staleness.max_staleness > 0
            and not self.takes_shifts_on_gpus
        )
        return self.engines.in_flight or ("keep" if keeps else "recompute")


def stored_bytes(model: str) -> int:
    """Bytes of the safetensors files in a checkpoint directory; 0 if there are none."""
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))


def sequences(config: Config) -> Derived:
    """generator.max_num_seqs."""
    generator, most = config.engines, MOST_SEQUENCES[config.engines.device]
    name = "generator.max_num_seqs"
    if not config.owns_generators:
        return Derived(name, most, f"the most on {generator.device}", "sequences")
    share = math.ceil(_completions_at_once(config) / generator.num_replicas)
    reason = (
        f"{config.groups_at_once} groups x {config.completions_per_group} completions /"
        f" {generator.num_replicas} replica(s) = {share}, at least {FEWEST_SEQUENCES} and on"
        f" {generator.device} at most {most}"
    )
    return Derived(name, min(max(share, FEWEST_SEQUENCES), most), reason, "sequences")


def deadline(config: Config, tokens: int | None = None) -> Derived:
    """rollout.deadline_s for completions of at most `tokens` (default: those of rollouts)."""
    if config.environment is not None:
        environment = config.environment
        at_once, waves = session_slots(config), session_waves(config)
        queued = f", in {waves} waves, as {at_once} run at once" if waves > 1 else ""
        return Derived(
            "rollout.deadline_s",
            _seconds(SHORTEST_DEADLINE_S, 2 * waves * environment.deadline_s),
            f"twice environment.deadline_s = {environment.deadline_s:g} s, because a session may"
            f" begin again{queued}, at least {SHORTEST_DEADLINE_S:g} s",
        )
    tokens = config.rollout.max_completion_length if tokens is None else tokens
    waves = math.ceil(
        _completions_at_once(config) / (config.max_num_seqs * config.engines.num_replicas)
    )
    queued = f", in {waves} waves, as not all completions run at once" if waves > 1 else ""
    reason = (
        f"{tokens} tokens at {SLOWEST_TOKENS_PER_S:g} tokens/s{queued}, at least"
        f" {SHORTEST_DEADLINE_S:g} s"
    )
    seconds = _seconds(SHORTEST_DEADLINE_S, waves * tokens / SLOWEST_TOKENS_PER_S)
    return Derived("rollout.deadline_s", seconds, reason)


def session_slots(config: Config) -> int:
    """Sessions that the environment processes of all rollout workers run at once, in a run with an
    environment."""
    environment = config.environment
    assert environment is not None
    return config.rollout.num_workers * environment.processes * environment.concurrency


def session_waves(config: Config) -> int:
    """Into how many waves the most sessions are divided that a run with an environment may start at
    once. Of more than one, the last waits until the others have ended."""
    return math.ceil(_completions_at_once(config) / session_slots(config))


def request_deadline_s(tokens: int) -> float:
    """Deadline of an HTTP request for at most this many tokens, in seconds."""
    return _seconds(SHORTEST_DEADLINE_S, tokens / SLOWEST_TOKENS_PER_S)


def placement(config: Config) -> Derived:
    """placement_timeout_s."""
    processes = (
        config.learner.world_size
        + config.engines.num_replicas * config.owns_generators
        + config.reward.tasks
        + config.rollout.num_workers
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


def push(config: Config) -> Derived:
    """weights.push_timeout_s. With in_flight: drain, generators take a version only after their
    longest completion."""
    fetched, drains = fetch_timeout(config.model.path), config.updates_drain
    seconds = max(fetched.value, 2 * config.stall_timeout_s) + config.deadline_s * drains
    waits = f", and {config.deadline_s:g} s for completions that drain" if drains else ""
    reason = f"{fetched.reason}, at least twice generator.stall_timeout_s{waits}"
    return Derived("weights.push_timeout_s", seconds, reason)


def grace(config: Config) -> Derived:
    """weights.commit_grace_s."""
    seconds = config.push_timeout_s
    reason = f"a fifth of weights.push_timeout_s = {seconds:g} s"
    return Derived("weights.commit_grace_s", seconds / 5, reason)


def logprob_bytes(device: str) -> Derived:
    """learner.logprob_memory_bytes."""
    reason = f"chunks of logits that suit {device}"
    return Derived("learner.logprob_memory_bytes", LOGPROB_BYTES[device], reason, "MiB")


def derived_settings(config: Config) -> list[Derived]:
    """Every setting that the user did not set, with its derived value."""
    found = [
        (config.rollout.deadline_s, deadline(config)),
        (config.engines.max_num_seqs, sequences(config)),
        (config.generator.start_timeout_s, start(config.model.path)),
        (config.engines.stall_timeout_s, stall(config.model.path)),
        (config.weights.push_timeout_s, push(config)),
        (config.weights.commit_grace_s, grace(config)),
        (config.learner.logprob_memory_bytes, logprob_bytes(config.learner.device)),
        (config.placement_timeout_s, placement(config)),
    ]
    acts = {
        "generator.max_num_seqs": config.owns_generators,
        "generator.stall_timeout_s": config.owns_generators,
    }
    return [derived for given, derived in found if given is None and acts.get(derived.name, True)]


def _completions_at_once(config: Config) -> int:
    return config.groups_at_once * config.completions_per_group


def _seconds(shortest: float, needed: float) -> float:
    return max(shortest, float(math.ceil(needed)))
