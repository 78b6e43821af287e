"""Finding the checkpoint that an attempt resumes from, and what has changed since it was
written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from asyncrl.algorithms.optimizers import AdamW
from asyncrl.config import ConfigError, RunSettings
from asyncrl.config.aliases import first_moved
from asyncrl.contracts.errors import (
    NoCheckpointError,
    ReferenceLostError,
    UnreadableCheckpointError,
)
from asyncrl.contracts.state import State
from asyncrl.data.sources import files_of
from asyncrl.learning.frozen.reference_files import read_kept
from asyncrl.rundir.checkpoint import REFERENCE, CheckpointStore
from asyncrl.runtime.files.yaml_files import parse_yaml, read_yaml
from asyncrl.weights.stored import CheckpointFilesError, weights_hash

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files that identify a model, without its weights."""
FIXED = {
    "objective.name": "the checkpoint's steps had that objective",
    "seed": "data order and sampling depend on it",
    "data.prompt_column": "ordinals identify the prompts that were read",
    "data.apply_chat_template": "ordinals identify the prompts that were read",
    "data.chat_template_kwargs": "ordinals identify the prompts that were read",
    "data.system_prompt": "ordinals identify the prompts that were read",
    "data.tools": "ordinals identify the prompts that were read",
    "data.tools_column": "ordinals identify the prompts that were read",
    "data.target_column": "ordinals identify the rows that were read",
    "data.loss_on": "the steps so far trained those tokens",
    "data.malformed": "it decides which rows are used, and ordinals count only those",
    "data.unused_keys": "it decides which rows are used, and ordinals count only those",
    "data.shuffle": "data order depends on it",
    "data.max_prompt_length": "it decides which prompts are used, and ordinals count only those",
    "data.prompt_policy": "it decides which prompts are used, and ordinals count only those",
    "data.max_length": "it decides which prompts are used, and ordinals count only those",
    "data.length_policy": "it decides which prompts are used, and ordinals count only those",
    "data.length_policy.side": "the steps so far trained rows that were cut at that side",
    "data.least_reward": "it decides which rows are used, and ordinals count only those",
    "objective.ref_load": "the pairs so far were compared with that reference policy",
    "rollout.temperature": "the waiting groups in the checkpoint were sampled at that temperature",
    "lora": "the checkpoint contains that adapter, or all weights",
    "learner.bf16": "the optimizer's state has that precision",
    "learner.optimizer.name": "the checkpoint contains the state of that optimizer",
}
"""Settings that must not change on a resume → why."""

FIXED_IN_RUN = {
    "environment.function": "the groups so far are of that environment, or of none",
    "algorithm.preference": "the steps so far trained the pairs that it chose",
    "algorithm.reference.update_interval": (
        "the steps so far were trained with the reference of those versions"
    ),
    "algorithm.distillation": "the steps so far learned from that teacher",
    "reward.shuffle": "a control run shuffles the rewards of every step",
}
"""Further ones within a run. A run that starts from another run's checkpoint may change them."""

MAY_CHANGE = ("algorithm.distillation.teacher", "algorithm.distillation.max_failed_groups")
"""Prefixes of settings within those of `FIXED_IN_RUN` that say where and how the teacher answers.
The weights of a local teacher are compared."""

LONGEST = (
    "rollout.max_completion_length",
    "learner.max_tokens_per_gpu",
    "learner.sequence_parallel_size",
)
"""Settings not in `FIXED` that bound a trajectory's length."""

FREE = (
    "resume",
    "name",
    "runs_root",
    *(f"checkpoint.{name}" for name in ("load", "ckpt_step", "save", "on_stop_s")),
)
"""Settings whose changes are not reported: they name folders, or say how long a stop may take."""

