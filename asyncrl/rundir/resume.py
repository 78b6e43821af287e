"""Where an attempt begins: the checkpoint that it goes on from, what has changed since that was
written, and a line about each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config import Config, ConfigError, sources_of
from asyncrl.contracts.errors import NoCheckpointError, UnreadableCheckpointError
from asyncrl.contracts.state import State
from asyncrl.data.sources import files_of
from asyncrl.rundir.checkpoint import CheckpointStore
from asyncrl.runtime.yaml_files import parse_yaml, read_yaml

__all__ = ["Beginning", "config_changes", "config_text", "find_beginning", "hash_of"]

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
"""Files of a checkpoint directory that say which model it is, weights left out."""
FIXED = {
    "seed": "data order and sampling follow from it",
    "data.prompt_column": "ordinals stand for the prompts that were read",
    "data.apply_chat_template": "ordinals stand for the prompts that were read",
    "data.chat_template_kwargs": "ordinals stand for the prompts that were read",
    "data.system_prompt": "ordinals stand for the prompts that were read",
    "data.tools": "ordinals stand for the prompts that were read",
    "data.tools_column": "ordinals stand for the prompts that were read",
    "data.shuffle": "data order follows from it",
    "data.max_prompt_length": "it decides which prompts are used, and ordinals count those",
    "data.prompt_policy": "it decides which prompts are used, and ordinals count those",
    "data.max_length": "it decides which prompts are used, and ordinals count those",
    "data.length_policy": "it decides which prompts are used, and ordinals count those",
    "rollout.temperature": "groups that wait in the checkpoint were sampled at the other one",
    "learner.bf16": "the optimizer's state is of the other precision",
    "learner.optimizer": "the checkpoint holds the other one's state",
    "learner.world_size": "the checkpoint holds the shards of that many ranks",
}
"""Settings that a resumed run keeps, and why."""

LONGEST = (
    "rollout.max_completion_length",
    "learner.max_tokens_per_gpu",
    "learner.sequence_parallel_size",
)
"""What bounds a trajectory's length, beside FIXED."""

FREE = ("resume", "name", "runs_root", "checkpoint.load", "checkpoint.ckpt_step", "checkpoint.save")
"""Settings whose change is not worth a line: they say where, not what."""

SCORED_WITH = (
    "reward.functions",
    "reward.sandbox",
    "reward.shuffle",
    "reward.overlong",
    "algorithm.advantage",
    "algorithm.group_filter",
    "algorithm.kl_",
    "algorithm.ref_load",
    *LONGEST,
)
"""Beginnings of the settings that a scored group depends on. When one changes, the groups that wait
in the checkpoint are made again."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """`state` and `checkpoint` (its directory) are None for a new start. `said` tells what was
    looked for, found and changed."""

    checkpoint: Path | None
    state: State | None
    said: tuple[str, ...]
    from_attempt: int | None = None
    """The attempt of this run that wrote the checkpoint; None for a new start, or another run's
    checkpoint."""

    @property
    def trained_tokens(self) -> int:
        """Loss tokens that the learner had trained by then, by its own count."""
        if self.checkpoint is None:
            return 0
        counters = self.checkpoint / "learner" / "counters.json"
        return int(json.loads(counters.read_text())["trained_tokens"]) if counters.exists() else 0


def find_beginning(config: Config, run_id: str | None, saved: bool = False) -> Beginning:
    """Look where the config says. The run's own checkpoints come first; `checkpoint.load` is for a
    run that has none.

    Args:
        run_id: of the run directory, None if it is new.
        saved: the run has saved checkpoints before.

    Raises:
        ConfigError: the run has no checkpoint of its own under `resume: must`, or lacks
            `ckpt_step`; it had some, and they are gone; there is none at `checkpoint.load`; none
            can be read; or a setting, the data or the model changed in a way that would falsify the
            run.
    """
    own, load, step = (
        config.checkpoints_directory,
        config.checkpoint.load,
        config.checkpoint.ckpt_step,
    )
    looked: tuple[str, ...] = ()
    if config.resume != "never":
        versions = CheckpointStore(own, keep=1).versions()
        if versions or config.resume == "must":
            # With `load`, a step that the run itself does not have was meant for its beginning.
            return _own(config, own, step if step in versions or load is None else None, run_id)
        if saved or (own / "LATEST").exists():
            raise ConfigError(
                "resume: auto would begin at version 0 again: this run has saved checkpoints, and"
                f" {own} holds none that is committed; put them back, set checkpoint.save to where"
                " they are, or start a new run under another --name"
            )
        looked = (f"resume {config.resume}: no checkpoint in {own}",)
    elif next(iter(own.glob("step_*/COMMITTED")), None) is not None:
        raise ConfigError(
            f"checkpoint.save = {str(own)!r} holds checkpoints of another run; name an empty"
            " directory, or go on with it (--resume must)"
        )
    if load is None:
        return Beginning(None, None, looked)
    directory = Path(load) / "checkpoints" if (Path(load) / "checkpoints").is_dir() else Path(load)
    try:
        found = _found(config, directory, step)
    except NoCheckpointError as error:
        raise ConfigError(
            f"checkpoint.load: {error}".replace(
                "; start with --resume never or auto",
                "; give a run's directory, or its checkpoints",
            )
        ) from None
    assert found.state is not None
    # Its rows are another run's; ordinals without an outcome are made again here.
    state = replace(found.state, waiting=())
    return Beginning(
        found.checkpoint,
        state,
        (*looked, *found.said, "another run's: groups that waited there are made again"),
    )


def _own(config: Config, own: Path, step: int | None, run_id: str | None) -> Beginning:
    try:
        found = _found(config, own, step)
    except NoCheckpointError as error:
        raise ConfigError(str(error)) from None
    assert found.state is not None
    if found.state.run_id != run_id:
        raise ConfigError(
            f"{found.checkpoint} is of another run (run_id {found.state.run_id}, not"
            f" {run_id or 'this new one'}); to go on from it set checkpoint.load = {own}, and a"
            " checkpoint.save of your own"
        )
    return found


def _found(config: Config, directory: Path, step: int | None) -> Beginning:
    """Raises NoCheckpointError; ConfigError as `find_beginning`."""
    try:
        path, state, passed_over = CheckpointStore(directory, keep=1).find(step)
    except UnreadableCheckpointError as error:
        raise ConfigError(str(error)) from None
    before = read_yaml(path / "config.yaml") if (path / "config.yaml").exists() else {}
    changes = config_changes(before, parse_yaml(config_text(config))) if before else {}
    _refuse_falsifying(path, changes, state, config)
    lines = [f"passed over: {reason}" for reason in passed_over]
    lines += [f"found {path} (version {state.version}, {len(state.waiting)} groups waiting)"]
    lines += [
        f"changed since: {name} {_short(old)} → {_short(new)}"
        for name, (old, new) in changes.items()
    ]
    if state.waiting and (why := [name for name in changes if name.startswith(SCORED_WITH)]):
        lines.append(
            f"the {len(state.waiting)} groups that waited are made again: their scores, or their"
            f" lengths, go with the old {why[0]}"
        )
        state = replace(state, waiting=())
    return Beginning(path, state, tuple(lines), state.attempt)


def config_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Dotted name → (before, after) of the settings that differ, but for those that only say where
    things lie."""
    changes: dict[str, tuple[Any, Any]] = {}
    for name in [*after, *(name for name in before if name not in after)]:
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changes |= config_changes(old, new, f"{prefix}{name}.")
        elif old != new and prefix + name not in FREE:
            changes[prefix + name] = (old, new)
    return changes


