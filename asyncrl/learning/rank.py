"""One ZeRO rank of the learner. The driver calls it in each rank's process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray
import torch
import torch.distributed as dist

from asyncrl.config import RewardModelConfig
from asyncrl.contracts.messages import HeldOutLoss, Manifest, StepResult
from asyncrl.contracts.offline_rows import TokenRow
from asyncrl.learning.engine import zero
from asyncrl.learning.engine.adapter import (
    DIRECTORY,
    adapter_table,
    gather_matrices,
    row_squares,
    write_adapter,
)
from asyncrl.learning.engine.hf_directory import HfDirectory
from asyncrl.learning.engine.shifts import device_shifts
from asyncrl.learning.engine.state import LearnerState, Meeting, join_ranks, load_state
from asyncrl.learning.spec import LearnerSpec, OnlineObjective
from asyncrl.learning.steps.held_out import held_out_loss, target_logprobs
from asyncrl.learning.steps.online_preference import online_preference_step
from asyncrl.learning.steps.passes import forward_rows
from asyncrl.learning.steps.policy_step import policy_step
from asyncrl.learning.steps.preference_step import (
    PreferenceObjective,
    held_out_preferences,
    preference_step,
)
from asyncrl.learning.steps.reward_step import held_out_scores, reward_step
from asyncrl.learning.steps.supervised_step import supervised_step
from asyncrl.learning.trained_files import TrainedFiles
from asyncrl.models.adapters import (
    adapter_settings,
    low_rank,
    merged,
    with_factors,
)
from asyncrl.runtime.files.opening import make_directory
from asyncrl.runtime.files.shared import Written, answer_probe, sync_directory
from asyncrl.runtime.ray.objects import groups_at
from asyncrl.text.stops import load_stops
from asyncrl.text.tokenizer import load_tokenizer
from asyncrl.weights.gather import gather_buckets, weight_layout
from asyncrl.weights.layout import bucket_checksum

VERSIONS_KEPT = 2
"""Published versions whose buckets are kept: the committed one and the next one."""


class LearnerRank:
    """One rank that has joined the others and loaded its model. All methods except `answer_probe`
    and `shards` are collectives: all ranks call them with the same arguments."""

    def __init__(self, state: LearnerState, run_id: str, attempt: int) -> None:
        self.state = state
        self.run_id = run_id
        self.attempt = attempt
        self.versions: dict[int, list[ray.ObjectRef[np.ndarray]]] = {}
        """Version → references of its published buckets. Empty on all ranks except rank 0."""
        self._trained = (
            TrainedFiles(state.spec.run_directory, attempt, state.rank)
            if state.spec.records_tokens
            else None
        )
        self._shifts = device_shifts(state)
        """Moves the states off the GPU and back. None: the states stay on their device."""

    def take_device(self) -> None:
        """See `asyncrl.learning.engine.shifts.DeviceShifts.take`."""
        if self._shifts is not None:
            self._shifts.take()

    def leave_device(self) -> None:
        """See `asyncrl.learning.engine.shifts.DeviceShifts.leave`."""
        if self._shifts is not None:
            self._shifts.leave()

    def step(self, refs: Sequence[tuple[ray.ObjectRef[bytes], int] | pa.Table]) -> StepResult:
        """Take one step on a batch of scored groups: a policy step, or one of online DPO.

        Args:
            refs: one-row tables, or (reference to an IPC stream of a table of groups, row).
        """
        tables = groups_at(refs)
        if self.state.spec.online.algorithm.preference is not None:
            return online_preference_step(self.state, tables)
        record = None if self._trained is None else self._trained.write
        return policy_step(self.state, tables, record)

    def supervised_step(self, rows: pa.Table, scheduled: bool = False) -> dict[str, float]:
        """See `asyncrl.learning.steps.supervised_step.supervised_step`."""
        return supervised_step(self.state, rows, scheduled)

    def reward_step(self, rows: pa.Table) -> dict[str, float]:
        """See `asyncrl.learning.steps.reward_step.reward_step`."""
        return reward_step(self.state, rows, self._center_coef())

    def held_out_scores(self, rows: pa.Table) -> dict[str, float]:
        """See `asyncrl.learning.steps.reward_step.held_out_scores`."""
        return held_out_scores(self.state, rows, self._center_coef())

    def preference_step(self, rows: pa.Table) -> dict[str, float]:
        """See `asyncrl.learning.steps.preference_step.preference_step`."""
        return preference_step(self.state, rows, self._preference())

    def held_out_loss(self, rows: pa.Table) -> HeldOutLoss:
        """See `asyncrl.learning.steps.held_out.held_out_loss`."""
        return held_out_loss(self.state, rows)

    def held_out_preferences(self, rows: pa.Table) -> dict[str, float]:
        """See `asyncrl.learning.steps.preference_step.held_out_preferences`."""
        return held_out_preferences(self.state, rows, self._preference())

    def target_logprobs(self, rows: pa.Table) -> dict[int, np.ndarray]:
        """See `asyncrl.learning.steps.held_out.target_logprobs`."""
        return target_logprobs(self.state, rows)

    def exact_match(self, rows: Sequence[TokenRow]) -> float:
        """Share of the rows (0..1) whose second ids are exactly those of greedy decoding."""
        matches = forward_rows(self.state, rows, greedy=True)
        count = torch.tensor(
            [sum(bool(match.all()) for match in matches.values())],
            dtype=torch.float64,
            device=self.state.device,
        )
        dist.all_reduce(count)
        return float(count) / (len(rows) * self.state.spec.learner.sequence_parallel_size)

    def logprobs(self, rows: Sequence[TokenRow], temperature: float = 1.0) -> dict[int, np.ndarray]:
        """Log-probs [C] float32 of the second ids of each row that this rank processes: row index →
        array."""
        return forward_rows(self.state, rows, temperature)

    def reset_optimizer(self, learning_rate: float, warmup_steps: int = 0) -> None:
        """Reset the optimizer's state and the counters, and set the peak learning rate."""
        self.state.reset_optimizer(learning_rate, warmup_steps)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the following steps. Moments and counters stay."""
        self.state.learning_rate = learning_rate

    def save(self, directory: Path) -> dict[str, Written]:
        """See `LearnerState.save`. The files of the trained tokens are complete before that."""
        self._flush_trained()
        return self.state.save(directory)

    def load(self, directory: Path) -> None:
        """See `LearnerState.load`."""
        self.state.load(directory)

    def answer_probe(self, folder: Path) -> bool:
        """Whether this rank's node sees the folder of the driver's probe. Writes the answer
        there."""
        return answer_probe(folder, f"rank_{self.state.rank}")

    def export_hf(self, directory: Path, tokenizer_source: str) -> dict[str, int]:
        """Write a Hugging Face directory. Rank 0 gathers it bucket by bucket and returns its files:
        name → bytes. The other ranks return nothing. An adapter is merged into the weights, and
        written to the folder `adapter` too, unless it belongs to a reward model: the folder would
        lack the score."""
        self._flush_trained()
        state, spec = self.state, self.state.spec
        target = HfDirectory(directory, state.table, spec.model.dtype, spec.bucket_bytes)
        if state.rank == 0:
            make_directory(target.directory)
        matrices = gather_matrices(state)
        adapters = {} if spec.lora is None else low_rank(spec.lora, matrices)
        if spec.lora is not None and spec.lora.use_dora:
            adapters = with_factors(adapters, row_squares(state, adapters))
        gather_buckets(
            state.parameters,
            state.table,
            target.entries,
            target.sizes,
            state.rank,
            target.write,
            partial(merged, adapters),
        )
        if state.rank != 0:
            return {}
        stops = load_stops(
            spec.model.path,
            load_tokenizer(tokenizer_source),
            *spec.stops,
            spec.chat_template_kwargs,
        )
        if spec.lora is not None and not isinstance(spec.objective, RewardModelConfig):
            write_adapter(target.directory / DIRECTORY, spec.lora, matrices, spec.model.path, stops)
        target.finish(spec.model.path, tokenizer_source, stops)
        sync_directory(target.directory)
        return {
            str(path.relative_to(target.directory)): path.stat().st_size
            for path in target.directory.rglob("*")
            if path.is_file()
        }

    def gather(self, version: int) -> Manifest | None:
        """Put the weights, or the adapter's, in the object store as `version`. Rank 0 returns the
        manifest and keeps the references of the last two versions."""
        began = time.monotonic()
        state, spec = self.state, self.state.spec
        parameters, table, settings = state.parameters, state.table, None
        if spec.lora is not None:
            parameters, table = state.adapter, adapter_table(state)
            settings = adapter_settings(spec.lora, state.adapter, spec.model.path)
        entries, sizes = weight_layout(table, spec.model.dtype, spec.bucket_bytes)
        buckets: list[ray.ObjectRef[np.ndarray]] = []
        checksums: list[int] = []

        def put(number: int, content: np.ndarray) -> None:
            checksums.append(bucket_checksum(content.data))
            buckets.append(ray.put(content))

        for old in sorted(self.versions)[: -(VERSIONS_KEPT - 1)]:
            del self.versions[old]
        gather_buckets(parameters, table, entries, sizes, state.rank, put)
        if state.rank != 0:
            return None
        self.versions[version] = buckets
        metrics = {
            "gather_s": time.monotonic() - began,
            "bytes": float(sum(sizes)),
            "buckets": float(len(sizes)),
        }
        return Manifest(
            self.run_id,
            self.attempt,
            version,
            entries,
            tuple(buckets),
            sizes,
            tuple(checksums),
            metrics,
            table.left_out,
            settings,
        )

    def _flush_trained(self) -> None:
        if self._trained is not None:
            self._trained.flush()

    def _preference(self) -> PreferenceObjective:
        whole = self.state.spec.objective
        objective = whole.algorithm.preference if isinstance(whole, OnlineObjective) else whole
        if not isinstance(objective, PreferenceObjective):
            raise ValueError("this run has no preference objective; use objective: dpo")
        return objective

    def _center_coef(self) -> float:
        objective = self.state.spec.objective
        if not isinstance(objective, RewardModelConfig):
            raise ValueError("this run trains no reward model; use objective: reward_model")
        return objective.center_coef

    def shards(self) -> dict[str, tuple[int, int]]:
        """Parameter → (elements that this rank owns, elements in total)."""
        return {
            name: (zero.shard_size(parameter), zero.full_size(parameter))
            for name, parameter in self.state.parameters.items()
        }


def start_rank(
    rank: int, spec: LearnerSpec, run_id: str, attempt: int, meeting: Meeting, address: str
) -> tuple[LearnerRank, dict[str, float]]:
    """Join the other ranks, load the model sharded and build the engine (a collective). Returns the
    rank, and the seconds of each part.

    Args:
        address: where the other ranks reach this one.

    Raises:
        ValueError: the learner cannot train this model.
        FunctionError: the user's loss failed on made-up numbers.
    """
    meet_s = join_ranks(rank, spec, meeting, address)
    began = time.monotonic()
    started = LearnerRank(load_state(rank, spec), run_id, attempt)
    return started, {"meet_s": meet_s, "engine_s": time.monotonic() - began}