SCORED_WITH = (
    *(
        f"environment.{name}"
        for name in (
            "function",
            "agent",
            "command",
            "arguments",
            "variables",
            "stdin",
            "max_turns",
            "deadline_s",
            "turn_s",
            "tool_s",
            "history",
            "train_ends",
        )
    ),
    "reward.functions",
    "reward.sandbox",
    "reward.shuffle",
    "reward.overlong",
    "algorithm.advantage",
    "algorithm.group_filter",
    "algorithm.reference.kl_",
    "algorithm.reference.estimator",
    "algorithm.reference.ref_load",
    "algorithm.distillation",
    *LONGEST,
)
"""Prefixes of the settings that a scored group depends on. If one changes, the waiting groups in
the checkpoint are generated again."""


STAGE = "learner.zero_stage"
FIX = "set it back, or start a new run under another --name (asyncrl export provides these weights)"


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where an attempt begins: a checkpoint, or a new start."""

    checkpoint: Path | None
    """Directory of the checkpoint; None for a new start."""
    state: State | None
    """State of the checkpoint; None for a new start."""
    notes: tuple[str, ...]
    """Lines about what was searched, found and changed."""
    from_attempt: int | None = None
    """The attempt of this run that wrote the checkpoint. None for a new start or another run's
    checkpoint."""
    reference: Path | None = None
    """Folder of the refreshed reference policy to continue with. None: the reference policy begins
    with the weights that the config names."""

    @property
    def trained_tokens(self) -> int:
        """Loss tokens trained before the checkpoint, as counted by the learner."""
        if self.checkpoint is None:
            return 0
        counters = self.checkpoint / "learner" / "counters.json"
        return int(json.loads(counters.read_text())["trained_tokens"]) if counters.exists() else 0


def _steps_of_optimizer(checkpoint: Path) -> int:
    """Applied steps that the optimizer's states in a checkpoint have seen."""
    counters = checkpoint / "learner" / "counters.json"
    return int(json.loads(counters.read_text())["applied"]) if counters.exists() else 0


def find_beginning(
    config: RunSettings, run_id: str | None, saved: bool = False, verified: bool = True
) -> Beginning:
    """Find where the attempt begins. The run's own checkpoints take precedence over
    `checkpoint.load`.

    Args:
        run_id: id of the run; None if its directory is new.
        saved: whether the run has saved checkpoints before.
        verified: whether to read all files of the checkpoint, the data and the models. Without it,
            this takes no time, and finds only what is wrong with settings and names.

    Raises:
        ConfigError: `resume: must`, `ckpt_step` or `checkpoint.load` names a checkpoint that does
            not exist. Or the run's saved checkpoints are gone, or none can be read. Or a setting,
            the data or the model changed in a way that would falsify the run. Or a file may not be
            read.
    """
    try:
        return _beginning(config, run_id, saved, verified)
    except PermissionError as error:
        raise ConfigError(
            f"{error.filename} cannot be read ({error.strerror}); give this user permission to"
            " read it"
        ) from None


def _beginning(config: RunSettings, run_id: str | None, saved: bool, verified: bool) -> Beginning:
    own, load, step = (
        config.checkpoints_directory,
        config.checkpoint.load,
        config.checkpoint.ckpt_step,
    )
    notes: tuple[str, ...] = ()
    if config.resume != "never":
        versions = CheckpointStore(own, keep=1).versions()
        if versions or config.resume == "must":
            # With `load`, a `ckpt_step` that this run lacks refers to the run at `load`.
            step = step if step in versions or load is None else None
            return _own(config, own, step, run_id, verified)
        if saved or (own / "LATEST").exists():
            raise ConfigError(
                "resume: auto would start at version 0 again: this run has saved checkpoints, but"
                f" {own} has no committed one; restore them, set checkpoint.save, or choose another"
                " --name"
            )
        notes = (f"resume {config.resume}: no checkpoint in {own}",)
    elif next(iter(own.glob("step_*/COMMITTED")), None) is not None:
        raise ConfigError(
            f"checkpoint.save = {str(own)!r} has checkpoints of another run; name an empty"
            " directory, or resume from them (--resume must)"
        )
    if load is None:
        return Beginning(None, None, notes)
    found = _loaded(config, load, step, verified)
    return replace(found, notes=(*notes, *found.notes))


