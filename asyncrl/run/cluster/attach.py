"""Checks of a run that uses standing generators, before it leases them."""

from __future__ import annotations

import asyncio

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from asyncrl.config import Config
from asyncrl.config.schema import AttachedGenerators
from asyncrl.contracts.messages import ReplicaStatus
from asyncrl.generation.app import wait_for_generators
from asyncrl.generation.settings import GeneratorApp
from asyncrl.generation.shared_serve import forget_controller
from asyncrl.text.stops import load_stops
from asyncrl.text.tokenizer import load_tokenizer, tokenizer_hash
from asyncrl.weights.manifest import expected_tensors, layout_hash
from asyncrl.weights.stored import weights_hash


class AttachError(RuntimeError):
    """The run cannot use the application. The application is unchanged."""


async def attached_config(config: Config, name: str, tokens: int) -> Config:
    """The config with the generator settings of the standing application.

    Args:
        name: of the Serve application.
        tokens: tokens of the longest request.

    Raises:
        AttachError: this cluster has no such application, asyncrl did not start it, or its
            generators do not fit the run.
        RuntimeError: it is not ready within `generator.start_timeout_s`.
    """
    forget_controller()  # Serve may run again, or no more
    known = (await asyncio.to_thread(serve.status)).applications
    if name not in known:
        raise AttachError(
            f"generator.attach = {name!r}: this Ray cluster has no Serve application of that name"
            f" (it has {sorted(known)}). Deploy one with `serve deploy"
            " serve_configs/generator_cpu.yaml`, and set RAY_ADDRESS to its cluster"
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
            f"generator.attach = {name!r} is not a generator of this version of asyncrl"
            f" ({type(error).__name__}); name another"
        ) from None
    check_fits(config, name, app, status, tokens)
    attached = AttachedGenerators(attach=name).with_engines(app.generator)
    return config.model_copy(update={"generator": attached})


def check_fits(
    config: Config, name: str, app: GeneratorApp, status: ReplicaStatus, tokens: int
) -> None:
    """Raise AttachError unless replicas with this `status` accept the run's versions, and requests
    of at most `tokens` tokens."""
    title = f"generator.attach = {name!r}"
    if app.dtype != config.model.dtype:
        raise AttachError(
            f"{title} uses {app.dtype}, but the run publishes model.dtype ="
            f" {config.model.dtype!r}; make them the same"
        )
    if status.parameters != layout_hash(expected_tensors(config.model.path, config.model.dtype)):
        raise AttachError(
            f"{title} has different parameters from model.path = {config.model.path!r}; deploy it"
            " with the same model"
        )
    _check_adapter(config, title, app, status)
    if status.max_model_len < tokens:
        raise AttachError(
            f"{title} accepts {status.max_model_len} tokens, but the run's longest request has"
            f" {tokens}; raise the application's max_model_len"
        )
    tokenizer, rollout = load_tokenizer(config.model.path), config.rollout
    if status.tokenizer != tokenizer_hash(tokenizer):
        raise AttachError(
            f"{title} has a different tokenizer from model.path = {config.model.path!r}; deploy it"
            " with the same model"
        )
    stops = load_stops(
        config.model.path,
        tokenizer,
        rollout.rollout_stop,
        rollout.rollout_stop_token_ids,
        config.data.chat_template_kwargs,
    )
    ours = sorted(stops.tokens), sorted(stops.strings)
    theirs = list(status.stop_token_ids), list(status.stop_strings)
    if ours != theirs:
        raise AttachError(
            f"{title} ends completions at tokens {theirs[0]} and strings {theirs[1]}, but the run"
            f" at {ours[0]} and {ours[1]}; give the application the same rollout_stop,"
            " rollout_stop_token_ids and chat_template_kwargs"
        )


def _check_adapter(config: Config, title: str, app: GeneratorApp, status: ReplicaStatus) -> None:
    """Raise AttachError unless the generators take the run's adapters, or its whole weights."""
    wanted = None if config.lora is None else config.lora.r
    if (app.max_lora_rank is None) != (wanted is None) or (app.max_lora_rank or 0) < (wanted or 0):
        raise AttachError(
            f"{title} has max_lora_rank = {app.max_lora_rank}, but the run has lora.r = {wanted};"
            " deploy it with that max_lora_rank"
        )
    if wanted is None:
        return  # the first version replaces all weights
    if app.max_loras < config.max_loras:
        raise AttachError(
            f"{title} has max_loras = {app.max_loras}, but a run with staleness.max_staleness ="
            f" {config.staleness.max_staleness} uses {config.max_loras} adapters at a time; deploy"
            f" it with max_loras: {config.max_loras}, or lower max_staleness"
        )
    # The replica reads its files at its start, and the run's may be on another node.
    if status.base_weights != weights_hash(config.model.path):
        raise AttachError(
            f"{title} has other weights under its adapters ({app.model!r}) than model.path ="
            f" {config.model.path!r}, or the same in other files; deploy it with the same files"
        )
