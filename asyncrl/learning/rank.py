"""One ZeRO-3 rank: the learner's own process. Every public method from `start` on is a collective: all ranks call it, with the same arguments."""

from __future__ import annotations

import logging
import os
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.algorithms.advantages import batch_normalised, moments_over_ranks, standardised
from asyncrl.algorithms.losses import (
    LossSums,
    own_metrics,
    policy_loss,
    supervised_loss,
    token_weights,
    truncated_weights,
)
from asyncrl.config import Config
from asyncrl.control.protocols import NOT_FINITE, NOTHING_TO_LEARN, Manifest, StepResult
from asyncrl.data.balance import quadratic_cost
from asyncrl.data.groups import groups_at
from asyncrl.data.packing import Packing, pack
from asyncrl.learning import checkpoint, zero3
from asyncrl.learning.batches import (
    Example,
    MicroBatch,
    TokenRow,
    examples_of,
    micro_batch,
    shuffle_rewards,
    token_example,
    with_values,
)
from asyncrl.learning.hf_directory import HfDirectory
from asyncrl.learning.kept import NormWatch, culprit, keep_batch
from asyncrl.learning.metrics import StepSums, step_metrics
from asyncrl.learning.optimizer import set_learning_rates
from asyncrl.learning.out_of_memory import explained
from asyncrl.learning.schedule import learning_rate_at
from asyncrl.learning.supervised import supervised_examples
from asyncrl.learning.supported import Packing as Packed
from asyncrl.learning.ulysses import SequenceGroup
from asyncrl.runtime.files import make_directory
from asyncrl.runtime.shared import Written, answer_probe, sync_directory
from asyncrl.weights.gather import gather_buckets, weight_layout
from asyncrl.weights.published import version_table

__all__ = ["LearnerRank"]

Loss = Callable[[Tensor, Tensor, Tensor, MicroBatch], tuple[Tensor, LossSums]]
"""(log-probs [N], entropy [N], values [N] or nothing, micro-batch) → loss and sums."""

logger = logging.getLogger(__name__)

BLAMED = 16
"""Tokens by which a supervised row is named."""

COLLECTIVES_LONGER_S = 60.0
"""Seconds that a collective waits beyond the time of a call: the driver is to find a rank that stands still, and not its peers."""

VERSIONS_KEPT = 2
"""The committed version and the coming one."""

WEIGHTS_NOT_FINITE = (
    "the weights hold NaN or Inf, or have a norm beyond their type, after a step whose loss and gradient were finite; they are neither published nor saved: "
    "lower the learning rate"
)


