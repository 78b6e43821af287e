"""A run that uses generators which stand already: what has to hold before it may lease them."""

from __future__ import annotations

import asyncio

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from asyncrl.config import Config
from asyncrl.contracts.messages import ReplicaStatus
from asyncrl.generation.app import wait_for_generators
from asyncrl.generation.settings import GeneratorApp
from asyncrl.text.stops import load_stops
from asyncrl.text.tokenizer import load_tokenizer, tokenizer_hash
from asyncrl.weights.manifest import expected_tensors, layout_hash

__all__ = ["AttachError", "attached_config", "check_fits"]


class AttachError(RuntimeError):
    """The run cannot use the application. Nothing has been changed."""


async def attached_config(config: Config, name: str, tokens: int) -> Config:
    """The config with the standing application's own generator settings in place of the defaults.

    Args:
        tokens: of the longest request.

    Raises:
        AttachError: there is no such application on this cluster, it is none of ours, or its
            generators do not fit the run.
        RuntimeError: it is not up within `generator.start_timeout_s`.
    """
    known = (await asyncio.to_thread(serve.status)).applications
    if name not in known:
        raise AttachError(
            f"generator.attach = {name!r}: this Ray cluster has no Serve application of that name"
            f" (it has {sorted(known)}); deploy one with `serve deploy"
            " serve_configs/generator_cpu.yaml`, and start the run with RAY_ADDRESS set to its"
            " cluster"
        )
    await wait_for_generators(name, config.start_timeout_s)
    try:
        status = await serve.get_app_handle(name).status.remote()
        app = GeneratorApp.model_validate(status.app)
    except (
        ray.exceptions.RayTaskError,
        RayServeException,
        AttributeError,
        TypeError,
        ValueError,
    ) as error:
        raise AttachError(
            f"generator.attach = {name!r} is no generator of this version of asyncrl"
            f" ({type(error).__name__}); name another"
        ) from None
    check_fits(config, name, app, status, tokens)
    return config.model_copy(
        update={"generator": app.generator.model_copy(update={"attach": name})}
    )


def check_fits(
    config: Config, name: str, app: GeneratorApp, status: ReplicaStatus, tokens: int
) -> None:
    """Raise AttachError unless replicas of such a `status` can take the run's requests, of `tokens`
    at most, and its versions."""
    title = f"generator.attach = {name!r}"
    if app.dtype != config.model.dtype:
        raise AttachError(
            f"{title} holds {app.dtype}, the run publishes model.dtype = {config.model.dtype!r};"
            " make them the same"
        )
    if status.parameters != layout_hash(expected_tensors(config.model.path, config.model.dtype)):
        raise AttachError(
            f"{title} has other parameters than model.path = {config.model.path!r}; deploy it with"
            " the same model"
        )
    if status.max_model_len < tokens:
        raise AttachError(
            f"{title} takes {status.max_model_len} tokens, the run's longest request has"
            f" {tokens}; raise the application's max_model_len"
        )
    tokenizer, rollout = load_tokenizer(config.model.path), config.rollout
    if status.tokenizer != tokenizer_hash(tokenizer):
        raise AttachError(
            f"{title} has another tokenizer than model.path = {config.model.path!r}; deploy it with"
            " the same model"
        )
    stops = load_stops(
        config.model.path, tokenizer, rollout.rollout_stop, rollout.rollout_stop_token_ids
    )
    ours = sorted(stops.tokens), sorted(stops.strings)
    theirs = list(status.stop_token_ids), list(status.stop_strings)
    if ours != theirs:
        raise AttachError(
            f"{title} ends completions at tokens {theirs[0]} and strings {theirs[1]}, the run at"
            f" {ours[0]} and {ours[1]}; give the application the same rollout_stop and"
            " rollout_stop_token_ids"
        )
