"""What a config asks for, before anything is allocated: batch arithmetic, placement, room in shared
memory, model and prompts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from asyncrl.config import Config, ConfigError, explain
from asyncrl.config.derived import derived_settings
from asyncrl.config.rules import length_text
from asyncrl.models.supported import (
    NO_SHARES,
    chosen_packing,
    keeps_state,
    support,
    uniform_rope_tokens,
)
from asyncrl.observe.sinks import missing_packages, wandb_asks_for_a_key
from asyncrl.preflight.disk import Disk, disks, refuse_full
from asyncrl.preflight.evaluation import evaluation_text
from asyncrl.preflight.resources import Part, logical_cpus, placement_text
from asyncrl.preflight.served import refusal, unusable
from asyncrl.preflight.specs import data_spec
from asyncrl.text.stops import Stops, load_stops
from asyncrl.text.tokenizer import load_tokenizer, refuse_lossy
from asyncrl.weights.published import Outline, outline
from asyncrl.weights.stored import CheckpointFilesError, stored_files

if TYPE_CHECKING:
    from asyncrl.data.length_limits import LengthReport
    from asyncrl.data.prompts import PromptReport

__all__ = ["Part", "Plan", "logical_cpus", "make_plan", "model_context"]

BRIEF_CHARACTERS = 60
"""Characters of the first prompt in the brief plan."""
KV_BLOCK = 128
"""Tokens of a block of vLLM's KV cache on CPU."""
SHOWN = {
    ("ppo", "behavior", "none"),
    ("ppo", "learner", "token"),
    ("ppo", "log_linear", "token"),
    ("gspo", "behavior", "none"),
    ("cispo", "behavior", "none"),
    ("reinforce", "learner", "token"),
}
"""(loss, old policy, truncation) of the whole runs in docs/evidence.md."""
SHOWN_WITH = ("grpo", "token_mean")
"""Their advantage and aggregation; none of them has masks, a KL term, a dual clip or an entropy
bonus."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything `asyncrl plan` prints."""

    config: Config
    parts: tuple[Part, ...]
    shared_memory_free: int
    context: int
    prompts: PromptReport
    truncation: dict[str, LengthReport]
    """What the limits do to each file."""
    stops: Stops
    version: Outline
    """What is published."""

    sandbox: str | None = None
    """Level that code runs at; None: no code runs."""

    disks: tuple[Disk, ...] = ()
    """What the run directory's file systems have, and need."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of one published version."""
        return self.version.nbytes(self.config.model.dtype)

    @property
    def shared_memory_needed(self) -> int:
        """Two versions in the object store, and one staging file per replica."""
        return (2 + self.config.generator.num_replicas) * self.weights_bytes

    def config_text(self) -> str:
        """Every setting with its value."""
        return f"# resolved config\n{yaml.safe_dump(self.config.dump(), sort_keys=False).rstrip()}"

    def brief(self) -> str:
        """Ten lines: what is trained on what, and how."""
        config, rollout, learner, generator = (
            self.config,
            self.config.rollout,
            self.config.learner,
            self.config.generator,
        )
        evaluated = (
            f"{', '.join(config.evaluation_sets) or 'no set'}, every {config.eval.every_steps}"
            " steps"
            if config.evaluation_sets
            else "none"
        )
        rewards = ", ".join(
            f"{name} ({one.function}, weight {one.weight:g})"
            for name, one in config.reward.functions.items()
        )
        where = (
            generator.attach
            or f"{generator.replicas_text} on {generator.device},"
            f" {config.max_num_seqs} sequences at once each"
        )
        lines = {
            "run": (
                f"{config.run_directory}, {config.max_steps} steps, a checkpoint every"
                f" {config.checkpoint.every_steps}"
            ),
            "model": (
                f"{config.model.path}, {self.version.trained:,} elements trained, published as"
                f" {config.model.dtype}"
            ),
            "prompts": (
                f"{self.prompts.rows:,} rows used, the longest of {self.prompts.longest} tokens;"
                f" first {_cut(self.prompts.first_text)!r}"
            ),
            "batch": (
                f"{config.groups_per_step} groups x {rollout.n_samples_per_prompt} ="
                f" {config.global_batch_size} trajectories a step"
            ),
            "length": (
                f"at most {config.longest_trajectory} tokens, {rollout.max_completion_length} in"
                f" the completion, in {config.deadline_s:g} s; temperature {rollout.temperature:g}"
            ),
            "staleness": (
                f"{config.staleness.max_staleness} versions at most; {config.max_outstanding}"
                " groups outstanding"
            ),
            "algorithm": algorithm_text(config).splitlines()[1].strip(),
            "learner": (
                f"{learner.world_size} rank(s) on {learner.device}, learning rate"
                f" {learner.learning_rate:g}, {learner.max_tokens_per_row} tokens a row"
            ),
            "generators": f"{where}; {self._kv_cache().splitlines()[1].strip()}",
            "rewards": f"{rewards}; evaluated: {evaluated}",
        }
        return "\n".join(f"{name:<11}{text}" for name, text in lines.items())

    def text(self) -> str:
        """The plan as a person reads it."""
        config = self.config
        return "\n\n".join(
            [
                arithmetic(config),
                rows_text(config),
                algorithm_text(config),
                placement_text(config)
                + no_gpu_text(config, len(list(Path("/dev").glob("nvidia[0-9]*")))),
                self._cpu_table(),
                derived_text(config),
                self._version(),
                self._memory(),
                self._disk(),
                self._kv_cache(),
                self.evaluation_text(),
                self.prompts_text(),
                *self._sandbox_text(),
            ]
        )

    def truncation_metrics(self) -> dict[str, int]:
        """What the limits did, as `truncation/<file>/<count>`."""
        files = {file.replace(" ", "_"): report for file, report in self.truncation.items()}
        return {
            f"truncation/{file}/{name}": count
            for file, report in files.items()
            for name, count in report.metrics().items()
        }

    def _sandbox_text(self) -> list[str]:
        if self.sandbox is None:
            return []
        settings = self.config.reward.sandbox
        where = (
            "here, as on every machine that scores"
            if settings.is_local
            else f"at {settings.service}"
        )
        return [
            f"# sandbox\n  code that the model wrote runs at level {self.sandbox} {where}; asked"
            f" for: {settings.level}"
        ]

    def _cpu_table(self) -> str:
        rows = [
            f"  {part.name:<24}{part.count:>4} x {part.cpus:<5g} = {part.count * part.cpus:5.2f}"
            for part in self.parts
        ]
        total = sum(part.count * part.cpus for part in self.parts)
        return "\n".join(
            [
                "# logical CPUs",
                *rows,
                f"  {'total':<36} = {total:5.2f}   (this machine has {os.cpu_count()})",
            ]
        )

    def _version(self) -> str:
        def some(names: Collection[str]) -> str:
            return f"{len(names)} (first {next(iter(names))})" if names else "none"

        version = self.version
        return (
            f"# published weights\n  {version.trained} elements of {len(version.parameters)}"
            f" parameters, as {self.config.model.dtype} under the checkpoint's names\n  tensors as"
            f" its files have them: {some(version.as_stored)}; left out, as nothing computes with"
            f" them: {some(version.left_out)}"
        )

    def _memory(self) -> str:
        mib = 1 << 20
        replicas = self.config.generator.num_replicas
        return (
            f"# shared memory\n  weights of one version {self.weights_bytes / mib:.1f} MiB; needed"
            f" (2 versions + {replicas} staged) {self.shared_memory_needed / mib:.1f} MiB; free in"
            f" /dev/shm {self.shared_memory_free / mib:.0f} MiB"
        )

    def _disk(self) -> str:
        lines = [
            f"  {' and '.join(map(str, disk.directories))}: needed {disk.needed / (1 << 20):,.1f}"
            f" MiB, free {disk.free / (1 << 20):,.0f} MiB"
            for disk in self.disks
        ]
        return "\n".join(["# disk, for checkpoints and exported models", *lines])

    def _kv_cache(self) -> str:
        """On a GPU the cache is what `gpu_memory_utilization` leaves: the engine says how much."""
        generator = self.config.generator
        width = kv_bytes_per_token(self.config)
        if width is None or generator.device != "cpu" or not generator.own:
            return "# KV cache\n  as the engines find it when they start"
        tokens = kv_tokens(generator.kv_cache_memory_bytes, width)
        return (
            f"# KV cache\n  generator.kv_cache_memory_bytes {generator.kv_cache_memory_bytes} /"
            f" {width} bytes a token = {tokens} tokens a replica,"
            f" {tokens // self.config.longest_trajectory} of the longest trajectories"
        )

    def evaluation_text(self) -> str:
        """The evaluation sets, and what an evaluation does to training."""
        fields = {name: f"eval.sets.{name}.data" for name in self.config.evaluation_sets}
        prompts = {
            name: self.truncation.get(field, self.truncation.get("eval.data"))
            for name, field in fields.items()
        }
        return evaluation_text(
            self.config,
            {name: report.used for name, report in prompts.items() if report is not None},
            self.weights_bytes,
        )

    def prompts_text(self) -> str:
        """What the limits cut and left out, the first prompt as the model sees it, and what ends a
        completion."""
        report = self.prompts
        ids = ", ".join(map(str, report.first_ids[:24])) + (
            ", …" if len(report.first_ids) > 24 else ""
        )
        stops = ", ".join(
            f"{token} ({', '.join(sources)})" for token, sources in self.stops.tokens.items()
        )
        if self.stops.strings:
            stops += f"; stop strings {', '.join(map(repr, self.stops.strings))}"
        repetition = self.config.rollout.repetition
        loop = (
            f"; so does an n-gram of up to {repetition[0]} tokens {repetition[1]} times in a row"
            if repetition
            else ""
        )
        notes = "".join(f"  {note}\n" for note in report.notes)
        sources = (
            sources_text(report, self.config)
            if len(report.sources) > 1 or report.sources[0].files > 1
            else ""
        )
        truncation = "".join(
            f"  {field}: {rows.text()}\n" for field, rows in self.truncation.items()
        )
        return (
            f"# prompts\n{sources}{truncation}  longest prompt {report.longest} tokens; columns for"
            f" the reward: {', '.join(report.columns) or 'none'}\n{notes}  first prompt"
            f" {report.first_text!r}\n  its token ids {ids}\n  stop token ids {stops}{loop}"
        )