def _loaded(config: RunSettings, load: str, step: int | None, verified: bool) -> Beginning:
    """The checkpoint of another run, as the beginning of this one."""
    directory = Path(load) / "checkpoints" if (Path(load) / "checkpoints").is_dir() else Path(load)
    try:
        found = _found(config, directory, step, False, verified)
    except NoCheckpointError as error:
        raise ConfigError(
            f"checkpoint.load: {error}".replace(
                "; start with --resume never or auto",
                "; give a run's directory, or its checkpoints",
            )
        ) from None
    assert found.state is not None
    # The waiting rows belong to another run. This run generates their ordinals again.
    state = replace(found.state, waiting=())
    return Beginning(
        found.checkpoint,
        state,
        (*found.notes, "from another run: its waiting groups are generated again"),
        reference=found.reference,
    )


def _own(
    config: RunSettings, own: Path, step: int | None, run_id: str | None, verified: bool
) -> Beginning:
    try:
        found = _found(config, own, step, True, verified)
    except NoCheckpointError as error:
        raise ConfigError(str(error)) from None
    assert found.state is not None
    if found.state.run_id != run_id:
        raise ConfigError(
            f"{found.checkpoint} belongs to another run (run_id {found.state.run_id}, not"
            f" {run_id or 'this new one'}); to start from it, set checkpoint.load = {own} and"
            " another checkpoint.save"
        )
    return found


def _found(
    config: RunSettings, directory: Path, step: int | None, own: bool, verified: bool
) -> Beginning:
    """The checkpoint in a directory, with notes. Raises NoCheckpointError, or ConfigError like
    `find_beginning`.

    Args:
        own: whether this run wrote it.
    """
    try:
        path, state, passed_over = CheckpointStore(directory, keep=1).find(step, verified)
    except UnreadableCheckpointError as error:
        raise ConfigError(str(error)) from None
    changes = _changes_since(path, config)
    _refuse_falsifying(path, changes, state, config, FIXED | (FIXED_IN_RUN if own else {}))
    if not verified:
        return Beginning(path, state, (), state.attempt)
    _refuse_other_files(path, state, config)
    _refuse_other_weights(path, state, config, own)
    reference = _reference_of(path, state, config, own)
    lines = [f"passed over: {reason}" for reason in passed_over]
    lines += [f"found {path} (version {state.version}, {len(state.waiting)} groups waiting)"]
    lines += [
        f"changed since: {name.removesuffix('.name')} {_short(old)} → {_short(new)}"
        for name, (old, new) in changes.items()
    ]
    why = [name for name, *_ in _with_inner(changes) if name.startswith(SCORED_WITH)]
    if state.waiting and why:
        lines.append(
            f"the {len(state.waiting)} waiting groups are generated again: their scores or lengths"
            f" depend on the old {why[0].removesuffix('.name')}"
        )
        state = replace(state, waiting=())
    return Beginning(path, state, tuple(lines), state.attempt, reference)


def _changes_since(checkpoint: Path, config: RunSettings) -> dict[str, tuple[object, object]]:
    """`config_changes` since the checkpoint. Empty if the checkpoint has no config.yaml.

    Raises:
        ConfigError: an earlier version wrote it, whose settings had other names.
    """
    path = checkpoint / "config.yaml"
    before = read_yaml(path) if path.exists() else None
    if not before:
        return {}
    after = parse_yaml(config_text(config))
    assert isinstance(before, dict) and isinstance(after, dict)
    if (old := first_moved(before)) is not None:
        raise ConfigError(
            f"{checkpoint} is of an earlier asyncrl: its config.yaml has {old}, which has moved;"
            " resume it with that version, or start a new run with model.path: …/hf"
        )
    return config_changes(before, after)


