"""The checks of a run on a dataset before anything is allocated, and its plan."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from asyncrl.algorithms.schedules import BatchSizes, rows_at
from asyncrl.config import ConfigError, OfflineConfig, RewardModelConfig, SftConfig
from asyncrl.data.mixture import Order
from asyncrl.data.offline_checks import refuse_idle
from asyncrl.data.offline_report import OfflineReport
from asyncrl.data.offline_rows import check_offline_rows, write_offline_rows
from asyncrl.data.rendering import Data
from asyncrl.data.spec import RowsFor
from asyncrl.data.token_file import TokenFile, open_token_file
from asyncrl.models.supported import chosen_packing
from asyncrl.preflight.plan.batch_sizes import batch_sizes
from asyncrl.preflight.plan.notes import counted, gpus_here, notes_text, plan_notes
from asyncrl.preflight.plan.plan import check_heads, check_sinks, version_outline
from asyncrl.preflight.resources.adapter import adapter_text, check_adapter, trained_elements
from asyncrl.preflight.resources.disk import Disk, disk_text, disks, refuse_full
from asyncrl.preflight.resources.gpus import Gpus, refuse_small_gpus
from asyncrl.preflight.resources.model_limits import model_context
from asyncrl.preflight.specs import offline_data_spec
from asyncrl.runtime.files.opening import make_directory, replace_text
from asyncrl.sandbox.machine import usable_cpus
from asyncrl.text.stops import load_stops
from asyncrl.text.tokenizer import load_tokenizer
from asyncrl.weights.outline import Outline

ORDER_FILE = "order.json"
"""File beside the token rows with the fields of their `Order` and the checksums of the rows."""


@dataclass(frozen=True)
class OfflinePlan:
    """Everything that `asyncrl plan` prints, and what the run needs to know about its rows."""

    config: OfflineConfig
    """With max_steps filled in."""
    context: int
    train: OfflineReport
    held_out: OfflineReport | None
    version: Outline
    disks: tuple[Disk, ...]
    batch_sizes: BatchSizes
    """Rows of each applied step: other ones before `batch_size` if a resume changed it."""
    elsewhere: bool = False
    """Whether the plan is for machines with other GPUs (`--gpu`)."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.last_step

    @cached_property
    def order(self) -> Order:
        """The order that maps ordinals to training rows."""
        return _order(self.config, self.train)

    def write_rows(self, directory: Path) -> tuple[TokenFile, TokenFile | None]:
        """Write the token rows and their order. Files of an earlier attempt are replaced by equal
        ones.

        Raises:
            ConfigError: the data has changed since the plan was made.
        """
        make_directory(directory)
        config, order = self.config, self.order
        fields = {"rows": order.rows, "weights": order.weights, "seed": order.seed}
        train = self._written(directory / "train.arrow", config.data.train, "data.train")
        if train.rows != self.train.rows:
            raise ConfigError(
                f"data.train gave {train.rows} rows, and {self.train.rows} when the run was"
                " planned; restore the files"
            )
        held_out = (
            self._written(directory / "held_out.arrow", config.eval.data, "eval.data")
            if config.eval.data is not None
            else None
        )
        sums = {"sha256": train.content_hash} | (
            {} if held_out is None else {"held_out_sha256": held_out.content_hash}
        )
        replace_text(
            directory / ORDER_FILE, json.dumps({**fields, "shuffle": order.shuffle, **sums})
        )
        return train, held_out

    def _written(self, path: Path, data: Data, field: str) -> TokenFile:
        spec = offline_data_spec(self.config)
        most = self.config.eval.max_rows if field == "eval.data" else None
        write_offline_rows(path, spec, data, field, rows_for(self.config), most)
        file = open_token_file(path)
        assert file is not None
        return file

    def truncation_metrics(self) -> dict[str, float]:
        """What the limits did, as `truncation/<file>/<count>`."""
        reports = {"data.train": self.train, "eval.data": self.held_out}
        return {
            f"truncation/{file}/{name}": float(count)
            for file, report in reports.items()
            if report is not None
            for name, count in report.metrics().items()
        }

    def config_text(self) -> str:
        """All settings with their values."""
        return f"# resolved config\n{yaml.safe_dump(self.config.dump(), sort_keys=False).rstrip()}"

    def arithmetic(self) -> str:
        """Rows, steps and epochs."""
        config, rows, unit = self.config, self.order.epoch, self.unit
        epochs = rows_at(self.steps, self.batch_sizes) / rows
        return (
            f"# objective {config.objective.name}\n  {rows:,} {unit} per epoch; batch_size"
            f" {config.batch_size} {unit} per step; {self.steps} steps = {epochs:.2f} epochs"
        )

    @property
    def unit(self) -> str:
        """What a step counts."""
        return "pairs" if self.config.has_pairs else "rows"

    def objective_text(self) -> str:
        """The loss and its settings."""
        chosen = self.config.objective
        if isinstance(chosen, SftConfig):
            return (
                "# loss\n  next-token prediction, mean over the step's target tokens; packing"
                f" {chosen.packing_strategy}"
            )
        if isinstance(chosen, RewardModelConfig):
            center = chosen.center_coef
            around = f", squared sum of both scores {center:g}" if center else ""
            return f"# loss\n  Bradley-Terry on the scores of both sides{around}"
        settings = {
            name.replace("_", " "): value
            for name, value in chosen.loss.model_dump().items()
            if name != "name" and value
        } | ({"next-token loss on chosen sides": chosen.ce_coef} if chosen.ce_coef else {})
        shown = "".join(f", {name} {_short(value)}" for name, value in settings.items())
        reference = f" against {self.config.reference_path}" if chosen.has_reference else ""
        return f"# loss\n  {chosen.loss.name}{shown}{reference}"

    def rows_text(self) -> str:
        """What the limits did to each file, and the first row with its trained tokens marked."""
        lines = [f"  data.train: {_forms_and_rows(self.train)}"]
        if self.held_out is not None:
            lines.append(f"  eval.data: {_forms_and_rows(self.held_out)}")
            if not set(self.held_out.forms) <= set(self.train.forms):
                lines.append(
                    "  eval.data has another form than data.train, so their losses are not of the"
                    " same kind of tokens"
                )
        lines += [f"  {note}" for note in self.train.notes]
        sides = " / ".join(map(repr, self.train.first))
        lines.append(f"  first row, trained tokens in ⟦ ⟧: {sides}")
        return "\n".join(["# rows", *lines])

    def brief(self) -> str:
        """Six lines: the run, the model, the data, the loss and the learner. Notes follow."""
        config, learner = self.config, self.config.learner
        lines = {
            "run": (
                f"{config.run_directory}, {self.steps} steps, a checkpoint every"
                f" {config.checkpoint.every_steps}"
            ),
            "model": f"{config.model.path}, {self._trained():,} elements trained",
            "data": _forms_and_rows(self.train),
            "batch": self.arithmetic().splitlines()[1].strip(),
            "loss": self.objective_text().splitlines()[1].strip(),
            "learner": (
                f"{learner.world_size} rank(s) on {learner.device}, learning rate"
                f" {config.learning_rate:g}, {learner.max_tokens_per_row} tokens per row"
            ),
        }
        named = [*lines.items(), *(("note", note) for note in self.notes)]
        return "\n".join(f"{name:<9}{text}" for name, text in named)

    @property
    def notes(self) -> list[str]:
        """Settings that are probably not meant."""
        return plan_notes(self.config, self.version, None if self.elsewhere else gpus_here())

    def _trained(self) -> int:
        version = self.version
        return version.trained if self.config.lora is None else trained_elements(version)

    def text(self) -> str:
        """The whole plan, for people."""
        return "\n\n".join(
            [
                self.arithmetic(),
                self.objective_text(),
                self.learner_text(),
                *filter(None, [adapter_text(self.config, self.version)]),
                self.cpu_table(),
                disk_text(self.disks),
                self.rows_text(),
                *notes_text(self.notes),
            ]
        )

    def learner_text(self) -> str:
        """How the learner takes the rows."""
        config, learner = self.config, self.config.learner
        tree = json.loads((Path(config.model.path) / "config.json").read_text())
        packed = chosen_packing(tree, learner.packing) == "rows"
        how = (
            f"packed into rows of at most {learner.max_tokens_per_row} tokens"
            if packed
            else "one sequence per forward pass"
        )
        return (
            f"# learner\n  {how}; {learner.world_size} rank(s) on {learner.device}; learning rate"
            f" {config.learning_rate:g} ({learner.schedule.name}, {learner.schedule.warmup_steps}"
            f" warm-up steps); longest sequence {self.train.longest} of {self.context} tokens\n"
            "  tensors of the checkpoint that are left out because the model does not use them:"
            f" {counted(self.version.left_out)}"
        )

    def cpu_table(self) -> str:
        """Logical CPUs of each part."""
        config = self.config
        parts = [("learner ranks", config.learner.world_size, config.learner.num_cpus)]
        if (compared := config.compared) is not None:
            parts.append(("reference policy (before training)", 1, compared.ref_num_cpus))
        rows = [
            f"  {name:<36}{count:>4} x {cpus:<5g} = {count * cpus:5.2f}"
            for name, count, cpus in parts
        ]
        total = math.fsum(count * cpus for _, count, cpus in parts)
        last = f"  {'total':<48} = {total:5.2f}   (usable here: {usable_cpus()})"
        return "\n".join(["# logical CPUs", *rows, last])