def _cut(text: str) -> str:
    return text if len(text) <= BRIEF_CHARACTERS else f"{text[:BRIEF_CHARACTERS]}…"


def make_plan(config: Config) -> Plan:
    """Check what can be checked without allocating anything.

    Raises:
        ConfigError: the model or data cannot be read, the model's parameters could not be
            published, a length does not fit, a reward has no module, or shared memory is too small.
    """
    from asyncrl.data.prompts import check_prompts

    # Refuse a run directory that would be lost before anything looks for a path below it.
    _ = config.run_directory
    context = model_context(config)
    try:
        load_tokenizer(config.model.path)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _check_heads(config)
    _check_kv_cache(config, context)
    if config.algorithm.has_reference:
        _check_reference(config)
    report = check_prompts(data_spec(config))
    truncation = {"data.train": report.truncation}
    truncation |= _check_evaluation(config, context)
    if config.warm_start.data is not None:
        _check_pieces(config, context)
        truncation |= {
            f"supervised rows of {field}": rows for field, rows in _check_warm_start(config).items()
        }
    sandbox = _check_sandbox(config)
    _check_rewards(config)
    _check_sinks(config)
    stops = _checked_stops(config)
    outline = _version_outline(config)
    found = disks(config, outline.nbytes(config.model.dtype))
    plan = Plan(
        config,
        logical_cpus(config),
        shutil.disk_usage("/dev/shm").free,
        context,
        report,
        truncation,
        stops,
        outline,
        sandbox,
        found,
    )
    if plan.shared_memory_needed > plan.shared_memory_free:
        raise ConfigError(
            f"/dev/shm has {plan.shared_memory_free >> 20} MiB free, and two versions in the object"
            f" store plus {config.generator.num_replicas} staged need"
            f" {plan.shared_memory_needed >> 20} MiB; lower generator.num_replicas or enlarge"
            " /dev/shm"
        )
    refuse_full(config, found)
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