class LearnerRank:
    """Rank `rank` of `config.learner.world_size`."""

    def __init__(self, rank: int, config: Config, run_id: str, attempt: int) -> None:
        self.rank = rank
        self.data_rank, self.sequence_rank = divmod(rank, config.learner.sequence_parallel_size)
        """Which micro-batches this rank takes; which share of their tokens."""
        self.config = config
        self.run_id = run_id
        self.attempt = attempt
        self.learning_rate = config.learner.learning_rate
        self.warmup_steps = config.learner.warmup_steps
        self.applied = 0
        """Steps applied since the optimizer was fresh, which is the policy version; drives the schedule of the learning rate."""
        self.trained_tokens = 0
        """Loss tokens of all policy steps applied so far, in earlier attempts too."""
        self.device = torch.device("cuda" if config.learner.device == "cuda" else "cpu")
        self.versions: dict[int, list[Any]] = {}
        self.norms = NormWatch()
        self.listener: socket.socket | None = None
        self.own_metrics: tuple[str, ...] = ()
        """Names of the metrics of the user's own loss."""
        self.packing: Packed = "rows"
        """How the model is trained; known once it is loaded."""
        torch.set_num_threads(config.learner.num_threads)
        torch.manual_seed(config.seed * 1_000_003 + rank)

    def node_address(self) -> str:
        """Address of this rank's machine."""
        return str(ray.util.get_node_ip_address())

    def listen(self, address: str) -> int:
        """Hold a port for the ranks to meet at (rank 0 only)."""
        self.listener = zero3.loopback_listener(address)
        return int(self.listener.getsockname()[1])

    def start(self, address: str, port: int) -> dict[str, float]:
        """Meet the other ranks, load the model sharded, build the engine. Returns seconds by part."""
        began = time.monotonic()
        learner = self.config.learner
        backend = "nccl" if learner.device == "cuda" else "gloo"
        if address == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        zero3.join_process_group(
            self.rank,
            learner.world_size,
            address,
            port,
            backend,
            self.listener,
            learner.call_timeout_s + COLLECTIVES_LONGER_S,
        )
        self.listener = None
        met = time.monotonic()
        # Before the engine: while that lives, transformers makes every model sharded.
        self.table = version_table(self.config.model.path)
        # The second value must live as long as the engine.
        algorithm = self.config.algorithm
        self.own_metrics = own_metrics(algorithm)
        sequence_group = SequenceGroup.join(learner.sequence_parallel_size)
        self.engine, self.sharded = zero3.start_engine(
            self.config.model.path,
            learner,
            self.config.rollout.temperature,
            algorithm.entropy_coef > 0,
            algorithm.advantage == "gae",
            sequence_group,
        )
        self.packing = zero3.policy_of(self.engine).packing
        self.parameters = dict(zero3.policy_of(self.engine).model.named_parameters())
        """Every parameter once, by its name in transformers: tied weights appear under the first one."""
        if strange := set(self.parameters) ^ set(self.table.parameters):
            raise ValueError(
                f"model.path = {self.config.model.path!r}: {sorted(strange)[0]!r} is a parameter with its weights or without them, not both"
            )
        return {"meet_s": met - began, "engine_s": time.monotonic() - met}

    def step(self, refs: Sequence[Any]) -> StepResult:
        """One policy step on a batch of scored groups: (Ray reference to the IPC stream of a table of groups, row) each, or one-row tables.

        NaN or Inf on any rank, or nothing to learn from: no rank steps.
        """
        tables = groups_at(refs)
        if self.config.reward.shuffle:
            tables = shuffle_rewards(
                tables, self.config.algorithm.advantage, (self.config.seed, self.applied)
            )
        scored = [example for table in tables for example in examples_of(table)]
        algorithm = self.config.algorithm
        examples = self._with_step_statistics(scored)
        mean_weight = (
            self._mean_weight(examples) if algorithm.correction.normalise and examples else 1.0
        )
        weights = token_weights(
            [example.loss_tokens for example in examples],
            algorithm.loss_aggregation,
            self.config.rollout.max_completion_length,
        )
        version = self.applied
        metrics = self._train(
            examples,
            weights,
            self._policy_loss(mean_weight),
            self._scheduled(self.learning_rate),
            self._scheduled(self.value_peak),
        )
        if metrics["applied"]:
            self.trained_tokens += int(metrics["tokens"])
            metrics["grad_norm_ratio"] = self.norms.ratio(metrics["grad_norm"])
        reason = "" if metrics["applied"] else NOT_FINITE if examples else NOTHING_TO_LEARN
        # The examples without statistics of the step, which spread a NaN to all.
        blame = partial(self._blame, scored, weights, self._policy_loss(1.0))
        return StepResult(
            not reason,
            metrics,
            self._keep_if_bad(
                metrics, f"version_{version:06d}", tables, blame if examples else None
            ),
            reason,
        )

    def _scheduled(self, peak: float) -> float:
        """The learning rate of the next step, of which `peak` is the highest."""
        return learning_rate_at(
            self.applied,
            peak,
            self.warmup_steps,
            self.config.max_steps,
            self.config.learner.lr_scheduler_type,
        )

    @property
    def value_peak(self) -> float:
        """Peak learning rate of the value head."""
        own = self.config.learner.value_learning_rate
        return self.learning_rate if own is None else own

    def _policy_loss(self, mean_weight: float) -> Loss:
        def loss(
            logprobs: Tensor, entropy: Tensor, values: Tensor, batch: MicroBatch
        ) -> tuple[Tensor, LossSums]:
            return policy_loss(
                batch.policy_tokens(logprobs, values), self.config.algorithm, entropy, mean_weight
            )

        return loss

    def _with_step_statistics(self, examples: list[Example]) -> list[Example]:
        """The examples with advantages that are made from the whole step, where the method has such."""
        if not examples:
            return examples
        if self.config.algorithm.advantage == "gae":
            return self._with_token_advantages(examples)
        if self.config.algorithm.advantage.startswith("reinforce_plus_plus"):
            advantages = batch_normalised(
                [float(example.advantage) for example in examples],
                [example.loss_tokens for example in examples],
            )
            return [
                replace(example, advantage=advantage)
                for example, advantage in zip(examples, advantages, strict=True)
            ]
        return examples

    def _keep_if_bad(
        self,
        metrics: dict[str, float],
        moment: str,
        tables: Sequence[pa.Table],
        blame: Callable[[], str] | None,
    ) -> str:
        """Keep the batch of a step that was skipped or whose gradient norm leapt. Says what happened, by whom if that is asked, and where the batch is.
        `blame` is None for a batch that has nothing to learn from."""
        if metrics["applied"] and metrics["grad_norm_ratio"] <= self.config.learner.grad_norm_spike:
            return ""
        if metrics["applied"]:
            reason, said = (
                "spike",
                f"gradient norm {metrics['grad_norm']:.3g} is {metrics['grad_norm_ratio']:.3g} times the median of the last steps",
            )
        elif blame is None:
            reason, said = "empty", NOTHING_TO_LEARN
        else:
            reason, said = (
                "nonfinite",
                NOT_FINITE + (blame() if self.config.learner.find_nonfinite else ""),
            )
        kept = (
            keep_batch(self.config.run_directory / "kept", moment, reason, tables)
            if self.rank == 0
            else "rank 0 keeps its batch"
        )
        return f"{said}; {kept}"

    def _blame(
        self,
        examples: list[Example],
        weights: list[float],
        loss: Loss,
        temperature: float | None = None,
    ) -> str:
        """Who made a step not finite, by bisection (a collective)."""
        if not zero3.parameters_finite(self.engine):
            return ": the weights themselves hold NaN or Inf"

        def bad(indices: Sequence[int]) -> bool:
            totals, _ = self._backward(
                [examples[index] for index in indices],
                [weights[index] for index in indices],
                loss,
                temperature,
            )
            zero3.discard_gradients(self.engine)
            return _not_finite(totals)

        found = culprit(len(examples), bad)
        if found is None:
            return ", of several trajectories together: none is to blame alone"
        one = examples[found]
        return (
            f" from group {one.group}, trajectory {one.trajectory}"
            if one.group >= 0
            else f" from the row with the tokens {one.tokens[:BLAMED].tolist()}"
        )

    @torch.no_grad()
    def _with_token_advantages(self, examples: list[Example]) -> list[Example]:
        """This rank's examples with advantages by the value head as it is now, normalised over all ranks' loss tokens, and the returns to fit."""
        algorithm = self.config.algorithm
        plan = self._plan(examples)
        found = list(examples)
        mine = [np.zeros(0)]
        for indices in plan.micro_batches[self.data_rank]:
            batch = micro_batch(examples, indices, self.device)
            with explained(batch, self.config):
                _, _, values = self.engine(batch, None)
            for index, part in zip(
                batch.order,
                values.cpu().double().split(list(batch.counts)) if batch.counts else (),
                strict=True,
            ):
                found[index] = with_values(
                    examples[index], part.numpy(), algorithm.gamma, algorithm.gae_lambda
                )
                mine.append(np.asarray(found[index].advantage)[found[index].loss_mask])
        mean, std = moments_over_ranks(np.concatenate(mine), self._summed_over_ranks)
        return [
            replace(example, advantage=standardised(np.asarray(example.advantage), mean, std))
            for example in found
        ]

    def _summed_over_ranks(self, values: np.ndarray) -> np.ndarray:
        """Sum of these float64 values over all ranks (a collective)."""
        sums = torch.from_numpy(values).to(self.device)
        dist.all_reduce(sums)
        return sums.cpu().numpy()

    @torch.no_grad()
    def _mean_weight(self, examples: list[Example]) -> float:
        """Mean of the step's truncated weights over all ranks' tokens."""
        plan = self._plan(examples)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for indices in plan.micro_batches[self.data_rank]:
            batch = micro_batch(examples, indices, self.device, version=self.applied)
            with explained(batch, self.config):
                logprobs, *_ = self.engine(batch, None)
            weights = truncated_weights(batch.policy_tokens(logprobs), self.config.algorithm)
            sums += torch.stack(
                [weights.sum().double(), weights.new_tensor(weights.numel()).double()]
            )
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])

    def supervised_step(self, rows: Sequence[TokenRow]) -> dict[str, float]:
        """One step of next-token prediction of the second ids of each row after the first ones, cut as `warm_start.packing_strategy` says.

        Metrics hold `pieces_left_out`, pieces of rows without a token to predict, and `tokens_left_out`, target tokens that no piece predicts. The rows of
        a step that was skipped for NaN or Inf, or whose gradient norm leapt, are kept; this process's log says so.

        Raises:
            ValueError: a row is longer than `learner.max_tokens_per_gpu` under `bfd`, or no piece has a token to predict.
        """
        examples, pieces_left_out, tokens_left_out = supervised_examples(
            rows, self.config.learner.max_tokens_per_row, self.config.warm_start.packing_strategy
        )

        def loss(
            logprobs: Tensor, entropy: Tensor, values: Tensor, batch: MicroBatch
        ) -> tuple[Tensor, LossSums]:
            return supervised_loss(logprobs, batch.weights)

        weights = token_weights([example.loss_tokens for example in examples], "token_mean", 1)
        moment = f"supervised_{self.applied:06d}"
        metrics = self._train(examples, weights, loss, self.learning_rate, 0.0, temperature=1.0)
        if metrics["applied"]:
            metrics["grad_norm_ratio"] = self.norms.ratio(metrics["grad_norm"])
        table = pa.table(
            {
                "prompt_ids": [list(prompt) for prompt, _ in rows],
                "target_ids": [list(ids) for _, ids in rows],
            }
        )
        if note := self._keep_if_bad(
            metrics, moment, [table], partial(self._blame, examples, weights, loss, 1.0)
        ):
            logger.warning("supervised step %d: %s", self.applied, note)
        return metrics | {
            "pieces_left_out": float(pieces_left_out),
            "tokens_left_out": float(tokens_left_out),
        }

    def _train(
        self,
        examples: list[Example],
        weights: list[float],
        loss_of: Loss,
        learning_rate: float,
        value_learning_rate: float,
        temperature: float | None = None,
    ) -> dict[str, float]:
        began = time.monotonic()
        tokens = sum(example.loss_tokens for example in examples)
        if not tokens:
            return {"applied": 0.0, "trajectories": 0.0, "tokens": 0.0}
        totals, plan = self._backward(examples, weights, loss_of, temperature)
        applied = not _not_finite(totals)
        if applied:
            set_learning_rates(self.engine.optimizer, learning_rate, value_learning_rate)
            self.engine.step()
            applied = self.engine.was_step_applied()
            if not zero3.parameters_finite(self.engine):
                raise RuntimeError(
                    f"{WEIGHTS_NOT_FINITE} (it was {learning_rate:g}, at step {self.applied}), and go on from the newest checkpoint"
                )
        else:
            zero3.discard_gradients(self.engine)
        self.applied += applied
        grad_norm = float(self.engine.get_global_grad_norm()) if applied else float("nan")
        seconds = time.monotonic() - began
        return step_metrics(
            totals, tokens, examples, plan, grad_norm, learning_rate, applied, seconds
        )

    def _backward(
        self,
        examples: list[Example],
        weights: list[float],
        loss_of: Loss,
        temperature: float | None = None,
    ) -> tuple[dict[str, float], Packing]:
        """Forward and backward over all micro-batches; the gradients wait in the engine. Returns the sums over all ranks, so that all decide alike."""
        learner = self.config.learner
        plan = self._plan(examples)
        sums = StepSums(self.device, self.own_metrics)
        mine = plan.micro_batches[self.data_rank]
        for number, indices in enumerate(mine):
            self.engine.set_gradient_accumulation_boundary(number == len(mine) - 1)
            batch = micro_batch(examples, indices, self.device, weights, self.applied)
            with explained(batch, self.config):
                logprobs, entropy, values = self.engine(batch, temperature)
                loss, loss_sums = loss_of(logprobs, entropy, values, batch)
                # ZeRO averages over ranks; the weights are those of the whole step, and each rank has the gradient of its own tokens.
                self.engine.backward(loss * learner.world_size, scale_wrt_gas=False)
            if self.sequence_rank == 0:  # all ranks that share a row have the same sums
                sums.add(loss_sums, entropy.detach())
        sums.nonfinite_gradient(not zero3.gradients_finite(self.engine))
        return sums.over_ranks(), plan

    def _plan(self, examples: Sequence[Example]) -> Packing:
        """Micro-batches for each data-parallel rank, equally many, and the same on every rank. Ranks that share rows hold as many tokens as
        their caps add up to."""
        learner = self.config.learner
        return pack(
            [len(example.tokens) for example in examples],
            learner.max_tokens_per_row,
            learner.data_parallel_size,
            self._quadratic_cost(),
            self.packing == "none",
        )

    def _quadratic_cost(self) -> float:
        shape = zero3.policy_of(self.engine).model.config.get_text_config()
        heads = getattr(shape, "num_attention_heads", None)
        if not heads:
            return 0.0
        head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // heads
        return quadratic_cost(
            shape.num_hidden_layers,
            heads,
            head_dim,
            sum(int(p.ds_numel) for p in self.parameters.values()),
        )

    def exact_match(self, rows: Sequence[TokenRow]) -> float:
        """Share of rows whose second ids are all the argmax after what precedes them: what greedy decoding would answer exactly."""
        matches = self._forward_all(rows, greedy=True)
        count = torch.tensor(
            [sum(bool(match.all()) for match in matches.values())],
            dtype=torch.float64,
            device=self.device,
        )
        dist.all_reduce(count)
        return float(count) / (len(rows) * self.config.learner.sequence_parallel_size)

    def logprobs(self, rows: Sequence[TokenRow], temperature: float = 1.0) -> dict[int, np.ndarray]:
        """Log-probs [C] float32 of each row's second ids, for the rows that fell to this rank: row index → array."""
        return self._forward_all(rows, temperature=temperature)

    @torch.no_grad()
    def _forward_all(
        self, rows: Sequence[TokenRow], temperature: float = 1.0, greedy: bool = False
    ) -> dict[int, np.ndarray]:
        examples = [token_example(row) for row in rows]
        plan = self._plan(examples)
        found: dict[int, np.ndarray] = {}
        for indices in plan.micro_batches[self.data_rank]:
            batch = micro_batch(examples, indices, self.device)
            with explained(batch, self.config):
                values, *_ = self.engine(batch, temperature, greedy)
            parts = values.cpu().split(list(batch.counts)) if batch.counts else ()
            found |= {index: part.numpy() for index, part in zip(batch.order, parts, strict=True)}
        return found

    def reset_optimizer(self, learning_rate: float, warmup_steps: int = 0) -> None:
        """Fresh AdamW moments, and the (peak) learning rate of the steps to come."""
        zero3.fresh_optimizer(self.engine)
        self.norms.forget()
        self.learning_rate, self.warmup_steps, self.applied, self.trained_tokens = (
            learning_rate,
            warmup_steps,
            0,
            0,
        )

    def set_learning_rate(self, learning_rate: float) -> None:
        """Learning rate of the steps to come; moments and counters stay."""
        self.learning_rate = learning_rate

    def save(self, directory: Path) -> dict[str, Written]:
        """Write weights, optimizer, counters and RNG under `directory`. Returns this rank's files: name → size and checksum."""
        counters = {
            "world_size": self.config.learner.world_size,
            "applied": self.applied,
            "trained_tokens": self.trained_tokens,
        }
        return checkpoint.save_rank(self.engine, directory, self.rank, counters, self.norms.known)

    def load(self, directory: Path) -> None:
        """Go on from `save(directory)`. The learning rate and its schedule stay as they are now: a resume may change them.

        Raises:
            ValueError: it cannot be read, or was written by another number of ranks.
        """
        counters, norms = checkpoint.load_rank(
            self.engine, directory, self.rank, self.config.learner.world_size
        )
        self.applied, self.trained_tokens = counters["applied"], counters["trained_tokens"]
        self.norms = NormWatch(norms)

    def answer_probe(self, folder: Path) -> bool:
        """Whether this rank's node sees the folder of the driver's probe. No collective."""
        return answer_probe(folder, f"rank_{self.rank}")

    def export_hf(self, directory: Path, tokenizer_source: str) -> dict[str, int]:
        """Write a Hugging Face directory, gathered bucket by bucket onto rank 0, which returns its files: name → bytes."""
        target = HfDirectory(
            directory, self.table, self.config.model.dtype, self.config.weights.bucket_bytes
        )
        if self.rank == 0:
            make_directory(target.directory)
        gather_buckets(
            self.parameters, self.table, target.entries, target.sizes, self.rank, target.write
        )
        if self.rank != 0:
            return {}
        target.finish(self.config.model.path, tokenizer_source)
        sync_directory(target.directory)
        return {
            str(path.relative_to(target.directory)): path.stat().st_size
            for path in target.directory.rglob("*")
            if path.is_file()
        }

    def gather(self, version: int) -> Manifest | None:
        """Put the weights in the object store as `version`; rank 0 returns the manifest and keeps the references of the last two versions."""
        began = time.monotonic()
        entries, sizes = weight_layout(
            self.table, self.config.model.dtype, self.config.weights.bucket_bytes
        )
        buckets: list[Any] = []
        checksums: list[int] = []

        def put(number: int, content: np.ndarray) -> None:
            checksums.append(zlib.crc32(content))
            buckets.append(ray.put(content))

        for old in sorted(self.versions)[: -(VERSIONS_KEPT - 1)]:
            del self.versions[old]
        gather_buckets(self.parameters, self.table, entries, sizes, self.rank, put)
        if self.rank != 0:
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
            self.table.left_out,
        )

    def shards(self) -> dict[str, tuple[int, int]]:
        """Parameter → (elements that this rank owns, elements in all)."""
        return {
            name: (int(p.ds_tensor.numel()), int(p.ds_numel)) for name, p in self.parameters.items()
        }


def _not_finite(totals: dict[str, float]) -> bool:
    return bool(totals["nonfinite_loss"] or totals["nonfinite_gradient"])
