"""The checks of a run before anything is allocated: model, data, rewards, limits, memory and
disk."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from asyncrl.config import Config, ConfigError, RunSettings, explain
from asyncrl.generation.model_checks import check_share, check_workers
from asyncrl.observe.sinks import missing_packages, wandb_asks_for_a_key
from asyncrl.preflight.machine import starts_ray_here
from asyncrl.preflight.plan.text import Plan
from asyncrl.preflight.resources.adapter import check_adapter, run_outline
from asyncrl.preflight.resources.disk import disks, refuse_full
from asyncrl.preflight.resources.gpus import Gpus, refuse_small_gpus
from asyncrl.preflight.resources.model_limits import check_kv_cache, model_context
from asyncrl.preflight.resources.needs import logical_cpus
from asyncrl.preflight.specs import data_spec
from asyncrl.preflight.trials.teacher import check_teacher
from asyncrl.text.round_trip import refuse_lossy
from asyncrl.text.stops import Stops, load_stops
from asyncrl.text.tokenizer import load_tokenizer
from asyncrl.weights.outline import Outline, outline

if TYPE_CHECKING:
    from asyncrl.data.length_limits import LengthReport


def make_plan(config: Config, gpus: Gpus | None = None) -> Plan:
    """Check everything that can be checked without allocating resources.

    Args:
        gpus: those of the machines that the run is planned for. None: this machine, unless there
            is a cluster at RAY_ADDRESS.

    Raises:
        ConfigError: the model, the data or a reward cannot be used, a length does not fit, or
            shared memory, a GPU or disk space is too small.
    """
    from asyncrl.data.prompts import check_prompts

    # Raises if the run directory would be deleted with the Ray job.
    _ = config.run_directory
    context = model_context(config)
    try:
        load_tokenizer(config.model.path)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_heads(config)
    check_kv_cache(config, context)
    teacher = check_teacher(config)
    if teacher is None and config.algorithm.has_reference:
        _check_reference(config)
    report = check_prompts(data_spec(config))
    truncation = {"data.train": report.truncation}
    truncation |= _check_evaluation(config, context)
    if config.warm_start is not None:
        _check_pieces(config, context)
        truncation |= {
            f"supervised rows of {field}": rows for field, rows in _check_warm_start(config).items()
        }
    sandbox = _check_sandbox(config)
    _check_rewards(config)
    check_sinks(config)
    stops = _checked_stops(config)
    version = version_outline(config)
    check_adapter(config, version)
    found = disks(config, version.nbytes(config.model.dtype))
    plan = Plan(
        config,
        logical_cpus(config),
        shutil.disk_usage("/dev/shm").free if gpus is None and starts_ray_here() else None,
        context,
        report,
        truncation,
        stops,
        version,
        sandbox,
        found,
        teacher,
        elsewhere=gpus is not None,
    )
    free = plan.shared_memory_free
    if free is not None and plan.shared_memory_needed > free:
        raise ConfigError(
            f"/dev/shm has {free >> 20} MiB free, and two versions in the object"
            f" store plus {config.engines.num_replicas} staged versions need"
            f" {plan.shared_memory_needed >> 20} MiB; lower generator.num_replicas or enlarge"
            " /dev/shm"
        )
    refuse_full(config, found)
    refuse_small_gpus(config, plan.weights_bytes, gpus)
    return plan


def _check_rewards(config: Config) -> None:
    from asyncrl.rewards.builtin import check_builtin
    from asyncrl.rewards.contract import RewardError, find_reward

    for name, reward in config.reward.functions.items():
        try:
            find_reward(reward.function)
            check_builtin(reward.function, reward.arguments, config.reward.deadline_s)
        except RewardError as error:
            raise ConfigError(f"reward.functions.{name}.function: {error}") from None
        except ValidationError as error:
            raise ConfigError(f"reward.functions.{name}.arguments: {explain(error)}") from None
        except ValueError as error:
            raise ConfigError(f"reward.functions.{name}: {error}") from None


def check_sinks(config: RunSettings) -> None:
    if missing := missing_packages(config.observe.sinks):
        raise ConfigError(
            f"observe.sinks names {missing[0]}, which is not installed; run `pip install"
            f" 'asyncrl[{missing[0]}]'`, or remove it"
        )
    if host := wandb_asks_for_a_key(config.observe.sinks, os.environ):
        raise ConfigError(
            f"observe.sinks names wandb, and no key for {host} was found; set WANDB_API_KEY, run"
            " `wandb login`, set WANDB_MODE=offline, or remove it"
        )


def _checked_stops(config: Config) -> Stops:
    """The stop tokens and strings of the model's tokenizer and the settings."""
    rollout = config.rollout
    try:
        tokenizer = load_tokenizer(config.model.path)
        refuse_lossy(tokenizer, config.model.path)
        return load_stops(
            config.model.path,
            tokenizer,
            rollout.rollout_stop,
            rollout.rollout_stop_token_ids,
            config.data.chat_template_kwargs,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_sandbox(config: Config) -> str | None:
    """The level at which code will run, tested on this machine or reported by the service. None: no
    sandbox is set."""
    from asyncrl.rewards.code import open_configured
    from asyncrl.sandbox import SandboxError

    settings = config.reward.sandbox
    if settings is None:
        return None
    try:
        return open_configured(settings).level.value
    except (SandboxError, ValueError) as error:
        raise ConfigError(
            f"reward.sandbox.level = {settings.level!r}: {error}; docs/how_to/sandbox.md says what"
            " each level needs"
        ) from None


def _check_evaluation(config: Config, context: int) -> dict[str, LengthReport]:
    """What the length limits do to each evaluation file. Also checks that each set's longest
    request fits the model."""
    from asyncrl.data.prompts import check_prompts

    reports: dict[str, LengthReport] = {}
    fields = {"eval.data": config.eval.data} | {
        f"eval.sets.{name}.data": eval_set.data for name, eval_set in config.eval.sets.items()
    }
    for field, path in fields.items():
        if path is not None:
            reports[field] = check_prompts(data_spec(config), path, field).truncation
    for name, eval_set in config.eval.sets.items():
        longest = config.longest_prompt + (eval_set.max_completion_length or 0)
        if longest > context:
            raise ConfigError(
                f"eval.sets.{name}.max_completion_length = {eval_set.max_completion_length} and the"
                f" longest prompt of {config.longest_prompt} tokens exceed the model's context"
                f" of {context}; lower it"
            )
    return reports


def version_outline(config: RunSettings) -> Outline:
    """The tensors of a published version. Also checks those of a reference policy. This is the
    last of many small checks, because it imports the transformers model, or waits for a process
    that does."""
    version = run_outline(config)
    if version.refusal is not None:
        raise ConfigError(f"model.path = {config.model.path!r}: {version.refusal}")
    for setting, path in config.models.items():
        if path != config.model.path and (refusal := outline(path).refusal):
            raise ConfigError(f"{setting} = {path!r}: {refusal}")
    return version


def check_heads(config: RunSettings) -> None:
    """Check that ranks that share rows, and an engine's workers, can split the model evenly.
    Learner and engine check models whose config uses other names for its sizes."""
    tree = json.loads((Path(config.model.path) / "config.json").read_text())
    text = tree.get("text_config", tree)
    heads, model = text.get("num_attention_heads"), f"model.path = {config.model.path!r}"
    if not heads or not isinstance(heads, int):
        return  # some models have lists, with a size for each layer
    divisors = [size for size in range(1, heads + 1) if heads % size == 0]
    shares = config.learner.sequence_parallel_size
    sizes = f"{heads} attention heads"
    check_share("learner.sequence_parallel_size", shares, divisors, sizes, model)
    if isinstance(config, Config):
        check_workers(text, config.engines, model)


def _check_reference(config: Config) -> None:
    """Check that the reference policy has the same tokens as the model."""
    path, setting = config.reference_path, config.reference_setting
    model_context(config, path, setting)
    if (
        path != config.model.path
        and load_tokenizer(path).get_vocab() != load_tokenizer(config.model.path).get_vocab()
    ):
        raise ConfigError(
            f"{setting} = {path!r} has a different vocabulary from model.path ="
            f" {config.model.path!r}; use a reference with the same tokenizer"
        )


def _check_pieces(config: Config, context: int) -> None:
    """Check that a piece of a supervised row, which may fill a micro-batch, fits the model."""
    if (
        config.warm_start
        and config.warm_start.splits
        and config.learner.max_tokens_per_row > context
    ):
        raise ConfigError(
            "warm_start.packing_strategy: completion_policy = 'split' creates pieces of up to"
            " learner.max_tokens_per_gpu * sequence_parallel_size ="
            f" {config.learner.max_tokens_per_row} tokens, above the model's context of {context};"
            " lower learner.max_tokens_per_gpu, or use truncate or drop"
        )


def _check_warm_start(config: Config) -> dict[str, LengthReport]:
    """What the length limits do to the supervised rows of both settings."""
    from asyncrl.data.supervised import read_supervised

    assert config.warm_start is not None and config.eval.data is not None
    settings = {"warm_start.data": config.warm_start.data, "eval.data": config.eval.data}
    return {
        field: read_supervised(data_spec(config), data, field)[1]
        for field, data in settings.items()
    }