def _check_sinks(config: Config) -> None:
    if missing := missing_packages(config):
        raise ConfigError(
            f"observe.sinks names {missing[0]}, which is not installed; pip install"
            f" 'asyncrl[{missing[0]}]', or take it out"
        )
    if host := wandb_asks_for_a_key(config, os.environ):
        raise ConfigError(
            f"observe.sinks names wandb, and there is no key for {host}; set WANDB_API_KEY, run"
            " `wandb login`, set WANDB_MODE=offline, or take it out"
        )


def _checked_stops(config: Config) -> Stops:
    """What ends a completion, by the tokenizer of the model."""
    rollout = config.rollout
    try:
        tokenizer = load_tokenizer(config.model.path)
        refuse_lossy(tokenizer, config.model.path)
        return load_stops(
            config.model.path, tokenizer, rollout.rollout_stop, rollout.rollout_stop_token_ids
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_sandbox(config: Config) -> str | None:
    """The level that code will run at, tried on this machine or asked of the service; None: none is
    asked for."""
    from asyncrl.sandbox import SandboxError, open_sandbox

    settings = config.reward.sandbox
    if settings.level is None:
        return None
    try:
        return open_sandbox(
            settings.level, service=settings.service, python=settings.python, paths=settings.paths
        ).level.value
    except (SandboxError, ValueError) as error:
        raise ConfigError(
            f"reward.sandbox.level = {settings.level!r}: {error}; docs/sandbox.md says what each"
            " level needs"
        ) from None


def _check_evaluation(config: Config, context: int) -> dict[str, LengthReport]:
    """What the limits do to each file that is evaluated on. The longest request of each set must
    fit the model."""
    from asyncrl.data.prompts import check_prompts

    reports: dict[str, LengthReport] = {}
    fields = {"eval.data": config.eval.data} | {
        f"eval.sets.{name}.data": one.data for name, one in config.eval.sets.items()
    }
    for field, path in fields.items():
        if path is not None:
            reports[field] = check_prompts(data_spec(config), path, field).truncation
    for name, one in config.eval.sets.items():
        longest = config.longest_prompt + (one.max_completion_length or 0)
        if longest > context:
            raise ConfigError(
                f"eval.sets.{name}.max_completion_length = {one.max_completion_length} and the"
                f" longest prompt of {config.longest_prompt} tokens are above the model's context"
                f" of {context}; lower it"
            )
    return reports


def sources_text(report: PromptReport, config: Config) -> str:
    """Each source of data.train with its rows and its share of the prompts; a line each."""
    from asyncrl.data.prompts import order_of

    lines = []
    for source, share in zip(
        report.sources, order_of(report, data_spec(config)).shares, strict=True
    ):
        files = "1 file" if source.files == 1 else f"{source.files} files"
        lines.append(
            f"  source {source.name}: {source.rows} rows used, of {files}; {share:.1%} of the"
            " prompts\n"
        )
    return "".join(lines)


def _version_outline(config: Config) -> Outline:
    """What a version has. Of many small checks this is the last: it imports transformers' model, or
    waits for a process that does."""
    version = outline(config.model.path)
    if version.refusal is not None:
        raise ConfigError(f"model.path = {config.model.path!r}: {version.refusal}")
    return version


def _check_heads(config: Config) -> None:
    """Ranks that share rows share the attention heads evenly. A model that counts them under
    another name is asked by the learner itself."""
    tree = json.loads((Path(config.model.path) / "config.json").read_text())
    heads, size = (
        tree.get("text_config", tree).get("num_attention_heads"),
        config.learner.sequence_parallel_size,
    )
    if heads and heads % size:
        fitting = ", ".join(str(divisor) for divisor in range(1, heads + 1) if heads % divisor == 0)
        raise ConfigError(
            f"learner.sequence_parallel_size = {size} does not divide the {heads} attention heads"
            f" of model.path = {config.model.path!r}; use one of {fitting}"
        )


def _check_reference(config: Config) -> None:
    """The reference must read the same tokens as the model."""
    model_context(config, config.reference_path, "algorithm.ref_load")
    if (
        config.algorithm.ref_load is not None
        and load_tokenizer(config.algorithm.ref_load).get_vocab()
        != load_tokenizer(config.model.path).get_vocab()
    ):
        raise ConfigError(
            f"algorithm.ref_load = {config.algorithm.ref_load!r} has another vocabulary than"
            f" model.path = {config.model.path!r}, so its log-probs would be of other tokens; name"
            " a reference with the same tokenizer"
        )


def _check_pieces(config: Config, context: int) -> None:
    """A piece of a supervised row may fill a micro-batch, and must still fit the model."""
    if config.warm_start.splits and config.learner.max_tokens_per_row > context:
        raise ConfigError(
            "warm_start.completion_policy = 'split' makes pieces of up to"
            " learner.max_tokens_per_gpu * sequence_parallel_size ="
            f" {config.learner.max_tokens_per_row} tokens, above the model's context of {context};"
            " lower learner.max_tokens_per_gpu, or use truncate or drop"
        )


def _check_warm_start(config: Config) -> dict[str, LengthReport]:
    """What the limits do to the supervised rows of both settings."""
    from asyncrl.data.supervised import read_supervised

    assert config.warm_start.data is not None and config.eval.data is not None
    settings = {"warm_start.data": config.warm_start.data, "eval.data": config.eval.data}
    return {
        field: read_supervised(data_spec(config), data, field)[1]
        for field, data in settings.items()
    }


def arithmetic(config: Config) -> str:
    """The batch arithmetic, every number with its name."""
    rollout, staleness, learner = config.rollout, config.staleness, config.learner
    bound = (
        f", at most max_length {config.data.max_length},"
        if config.data.max_length is not None
        else ""
    )
    extra = f" + over_sampling {staleness.over_sampling}" if staleness.over_sampling else ""
    return (
        "# batch arithmetic\n  groups per step     = rollout_batch_size"
        f" {rollout.rollout_batch_size} / num_steps_per_rollout {rollout.num_steps_per_rollout} ="
        f" {config.groups_per_step}\n  global_batch_size   = groups per step * n_samples_per_prompt"
        f" {rollout.n_samples_per_prompt} = {config.global_batch_size} trajectories\n  outstanding,"
        f" at most = (max_staleness {staleness.max_staleness} + 1) * groups per step{extra} ="
        f" {config.max_outstanding} groups\n  longest trajectory  = max_prompt_length"
        f" {config.data.max_prompt_length} + max_completion_length"
        f" {rollout.max_completion_length}{bound} = {config.longest_trajectory} tokens\n "
        f" micro-batch, at most = max_tokens_per_gpu {learner.max_tokens_per_gpu} *"
        f" sequence_parallel_size {learner.sequence_parallel_size} = {learner.max_tokens_per_row}"
        f" tokens\n  data-parallel size  = world_size {learner.world_size} / sequence_parallel_size"
        f" {learner.sequence_parallel_size} = {learner.data_parallel_size}"
    )


def derived_text(config: Config) -> str:
    """What the settings became that nobody set, and from what; a line each."""
    lines = [f"  {one.text()}" for one in derived_settings(config)] or [
        "  none: every such setting is set"
    ]
    return "\n".join(["# derived settings (each may be set)", *lines])


def no_gpu_text(config: Config, gpus: int) -> str:
    """What is on cuda where this machine has no such devices; empty if nothing is, or if it has
    some."""
    on_cuda = [
        name
        for name, part in (("learner", config.learner), ("generator", config.generator))
        if part.device == "cuda"
    ]
    if gpus or not on_cuda:
        return ""
    named = " and ".join(f"{name}.device" for name in on_cuda)
    return (
        f"\n  this machine has no GPU, and {named} is cuda: name a cluster that has some by"
        " RAY_ADDRESS, or set device: cpu"
    )


def rows_text(config: Config) -> str:
    """How the learner takes trajectories, and why."""
    tree = json.loads((Path(config.model.path) / "config.json").read_text())
    if chosen_packing(tree, config.learner.packing) == "rows":
        return (
            "# learner rows\n  packed: many trajectories in one row of tokens, each attending to"
            " itself alone"
        )
    asked = "learner.packing: none asks for it, and this model could be packed, which is faster"
    reason = support(tree).reason
    why = f"this model (model_type {tree.get('model_type')!r}) {reason}" if reason else asked
    return (
        "# learner rows\n  unpacked: one trajectory a forward, with the model's own attention,"
        f" because {why}"
    )


def algorithm_text(config: Config) -> str:
    """Advantage, loss and correction in one line; a loss that no whole run of ours has shown to
    learn is called experimental."""
    algorithm = config.algorithm
    correction = [
        f"{name} {value}"
        for name, value in algorithm.correction.model_dump().items()
        if value not in (None, "none", False)
    ]
    if not algorithm.caps:
        correction = [item for item in correction if not item.startswith("cap ")]
    if algorithm.correction.reject_above is None:
        correction = [item for item in correction if not item.startswith("reject_")]
    shown = (algorithm.loss, algorithm.old_policy, algorithm.correction.truncation)
    extras = (
        algorithm.correction.masks,
        algorithm.correction.normalize,
        algorithm.has_reference,
        algorithm.dual_clip,
        algorithm.entropy_coef,
        # The run in the evidence had a lower clip.
        algorithm.loss == "cispo" and algorithm.eps_clip is None,
    )
    plain = (algorithm.advantage, algorithm.loss_aggregation) == SHOWN_WITH and not any(extras)
    note = (
        ""
        if shown in SHOWN and plain
        else (
            "\n  experimental: no whole run has shown that this learns (docs/evidence.md lists"
            " those that have)"
        )
    )
    kind = "corrected" if algorithm.corrected else "uncorrected"
    made_up = ", ".join(correction) or ("the ratio alone" if algorithm.corrected else "none")
    places = {"the reward": algorithm.kl_coef, "the loss": algorithm.kl_loss_coef}
    kl = "".join(
        f"; {value:g} x KL ({algorithm.kl_estimator}) from {config.reference_path} in {place}"
        for place, value in places.items()
        if value
    )
    shuffled = (
        "\n  rewards are shuffled over each step's batch (reward.shuffle): a control that must"
        " learn nothing"
        if config.reward.shuffle
        else ""
    )
    return (
        f"# algorithm\n  advantage {algorithm.advantage}, loss {algorithm.loss} against old policy"
        f" {algorithm.old_policy}, {algorithm.loss_aggregation}; {kind}; correction:"
        f" {made_up}{kl}{note}{shuffled}"
    )


def model_context(config: Config, at: str | None = None, field: str = "model.path") -> int:
    """Longest sequence, in tokens, that the model at `at` (default: model.path), which `field`
    names, takes: with LongRoPE, as far as its short frequencies go.

    Raises:
        ConfigError: no readable checkpoint at model.path, one that the learner cannot train (so),
            or a trajectory could be longer than that.
    """
    path = Path(at or config.model.path)
    try:
        tree: dict[str, Any] = json.loads((path / "config.json").read_text())
    except OSError as error:
        raise ConfigError(
            f"{field} = {str(path)!r}: {error.strerror} (config.json); give a Hugging Face"
            " checkpoint directory"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{field} = {str(path)!r}: config.json is not JSON ({error})") from None
    if why := unusable(tree):
        raise ConfigError(f"{field} = {str(path)!r}: config.json {why}")
    try:
        stored_files(path)
    except CheckpointFilesError as error:
        raise ConfigError(f"{field} = {error}") from None
    try:
        packing = chosen_packing(tree, config.learner.packing)
    except ValueError as error:
        raise ConfigError(f"{field} = {str(path)!r}: {error}") from None
    if at is None and (reason := refusal(tree, config)):
        raise ConfigError(
            f"{field} = {str(path)!r} (model_type {tree.get('model_type')!r}): {reason}"
        )
    if packing == "none" and at is None and config.learner.sequence_parallel_size > 1:
        raise ConfigError(
            f"{field} = {str(path)!r}:"
            f" {NO_SHARES.format(size=config.learner.sequence_parallel_size)}"
        )
    context = int(tree.get("text_config", tree).get("max_position_embeddings") or 1 << 30)
    if config.longest_trajectory > context:
        raise ConfigError(
            f"{length_text(config)} tokens is above the model's context of {context}; lower it, or"
            " set a lower data.max_length"
        )
    uniform = uniform_rope_tokens(tree) or context
    if config.longest_trajectory > uniform:
        raise ConfigError(
            f"{length_text(config)} tokens is above original_max_position_embeddings = {uniform} of"
            f" {field} = {str(path)!r}: its LongRoPE would turn every trajectory of a packed row"
            " with other frequencies as soon as one is longer; lower it, or set a lower"
            " data.max_length"
        )
    return min(context, uniform)


def kv_bytes_per_token(config: Config) -> int | None:
    """Bytes of one token's keys and values in all layers, in the published type; None for a model
    that keeps something else (latent attention) or does not say its sizes."""
    tree = json.loads((Path(config.model.path) / "config.json").read_text())
    tree = tree.get("text_config", tree)
    heads, layers, hidden = (
        tree.get(name) for name in ("num_attention_heads", "num_hidden_layers", "hidden_size")
    )
    every_layer = (
        set(tree.get("layer_types") or ["full_attention"]) == {"full_attention"}
        and not tree.get("num_kv_shared_layers")
        and not keeps_state(tree)
    )
    if tree.get("kv_lora_rank") or not (heads and layers and hidden and every_layer):
        return None
    width = tree.get("head_dim") or hidden // heads
    return (
        2
        * int(layers)
        * int(tree.get("num_key_value_heads") or heads)
        * int(width)
        * (4 if config.model.dtype == "float32" else 2)
    )


def _check_kv_cache(config: Config, context: int) -> None:
    """The longest request must fit the KV cache, or an engine would not start. A GPU's cache is
    what `gpu_memory_utilization` leaves: the engine checks it."""
    width, generator = kv_bytes_per_token(config), config.generator
    if width is None or generator.device != "cpu" or not generator.own:
        return
    held, wanted = (
        kv_tokens(generator.kv_cache_memory_bytes, width),
        min(config.longest_request + 1, context),
    )
    if held < wanted:
        enough = (-(-wanted // KV_BLOCK) + 1) * KV_BLOCK * width
        raise ConfigError(
            f"generator.kv_cache_memory_bytes = {generator.kv_cache_memory_bytes} holds {held}"
            f" tokens of {width} bytes, and the longest request has {wanted}; raise it to {enough}"
            " or more"
        )


def kv_tokens(cache_bytes: int, width: int) -> int:
    """Tokens of so many bytes each that vLLM's cache on CPU holds: whole blocks, one of which it
    keeps for itself."""
    return max(0, cache_bytes // (KV_BLOCK * width) - 1) * KV_BLOCK