def make_offline_plan(config: OfflineConfig, gpus: Gpus | None = None) -> OfflinePlan:
    """Check everything that can be checked without allocating resources. Reads and tokenizes all
    rows.

    Args:
        gpus: those of the machines that the run is planned for. None: this machine, unless there
            is a cluster at RAY_ADDRESS.

    Raises:
        ConfigError: the model or the data cannot be used, or a GPU or disk space is too small.
    """
    # Raises if the run directory would be deleted with the Ray job.
    _ = config.run_directory
    context = model_context(config)
    try:
        load_stops(  # the export names them
            config.model.path,
            load_tokenizer(config.model.path),
            variables=config.data.chat_template_kwargs,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_heads(config)
    check_sinks(config)
    _check_reference(config)
    spec = offline_data_spec(config)
    train = check_offline_rows(spec, config.data.train, "data.train", rows_for(config))
    held_out = (
        check_offline_rows(
            spec, config.eval.data, "eval.data", rows_for(config), config.eval.max_rows
        )
        if config.eval.data is not None
        else None
    )
    reports = {"data.train": train} | ({"eval.data": held_out} if held_out is not None else {})
    refuse_idle(spec, reports)
    _refuse_single_completions(config, reports)
    epoch = _order(config, train).epoch
    if config.batch_size > epoch:
        raise ConfigError(
            f"batch_size = {config.batch_size} is above the {epoch} rows of an epoch of data.train,"
            " so a step would train rows twice; lower it, or add rows"
        )
    sizes = ((0, config.batch_size),) if config.max_steps else batch_sizes(config)
    before = sizes[-1][0]
    steps = config.steps(epoch, before, rows_at(before, sizes))
    config = config.model_copy(update={"max_steps": steps})
    version = version_outline(config)
    check_adapter(config, version)
    found = disks(config, version.nbytes(config.model.dtype))
    refuse_full(config, found)
    refuse_small_gpus(config, version.nbytes(config.model.dtype), gpus)
    return OfflinePlan(
        config, context, train, held_out, version, found, sizes, elsewhere=gpus is not None
    )


def _refuse_single_completions(config: OfflineConfig, reports: Mapping[str, OfflineReport]) -> None:
    """Refuse a file with one completion for KTO, whose baseline would pair it with itself."""
    for field, report in reports.items():
        if config.is_kto and report.rows == 1:
            raise ConfigError(
                f"{field} gives 1 completion, and KTO's baseline pairs each prompt with the"
                " completion of another row; give at least 2"
            )


def rows_for(config: OfflineConfig) -> RowsFor:
    """What the token rows are for."""
    return "kto" if config.is_kto else config.objective.name


def _order(config: OfflineConfig, train: OfflineReport) -> Order:
    weights = tuple(source.weight for source in train.sources if source.weight is not None)
    rows = tuple(source.rows for source in train.sources)
    return Order(rows, weights or None, config.seed, config.data.shuffle)


def _short(value: object) -> str:
    """A setting's value for people."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _forms_and_rows(report: OfflineReport) -> str:
    return f"{', '.join(dict.fromkeys(report.forms))}: {report.text()}"


def _check_reference(config: OfflineConfig) -> None:
    """Check that the reference policy has the same tokens as the model."""
    if config.compared is None or config.compared.ref_load is None:
        return
    model_context(config, config.reference_path, "objective.ref_load")
    if (
        load_tokenizer(config.reference_path).get_vocab()
        != load_tokenizer(config.model.path).get_vocab()
    ):
        raise ConfigError(
            f"objective.ref_load = {config.reference_path!r} has a different vocabulary from"
            f" model.path = {config.model.path!r}; use a reference with the same tokenizer"
        )