def config_changes(
    before: Mapping[str, object], after: Mapping[str, object], prefix: str = ""
) -> dict[str, tuple[object, object]]:
    """Dotted name → (before, after) for each setting that differs, except those in `FREE`."""
    changes: dict[str, tuple[object, object]] = {}
    for name in [*after, *(name for name in before if name not in after)]:
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changes |= config_changes(old, new, f"{prefix}{name}.")
        elif old != new and prefix + name not in FREE:
            changes[prefix + name] = (old, new)
    return changes


def _with_inner(
    changes: Mapping[str, tuple[object, object]],
) -> Iterator[tuple[str, object, object]]:
    """(name, before, after) of each change, and of each setting in a section that only one side
    has."""
    for name, (old, new) in changes.items():
        yield name, old, new
        if isinstance(old, dict) or isinstance(new, dict):
            before, after = (one if isinstance(one, dict) else {} for one in (old, new))
            inner = config_changes(before, after, f"{name}.")
            yield from ((key, *values) for key, values in inner.items())


def _refuse_falsifying(
    path: Path,
    changes: Mapping[str, tuple[object, object]],
    state: State,
    config: RunSettings,
    unchangeable: Mapping[str, str],
) -> None:
    """Raise ConfigError if a change since the checkpoint would falsify the run.

    Args:
        unchangeable: settings that must not change → why.
    """
    for dotted, old, new in _with_inner(changes):
        name = dotted.removesuffix(".name")
        if name == STAGE and (old := old or 3) == new:  # the only stage before it was a setting
            continue
        fixed = _fixed(dotted, unchangeable)
        if not dotted.startswith(MAY_CHANGE) and fixed is not None:
            made = "without it" if old is None else f"with {_short(old)}"
            raise ConfigError(
                f"{name} = {_short(new)}, but {path} was made {made}, and {unchangeable[fixed]};"
                f" {FIX}"
            )
        converts = name == "learner.world_size" or (name == STAGE and 3 in (old, new))
        if converts and (why := _why_not_converted(path, config, name)):
            raise ConfigError(f"{name} = {new}, but {path} was made with {old}, and {why}; {FIX}")
        if name == "algorithm.advantage" and "gae" in (old, new):
            raise ConfigError(
                f"{name} = {new}, but {path} was made with {old}, and only one of them has a value"
                f" head; {FIX}"
            )
        if name == "objective.loss" and "kto" in (old, new):
            raise ConfigError(
                f"{name} = {new}, but {path} was made with {old}, and only one of them counts"
                f" single completions as rows; {FIX}"
            )
    if state.seed != config.seed:
        raise ConfigError(
            f"seed = {config.seed}, but {path} was made with {state.seed}, and {FIXED['seed']};"
            f" {FIX}"
        )


def _fixed(name: str, unchangeable: Mapping[str, str]) -> str | None:
    """The key of `unchangeable` that a changed setting or section belongs to; None without one."""
    if name == "environment":  # only one of both has sessions, of a function or of an agent
        name = "environment.function"
    return next((key for key in unchangeable if f"{name}.".startswith(f"{key}.")), None)


def _refuse_other_files(path: Path, state: State, config: RunSettings) -> None:
    """Raise ConfigError if the data, or the config or tokenizer of the model, have changed."""
    for field, known, now, what in (
        ("data.train", state.data_hash, data_hash(config), "ordinals identify its rows"),
        (
            "model.path",
            state.model_hash,
            model_hash(config),
            "its config or tokenizer does not match the checkpoint's weights",
        ),
    ):
        if known and now and known != now:
            raise ConfigError(
                f"{field}: its content has changed since {path} was written, and {what};"
                f" {FIX.replace('set it back', 'restore it')}"
            )


