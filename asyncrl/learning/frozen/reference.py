"""The reference policy of a KL term or of pairs. It runs in a separate process, so it uses none of
the learner's memory, and answers the scoring stream. Its weights are frozen, or those of every N-th
version.

That process imports torch. The driver, which starts it, does not.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import ray
from ray.exceptions import RayTaskError

from asyncrl.contracts.errors import PartDiedError, ReferenceLostError
from asyncrl.contracts.rows import ReferenceLogprobs, TopLogprobs
from asyncrl.learning.frozen.reference_files import (
    ReferenceFiles,
    keep_version,
    read_kept,
    wait_for,
)
from asyncrl.learning.frozen.spec import ReferenceSpec, RefreshSpec
from asyncrl.runtime.processes.environment import claim_caches, passed_on
from asyncrl.runtime.processes.gpu_memory import limit_gpu_memory
from asyncrl.runtime.ray.objects import DEATHS, Actor
from asyncrl.weights.manifest import expected_tensors
from asyncrl.weights.staging import StagingError

if TYPE_CHECKING:
    from asyncrl.contracts.messages import Manifest
    from asyncrl.contracts.offline_rows import Scored, TokenRow
    from asyncrl.models.micro_batches import MicroBatch
    from asyncrl.models.policy import Policy


class Reference:
    """The whole model at `algorithm.reference.ref_load` on one device, without gradients or an
    optimizer.

    With `spec.refresh`, a process that starts loads the version in the attempt's folder. So
    a restarted process continues with the last refreshed version, or does not start.
    """

    def __init__(self, spec: ReferenceSpec) -> None:
        """
        Raises:
            ReferenceLostError: the folder has no version, or a damaged one.
        """
        claim_caches("reference")
        import torch
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        torch.set_num_threads(spec.learner.least_threads)
        self.spec = spec
        self.device = torch.device("cuda" if spec.learner.device == "cuda" else "cpu")
        limit_gpu_memory(self.device.type, spec.reference_gpus)
        self.version = 0
        self._policy: Policy | None = None
        if spec.refresh is None:
            self._load(spec.reference_path)
        else:
            kept = read_kept(spec.refresh.folder)
            kept.verify()
            self._take(kept)

    def _take(self, kept: ReferenceFiles) -> None:
        self._load(self.spec.reference_path if kept.directory is None else str(kept.directory))
        self.version = kept.version

    def _load(self, path: str) -> None:
        import torch

        from asyncrl.models.isolation import check_isolation
        from asyncrl.models.policy import head_settings, load_policy

        self._policy = None  # its memory is free before the next one is loaded
        learner = self.spec.learner
        dtype = torch.bfloat16 if learner.bf16 else torch.float32
        policy = load_policy(
            path,
            dtype,
            self.spec.temperature,
            packing=learner.packing,
            head=head_settings(learner),
        ).to(self.device)
        vocabulary = policy.model.config.get_text_config().vocab_size
        check_isolation(policy, vocabulary, self.device, dtype, path, policy.packing)
        self._policy = policy

    @property
    def policy(self) -> Policy:
        """The model.

        Raises:
            ReferenceLostError: a refresh failed after the weights before it were dropped.
        """
        if self._policy is None:
            raise ReferenceLostError(
                f"the reference policy has no weights since its refresh after version"
                f" {self.version} failed; start the run again"
            )
        return self._policy

    def ready(self) -> None:
        """Return once the model is loaded."""

    def refresh(self, manifest: Manifest) -> None:
        """Keep a published version in the folder, and score with it from now on. A repeated call
        does nothing.

        Raises:
            ManifestError: the version does not fit the model.
            StagingError: its weights are lost, late or damaged.
            DiskFullError: the disk has no room.
        """
        refresh = _refresh_of(self.spec)
        if manifest.version != self.version:
            expected = expected_tensors(refresh.model.path, refresh.model.dtype)
            self._take(
                keep_version(
                    refresh.folder, manifest, refresh.model.path, expected, refresh.push_timeout_s
                )
            )

    def versioned_logprobs(
        self, rows: Sequence[TokenRow], scored: Scored | None = None
    ) -> ReferenceLogprobs:
        """What `logprobs` returns, with the version that scored all of the rows."""
        return ReferenceLogprobs(self.version, self.logprobs(rows, scored))

    def logprobs(self, rows: Sequence[TokenRow], scored: Scored | None = None) -> list[np.ndarray]:
        """Log-probs [C] float32 of each row's C second ids, given its first, in nats at the
        rollouts' temperature.

        Args:
            scored: which of each row's second ids get one. None: all of them.
        """
        import torch

        found = [np.zeros(0, dtype=np.float32)] * len(rows)
        with torch.no_grad():
            for indices, batch in self._batches(rows, scored):
                values, *_ = self.policy(batch, with_entropy=False)
                for index, part in zip(
                    indices, values.cpu().split(list(batch.counts)), strict=True
                ):
                    found[index] = part.numpy()
        return found

    def top_logprobs(
        self, rows: Sequence[TokenRow], scored: Scored | None = None
    ) -> list[TopLogprobs]:
        """What `logprobs` returns, and ids and log-probs of the `spec.top_k` most probable other
        tokens."""
        spec, none = self.spec, np.zeros((0, self.spec.top_k), dtype=np.float32)
        found = [TopLogprobs(none[:, 0], none.astype(np.int32), none)] * len(rows)
        for indices, batch in self._batches(rows, scored):
            parts = zip(
                *(
                    values.cpu().split(list(batch.counts))
                    for values in self.policy.top_logprobs(batch, spec.top_k, spec.vocabulary)
                ),
                strict=True,
            )
            for index, (own, ids, others) in zip(indices, parts, strict=True):
                found[index] = TopLogprobs(
                    own.numpy(), ids.numpy().astype(np.int32), others.numpy()
                )
        return found

    def _batches(
        self, rows: Sequence[TokenRow], scored: Scored | None
    ) -> Iterator[tuple[list[int], MicroBatch]]:
        """The micro-batches of the rows with second ids, each with the rows' indices."""
        from asyncrl.learning.packing.prefixes import pack_shared
        from asyncrl.learning.packing.strategies import pack
        from asyncrl.models.micro_batches import micro_batch, token_example

        kept = [index for index, (_, following) in enumerate(rows) if len(following)]
        examples = [token_example(rows[index]) for index in kept]
        if scored is not None:
            masks = [np.asarray(scored[index], dtype=bool) for index in kept]
            examples = [
                replace(example, loss_mask=mask)
                for example, mask in zip(examples, masks, strict=True)
            ]
        limit = self.spec.learner.max_tokens_per_gpu
        packed = (
            pack([len(example.tokens) for example in examples], limit, one_each=True)
            if self.policy.packing == "none"
            else pack_shared([example.tokens for example in examples], limit)
        )
        for indices in packed.micro_batches[0]:
            batch = micro_batch(examples, indices, self.device)
            yield [kept[index] for index in batch.order], batch


