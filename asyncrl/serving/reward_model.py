"""The reward model application: a sequence classifier that scores prompts with completions, through
its Serve handle and over HTTP.

    request → rows (token ids) → batches of concurrent requests' rows → one forward pass each
"""

# No postponed annotations here: Serve reads those of the routes and of the builder.

import asyncio
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Literal

import ray
import torch
from fastapi import FastAPI
from ray import serve

from asyncrl.serving.building import checked_settings
from asyncrl.serving.http import api_key, refuse_open_host
from asyncrl.serving.proxies import bound_host, nodes
from asyncrl.serving.reward_checks import check_reward_app
from asyncrl.serving.reward_settings import RewardModelApp
from asyncrl.serving.row_batches import RowBatches
from asyncrl.serving.score_routes import score_routes
from asyncrl.serving.score_rows import ScoreRows

logger = logging.getLogger(__name__)

DEPLOYMENT = "RewardModel"
MAX_ONGOING_REQUESTS = 1000
"""Requests that one replica accepts. The others wait at their callers."""


class RewardModel:
    """One replica. Serve runs all its methods on one event loop."""

    def __init__(self, app: dict[str, object]) -> None:
        """Load the model.

        Raises:
            ValueError: `model` is not the directory of a reward model. The message is one line.
        """
        # transformers takes seconds to import, and the builder does not need it.
        from asyncrl.serving.classifier import Classifier

        self.settings = settings = RewardModelApp.model_validate(app)
        device: Literal["cpu", "cuda"] = "cuda" if settings.device == "cuda" else "cpu"
        if device == "cpu":
            torch.set_num_threads(settings.threads)
        self._classifier = Classifier(settings.model, settings.dtype, device)
        context = self._classifier.context
        most = settings.max_tokens or context
        if most > context:
            raise ValueError(
                f"max_tokens = {most} is above the context of {context} tokens of model ="
                f" {settings.model!r}; lower it"
            )
        self._rows = ScoreRows(settings.model, self._classifier.vocabulary, most)
        self._encoding = asyncio.Lock()
        self._batches = RowBatches(
            self._scores,
            settings.max_batch_size,
            settings.max_batch_tokens,
            settings.batch_wait_s,
        )
        self._broken: str | None = None
        self.model_entry: dict[str, object] = {
            "id": settings.model_name,
            "max_model_len": most,
            "tokenizer": self._rows.tokenizer_hash,
        }

    async def score(
        self,
        prompts: object = None,
        completions: object = None,
        complete: object = None,
        token_ids: object = None,
    ) -> list[float | None]:
        """The score of each sequence; None where it is not finite. See `ScoreRows.rows` for the
        arguments.

        Raises:
            InvalidRequestError: one line with the argument and the fix.
        """
        async with self._encoding:  # each occupies a core, and much memory for long texts
            rows = await asyncio.to_thread(
                self._rows.rows, prompts, completions, complete, token_ids
            )
        scores = await self._batches.scores(rows)
        if lost := sum(not math.isfinite(score) for score in scores):
            logger.warning("%d of %d scores are not finite", lost, len(scores))
        return [score if math.isfinite(score) else None for score in scores]

    def check_health(self) -> None:
        """Raise RuntimeError if the model cannot compute any more. Serve then replaces the
        replica."""
        if self._broken is not None:
            raise RuntimeError(self._broken)

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        try:
            return self._classifier.scores(rows)
        except torch.OutOfMemoryError:
            logger.error(
                "no memory for %d sequences of up to %d tokens; lower max_batch_size or max_tokens",
                len(rows),
                max(map(len, rows)),
            )
            raise
        except Exception as error:
            # After an error of a GPU, all later calls of the process fail.
            self._broken = f"a forward pass failed: {type(error).__name__}"
            raise


@serve.ingress()
class HttpRewardModel(RewardModel):
    """`RewardModel` with the routes of `asyncrl.serving.score_routes`."""

    def __init__(self, app: dict[str, object]) -> None:
        # Check this first: loading a model takes long.
        self._key = api_key(dict(os.environ))
        refuse_open_host(bound_host(), self._key, nodes())
        super().__init__(app)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the routes. Serve calls this after the constructor."""
        return score_routes(self, self._key)


def build_reward_app(args: Mapping[str, object] | RewardModelApp) -> serve.Application:
    """The application that `serve deploy` builds from YAML. It has HTTP routes if `http` is set.

    Raises:
        RayServeException: one line with the setting, its value and the fix. Serve shows it.
    """
    app = checked_settings(RewardModelApp, args, check_reward_app)
    chosen = app.on("cuda" if app.device == "cuda" or has_gpu() else "cpu")
    options: dict[str, object] = {"num_cpus": chosen.num_cpus}
    if chosen.device == "cuda":
        options["num_gpus"] = 1
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=chosen.num_replicas,
        ray_actor_options=options,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=20,
        max_constructor_retry_count=2,
    )(HttpRewardModel if chosen.http else RewardModel)
    return deployment.bind(chosen.model_dump())


def has_gpu() -> bool:
    """Whether the Ray cluster has a GPU; without a cluster, whether this machine has one."""
    if ray.is_initialized():
        gpus: float = ray.cluster_resources().get("GPU", 0.0)
        return gpus >= 1
    return torch.cuda.is_available()
