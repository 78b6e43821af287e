"""The frozen reference policy of a KL term. It runs in a separate process, so it uses none of the
learner's memory, and answers the scoring stream.

That process imports torch. The driver, which starts it, does not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import ray

from asyncrl.frozen.spec import ReferenceSpec
from asyncrl.runtime.environment import claim_caches, passed_on
from asyncrl.runtime.ray_objects import Actor

if TYPE_CHECKING:
    from asyncrl.contracts.offline_rows import TokenRow

__all__ = ["Reference", "start_reference"]


class Reference:
    """The whole model at `algorithm.ref_load` on one device, without gradients or optimizer."""

    def __init__(self, spec: ReferenceSpec) -> None:
        claim_caches("reference")
        import torch
        from transformers.utils import logging as transformers_logging

        from asyncrl.models.isolation import check_isolation
        from asyncrl.models.policy import head_settings, load_policy

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        torch.set_num_threads(spec.learner.num_threads)
        self.spec = spec
        self.device = torch.device("cuda" if spec.learner.device == "cuda" else "cpu")
        dtype = torch.bfloat16 if spec.learner.bf16 else torch.float32
        self.policy = load_policy(
            spec.path,
            dtype,
            spec.temperature,
            packing=spec.learner.packing,
            head=head_settings(spec.learner),
        ).to(self.device)
        vocabulary = self.policy.model.config.get_text_config().vocab_size
        check_isolation(self.policy, vocabulary, self.device, dtype, spec.path, self.policy.packing)

    def ready(self) -> None:
        """Return once the model is loaded."""

    def logprobs(self, rows: Sequence[TokenRow]) -> list[np.ndarray]:
        """Log-probs [C] float32 of each row's C second ids, given its first, in nats at the
        rollouts' temperature."""
        import torch

        from asyncrl.models.micro_batches import micro_batch, token_example
        from asyncrl.packing.packing import pack

        scored = [index for index, (_, following) in enumerate(rows) if len(following)]
        examples = [token_example(rows[index]) for index in scored]
        found = [np.zeros(0, dtype=np.float32)] * len(rows)
        lengths = [len(example.tokens) for example in examples]
        limit = self.spec.learner.max_tokens_per_gpu
        with torch.no_grad():
            packed = pack(lengths, limit, 1, one_each=self.policy.packing == "none")
            for indices in packed.micro_batches[0]:
                batch = micro_batch(examples, indices, self.device)
                values, *_ = self.policy(batch, with_entropy=False)
                for place, part in zip(
                    batch.order, values.cpu().split(list(batch.counts)), strict=True
                ):
                    found[scored[place]] = part.numpy()
        return found


def start_reference(spec: ReferenceSpec) -> Actor:
    """Start a Ray actor of `Reference`. If it dies, Ray restarts it and repeats the calls."""
    gpus = 1.0 if spec.learner.device == "cuda" else 0.0
    environment = passed_on(os.environ) | {
        "OMP_NUM_THREADS": str(spec.learner.num_threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    options = {
        "num_cpus": spec.num_cpus,
        "num_gpus": gpus,
        "max_restarts": -1,
        "max_task_retries": -1,
    }
    return (
        ray.remote(Reference).options(**options, runtime_env={"env_vars": environment}).remote(spec)
    )