def _refuse_falsifying(
    path: Path, changes: Mapping[str, tuple[Any, Any]], state: State, config: Config
) -> None:
    """Raises ConfigError."""
    fix = (
        "set it back, or start a new run under another --name (asyncrl export gives it these"
        " weights)"
    )
    for name, (old, new) in changes.items():
        if (
            fixed := next((one for one in FIXED if name == one or name.startswith(f"{one}.")), None)
        ) is not None:
            raise ConfigError(
                f"{name} = {_short(new)}, but {path} was made with {_short(old)}, and"
                f" {FIXED[fixed]}; {fix}"
            )
        if name == "algorithm.advantage" and "gae" in (old, new):
            raise ConfigError(
                f"{name} = {new}, but {path} was made with {old}, and only one of them has a value"
                f" head; {fix}"
            )
    if state.seed != config.seed:
        raise ConfigError(
            f"seed = {config.seed}, but {path} was made with {state.seed}, and {FIXED['seed']};"
            f" {fix}"
        )
    for field, known, now in (
        ("data.train", state.data_hash, data_hash(config)),
        ("model.path", state.model_hash, model_hash(config)),
    ):
        if known and now and known != now:
            what = (
                "ordinals stand for its rows"
                if field == "data.train"
                else "config or tokenizer differ from those that the checkpoint's weights go with"
            )
            raise ConfigError(
                f"{field}: its content is no longer what {path} was made with, and {what};"
                f" {fix.replace('set it', 'put it')}"
            )


def config_text(config: Config) -> str:
    """The resolved config as YAML."""
    return yaml.safe_dump(config.dump(), sort_keys=False)


def hash_of(text: str) -> str:
    """SHA-256, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def data_hash(config: Config) -> str:
    """Of the training files, and of what else says which row an ordinal is; "" if a file is not
    there."""
    sources = sources_of(config.data.train)
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


def model_hash(config: Config) -> str:
    """Of the model's config and tokenizer; "" if they are not there."""
    return _hash_files([Path(config.model.path) / name for name in MODEL_FILES])


def _hash_files(paths: Sequence[Path]) -> str:
    there = [path for path in paths if path.is_file()]
    digest = hashlib.sha256()
    for path in there:
        with path.open("rb") as file:
            digest.update(f"{path.name} ".encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest() if there else ""


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