class RayReference:
    """`ReferencePolicy` over the actor."""

    def __init__(self, actor: Actor, spec: RefreshSpec) -> None:
        self._actor, self._spec = actor, spec

    async def refresh(self, manifest: Manifest) -> Mapping[str, float]:
        """Return when the reference policy scores with this version, and the version is in the
        attempt's folder. Groups that it scores at the moment are finished first.

        Raises:
            PartDiedError: its process, or the learner's that has the weights, died.
            RuntimeError: it did not take the version, or not in time.
        """
        began, title = time.monotonic(), f"the reference policy's refresh to {manifest.version}"
        limit = self._spec.push_timeout_s
        try:
            await asyncio.wait_for(self._actor.refresh.remote(manifest), limit)
        except TimeoutError:
            raise RuntimeError(
                f"{title} took longer than weights.push_timeout_s = {limit:g} s; raise it"
            ) from None
        except DEATHS as error:
            raise PartDiedError(f"{title} failed: its process died") from error
        except RayTaskError as error:
            failure = PartDiedError if isinstance(error.cause, StagingError) else RuntimeError
            raise failure(f"{title} failed: {error.cause}") from error
        await asyncio.to_thread(wait_for, self._spec.folder, manifest.version)
        return {"reference/refresh_s": time.monotonic() - began}


def _refresh_of(spec: ReferenceSpec) -> RefreshSpec:
    if spec.refresh is None:
        raise ValueError("this reference policy is frozen; set algorithm.reference.update_interval")
    return spec.refresh


def start_reference(spec: ReferenceSpec) -> Actor:
    """Start a Ray actor of `Reference`. If it dies, Ray restarts it and repeats the calls."""
    environment = passed_on(os.environ) | {
        "OMP_NUM_THREADS": str(spec.learner.least_threads),
        "TOKENIZERS_PARALLELISM": "false",
        # On the CPU, idle threads must not take a core from generators and learner.
        **({"OMP_WAIT_POLICY": "passive"} if spec.learner.device == "cpu" else {}),
    }
    options = {
        "num_cpus": spec.num_cpus,
        "num_gpus": spec.reference_gpus,
        "max_restarts": -1,
        "max_task_retries": -1,
    }
    return (
        ray.remote(Reference).options(**options, runtime_env={"env_vars": environment}).remote(spec)
    )
