"""The plan as `asyncrl plan` and `asyncrl train` print it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

from asyncrl.config import Config
from asyncrl.config.schema import AttachedGenerators, Mask, SandboxService
from asyncrl.generation.model_checks import kv_tokens
from asyncrl.preflight.plan.evaluation import evaluation_text
from asyncrl.preflight.plan.notes import counted, gpus_here, notes_text, plan_notes
from asyncrl.preflight.plan.sections import (
    algorithm_text,
    arithmetic,
    derived_text,
    environment_text,
    rows_text,
    sources_text,
)
from asyncrl.preflight.resources.adapter import adapter_text, published_bytes
from asyncrl.preflight.resources.disk import Disk, disk_text
from asyncrl.preflight.resources.model_limits import kv_bytes_per_token
from asyncrl.preflight.resources.needs import Part, placement_text
from asyncrl.sandbox.machine import usable_cpus
from asyncrl.text.stops import Stops
from asyncrl.weights.outline import Outline

if TYPE_CHECKING:
    from asyncrl.data.length_limits import LengthReport
    from asyncrl.data.prompts import PromptReport

BRIEF_CHARACTERS = 60
"""Characters of the first prompt that the brief plan shows."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `asyncrl plan` prints."""

    config: Config
    parts: tuple[Part, ...]
    shared_memory_free: int | None
    """Free bytes of /dev/shm; None: the run is on other machines, which are asked at its start."""
    context: int
    prompts: PromptReport
    truncation: dict[str, LengthReport]
    """What the length limits do to each file."""
    stops: Stops
    version: Outline
    """The tensors of a published version."""

    sandbox: str | None = None
    """Level at which code runs; None: no code runs."""

    disks: tuple[Disk, ...] = ()
    """Free and needed space on the file systems of the run directory."""

    teacher: str | None = None
    """What is known of the teacher. None: the run has no teacher."""

    elsewhere: bool = False
    """Whether the plan is for machines with other GPUs (`--gpu`)."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of the whole model as it is published."""
        return self.version.nbytes(self.config.model.dtype)

    @property
    def shared_memory_needed(self) -> int:
        """Two versions in the object store, and one staging file per replica."""
        version = published_bytes(self.config, self.weights_bytes)
        return (2 + self.config.engines.num_replicas) * version

    @property
    def notes(self) -> list[str]:
        """Settings that are probably not meant."""
        return plan_notes(self.config, self.version, None if self.elsewhere else gpus_here())

    def config_text(self) -> str:
        """All settings with their values."""
        return f"# resolved config\n{yaml.safe_dump(self.config.dump(), sort_keys=False).rstrip()}"

    def brief(self) -> str:
        """Ten lines: the model, the data, and the most important settings. Notes follow."""
        config, rollout, learner = self.config, self.config.rollout, self.config.learner
        masks = isinstance(config.staleness.on_stale, Mask)
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
                f" {config.global_batch_size} trajectories per step"
            ),
            "length": (
                f"at most {config.longest_trajectory} tokens, {rollout.max_completion_length} in"
                f" the completion, in {config.deadline_s:g} s; temperature {rollout.temperature:g}"
            ),
            "staleness": (
                f"{config.staleness.max_staleness} versions at most; {config.max_outstanding}"
                " groups outstanding" + ("; older tokens are masked" if masks else "")
            ),
            "algorithm": algorithm_text(config).splitlines()[1].strip(),
            "learner": (
                f"{learner.world_size} rank(s) on {learner.device}, learning rate"
                f" {config.learning_rate:g}, {learner.max_tokens_per_row} tokens per row"
            ),
            "generators": f"{_generators(config)}; {self._kv_cache().splitlines()[1].strip()}",
            "rewards": f"{_rewards(config)}; evaluated: {_evaluated(config)}",
        }
        named = [*lines.items(), *(("note", note) for note in self.notes)]
        return "\n".join(f"{name:<11}{text}" for name, text in named)

    def text(self) -> str:
        """The whole plan, for people."""
        config = self.config
        return "\n\n".join(
            [
                arithmetic(config),
                rows_text(config),
                algorithm_text(config) + (f"\n  {self.teacher}" if self.teacher else ""),
                *environment_text(config),
                placement_text(config),
                self._cpu_table(),
                derived_text(config),
                self._version(),
                *filter(None, [adapter_text(config, self.version)]),
                self._memory(),
                disk_text(self.disks),
                self._kv_cache(),
                self.evaluation_text(),
                self.prompts_text(),
                *self._sandbox_text(),
                *notes_text(self.notes),
            ]
        )

    def truncation_metrics(self) -> dict[str, int]:
        """What the length limits did, as `truncation/<file>/<count>`."""
        files = {file.replace(" ", "_"): report for file, report in self.truncation.items()}
        return {
            f"truncation/{file}/{name}": count
            for file, report in files.items()
            for name, count in report.metrics().items()
        }

    def _sandbox_text(self) -> list[str]:
        settings = self.config.reward.sandbox
        if self.sandbox is None or settings is None:
            return []
        where = (
            f"at {settings.service}"
            if isinstance(settings, SandboxService)
            else "here, and on every machine that runs rewards"
        )
        return [
            f"# sandbox\n  code that the model wrote runs at level {self.sandbox} {where};"
            f" requested: {settings.level}"
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
                f"  {'total':<36} = {total:5.2f}   (usable here: {usable_cpus()})",
            ]
        )

    def _version(self) -> str:
        version = self.version
        return (
            f"# published weights\n  {version.trained} elements of {len(version.parameters)}"
            f" parameters, as {self.config.model.dtype} under the checkpoint's names\n"
            f"  tensors copied from its files unchanged: {counted(version.as_stored)}; left out"
            f" because the model does not use them: {counted(version.left_out)}"
        )

    def _memory(self) -> str:
        mib = 1 << 20
        replicas, free = self.config.engines.num_replicas, self.shared_memory_free
        room = (
            f"free in /dev/shm {free / mib:.0f} MiB"
            if free is not None
            else "the nodes are asked when the run starts"
        )
        return (
            f"# shared memory\n  weights of one version"
            f" {published_bytes(self.config, self.weights_bytes) / mib:.1f} MiB; needed"
            f" (2 versions + {replicas} staged) {self.shared_memory_needed / mib:.1f} MiB; {room}"
        )

    def _kv_cache(self) -> str:
        """On a GPU, the engine reports its cache, which is what `gpu_memory_utilization` leaves."""
        generator = self.config.engines
        width = kv_bytes_per_token(self.config)
        if width is None or generator.device != "cpu" or not self.config.owns_generators:
            return "# KV cache\n  the engines report it when they start"
        tokens = kv_tokens(generator.kv_cache_memory_bytes, width)
        return (
            f"# KV cache\n  generator.kv_cache_memory_bytes {generator.kv_cache_memory_bytes} /"
            f" {width} bytes per token = {tokens} tokens per replica, enough for"
            f" {tokens // self.config.longest_trajectory} of the longest trajectories"
        )

    def evaluation_text(self) -> str:
        """The evaluation sets, and how an evaluation affects training."""
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
        """What the length limits did, the first prompt as the model sees it, and what ends a
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


def _generators(config: Config) -> str:
    generator = config.engines
    workers = generator.workers
    devices = generator.device if workers == 1 else f"{workers} x {generator.device} each"
    if generator.nnodes > 1:
        devices += f", over {generator.nnodes} nodes"
    if isinstance(config.generator, AttachedGenerators):
        return config.generator.attach
    updates = "" if config.lora is not None else f", in_flight: {config.in_flight}"
    return (
        f"{generator.replicas_text} on {devices}, {config.max_num_seqs} concurrent sequences each"
        f"{updates}"
    )


def _rewards(config: Config) -> str:
    return ", ".join(
        f"{name} ({reward.function}, weight {reward.weight:g})"
        for name, reward in config.reward.functions.items()
    )


def _evaluated(config: Config) -> str:
    sets = ", ".join(config.evaluation_sets)
    every = config.eval.every_steps
    when = f"every {every} steps" if every else "before and after training"
    return f"{sets}, {when}" if sets else "none"
