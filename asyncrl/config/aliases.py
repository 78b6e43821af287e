"""Messages for unknown settings: the name here, why the setting does not exist, or the nearest
name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from asyncrl.runtime.files.yaml_files import parse_yaml

NOT_NEEDED = "nothing: "
"""Start of an answer about a setting that has no counterpart here, before the reason."""


@dataclass(frozen=True, slots=True)
class OtherNames:
    """The tables of `other_systems.yaml`. A key of the first four may be several last parts of a
    dotted name; the longest match is used."""

    renamed: Mapping[str, str]
    """Setting of slime, TRL, verl, OpenRLHF and others → the name here."""
    not_implemented: Mapping[str, str]
    """Setting of another system → the reason and the fix."""
    offline_renamed: Mapping[str, str]
    """`renamed` for runs on a dataset."""
    offline_not_implemented: Mapping[str, str]
    moved: Mapping[str, tuple[str, ...]]
    """Dotted name of an earlier version → the YAML to write now. Several ways are for different
    kinds of runs."""
    off_at_zero: frozenset[str]
    """Those of them that 0 turned off, which was their default."""


@cache
def other_names() -> OtherNames:
    """Read the tables. Raises ValueError if a table has a name twice."""
    source = resources.files("asyncrl.config").joinpath("other_systems.yaml")
    tables: Any = parse_yaml(source.read_text("utf-8"))
    return OtherNames(
        renamed=_answers(tables["renamed"], "here"),
        not_implemented=_answers(tables["not_implemented"], "why"),
        offline_renamed=_answers(tables["offline_renamed"], "here"),
        offline_not_implemented=_answers(tables["offline_not_implemented"], "why"),
        moved={
            name: (ways,) if isinstance(ways, str) else tuple(ways)
            for name, ways in tables["moved"].items()
        },
        off_at_zero=frozenset(tables["off_at_zero"]),
    )


def _answers(rows: Sequence[Mapping[str, Any]], answer: str) -> dict[str, str]:
    """Name → answer."""
    pairs = [(name, str(row[answer])) for row in rows for name in row["names"]]
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("other_systems.yaml has a name twice in one table")
    return found


OF_ANOTHER = "; leave it out with another objective"
"""Earlier versions accepted the settings of all objectives in one file."""
LIKENESS = 0.8
"""Similarity (`difflib`, 0 to 1) that a known name needs before it is suggested."""


def explain_unknown(name: str, known: Sequence[str], value: object = ...) -> str:
    """One line about a setting that is not among the `known` dotted names: its name here, why it
    does not exist, or the nearest name.

    Args:
        value: what it was set to.
    """
    offline = "objective" in known
    names = other_names()
    for old in _beginnings(name):
        ways = [way for way in names.moved.get(old, ()) if way.partition(":")[0] in known]
        if ways and old == name and _was_default(name, value):
            return f"{old} has moved; leave it out, which is the same as {json.dumps(value)}"
        if ways:
            other = OF_ANOTHER if ways[0].startswith("objective: {name") else ""
            return f"{old} has moved; write {', or '.join(ways)}{other}"
    for ending in _endings(name):
        if offline and (here := names.offline_renamed.get(ending)) is not None:
            return _renamed(name, here)
        why = names.offline_not_implemented.get(ending) if offline else None
        why = why or names.not_implemented.get(ending)
        if why is not None:
            return f"{name} is not implemented: {why}"
        here = names.renamed.get(ending)
        if here is not None and (not offline or _exists(here, known)):
            return _renamed(name, here)
    if name in known:  # one key with dots in it
        return f"{name} is one key; write {name.replace('.', ': {')}: …{'}' * name.count('.')}"
    near = _nearest(name.replace("-", "_"), known)
    return f"{name} is unknown; " + (
        f"did you mean {near}?" if near else f"see asyncrl {'sft' if offline else 'train'} --help"
    )


def _was_default(old: str, value: object) -> bool:
    """Whether a setting of an earlier version was off, or not set."""
    is_zero = value == 0 and old in other_names().off_at_zero
    return value is None or value is False or is_zero


def first_moved(tree: Mapping[str, Any]) -> str | None:
    """The first setting in a tree that an earlier version had elsewhere."""
    return next((name for name in other_names().moved if _has(tree, name.split("."))), None)


def _has(tree: object, parts: Sequence[str]) -> bool:
    if not parts:
        return True
    first, *rest = parts
    return isinstance(tree, Mapping) and first in tree and _has(tree[first], rest)


def _renamed(name: str, here: str) -> str:
    if here.startswith(NOT_NEEDED):
        return f"{name} is unknown and not needed: {here[len(NOT_NEEDED) :]}; remove it"
    return f"{name} is unknown; asyncrl calls it {here}"


def _exists(here: str, known: Sequence[str]) -> bool:
    """Whether the first setting that an answer names exists in this kind of config."""
    return here.startswith(NOT_NEEDED) or here.split(" ")[0].rstrip(",:;") in known


def _beginnings(name: str) -> list[str]:
    """A dotted name, and each section above it that is no first part, longest first."""
    parts = name.split(".")
    return [name, *(".".join(parts[:end]) for end in range(len(parts) - 1, 1, -1))]


def _endings(name: str) -> list[str]:
    """Keys of the tables that a dotted name can match, longest first. The last one is without
    slime's prefix."""
    parts = name.replace("-", "_").split(".")
    return [".".join(parts[begin:]) for begin in range(len(parts))] + [
        parts[-1].removeprefix("rollout_")
    ]


def _nearest(name: str, known: Sequence[str]) -> str | None:
    """The setting whose last part is most similar to this name's. The whole name decides between
    equals. Sections and names of choices are never suggested."""
    sections = {key.rpartition(".")[0] for key in known}
    settings = [key for key in known if key not in sections and not key.endswith(".name")]
    leaf = name.rpartition(".")[2].removeprefix("rollout_")
    ranked = [
        (
            _likeness(leaf, key.rpartition(".")[2].removeprefix("rollout_")),
            _likeness(name, key),
            key,
        )
        for key in settings
    ]
    best = max(ranked, default=(0.0, 0.0, ""))
    return best[2] if best[0] >= LIKENESS else None


def _likeness(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()