def _why_not_converted(path: Path, config: RunSettings, name: str) -> str | None:
    """Why the shards of a checkpoint cannot be converted to another number of ranks or another
    stage; None if they can."""
    what = "ZeRO stage" if name == STAGE else "number of ranks"
    if config.lora is not None:
        return f"an adapter's shards cannot be converted to another {what}"
    if not isinstance(config.learner.optimizer, AdamW):
        return f"only AdamW's states can be converted to another {what}"
    if not _steps_of_optimizer(path):
        return f"shards from before the first step cannot be converted to another {what}"
    return None


def _refuse_other_weights(path: Path, state: State, config: RunSettings, own: bool) -> None:
    """Raise ConfigError if a frozen model has other weights than when the checkpoint was written.

    Args:
        own: whether this run wrote it. Another run may use another reference policy or teacher.
    """
    for name, now in frozen_hashes(config).items():
        compared = own or not name.startswith("algorithm.")
        if compared and state.frozen_hashes.get(name, now) != now:
            raise ConfigError(
                f"{name} ({_short(config.models[name])}) has other weights than when {path} was"
                " written, and the steps so far were trained with those; restore it, or start a"
                " new run under another --name (asyncrl export provides these weights)"
            )


def _reference_of(path: Path, state: State, config: RunSettings, own: bool) -> Path | None:
    """The folder of the reference policy in a checkpoint, if the attempt continues with it: always
    in the same run, and in another one if both began with the same reference policy.

    Raises:
        ConfigError: the run's own checkpoint lacks its reference policy, or has an impossible one.
    """
    every, folder = config.reference_interval, path / REFERENCE
    if every is None:
        return None
    if not own:
        same = all(
            state.frozen_hashes.get(name) == known
            for name, known in frozen_hashes(config).items()
            if name.startswith("algorithm.")
        )
        if not same or not folder.is_dir():
            return None
    try:
        kept = read_kept(folder)
    except ReferenceLostError as error:
        raise ConfigError(str(error)) from None
    if kept.version > state.version:
        raise ConfigError(
            f"{path} has version {state.version}, but its reference policy has {kept.version}; the"
            " checkpoint was changed, so resume from another one (checkpoint.ckpt_step)"
        )
    return folder


def config_text(config: RunSettings) -> str:
    """The resolved config as YAML."""
    return yaml.safe_dump(config.dump(), sort_keys=False)


def hash_of(text: str) -> str:
    """SHA-256 of the text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def data_hash(config: RunSettings) -> str:
    """Hash of the training files and of the settings that map ordinals to rows; "" if a file is
    missing."""
    sources = config.training_sources
    try:
        hashes = [_hash_files(files_of(source, "data.train")) for source in sources]
    except ConfigError:
        return ""
    if len(sources) == 1 and sources[0].prompt_column is None:
        return hashes[0]
    mixed = [
        (source.weight, source.prompt_column, known)
        for source, known in zip(sources, hashes, strict=True)
    ]
    return hash_of(json.dumps(mixed))


def model_hash(config: RunSettings) -> str:
    """Hash of the model's config and tokenizer; "" if they are missing."""
    return _hash_files([Path(config.model.path) / name for name in MODEL_FILES])


def frozen_hashes(config: RunSettings) -> dict[str, str]:
    """Setting → hash of the weights of each frozen model that training depends on: the base of an
    adapter, the reference policy or teacher. Models whose files are missing are left out."""
    found = {}
    for name, path in config.models.items():
        if name != "model.path" or config.lora is not None:
            try:
                found[name] = weights_hash(path)
            except (OSError, CheckpointFilesError):
                continue
    return found


def _hash_files(paths: Sequence[Path]) -> str:
    there = [path for path in paths if path.is_file()]
    digest = hashlib.sha256()
    for path in there:
        with path.open("rb") as file:
            digest.update(f"{path.name} ".encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest() if there else ""


def _short(value: object) -> str:
    text = "unset" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
