"""Find the data files of a split in a folder, by its README.md or by file names.

The layout is that of datasets on the Hugging Face hub: `train-00000-of-00002.parquet`,
`data/test.jsonl`, or a README.md whose front matter lists `configs` with their `data_files`.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from asyncrl.runtime.files.yaml_files import parse_yaml

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
DATA_SUFFIXES = (".parquet", ".pq", ".arrow", *JSON_SUFFIXES)
STATE = "state.json"
"""File of `datasets.save_to_disk` beside the files of a split."""
SPLITS = "dataset_dict.json"
"""File of `datasets.save_to_disk` beside the folders of several splits."""
SELECTIONS = ("_indices_data_files", "_indices_files", "_indices")
"""Keys of a STATE of older versions, whose dataset has only some rows of its files."""
NO_DATA = ("config.json", "dataset_info.json", "dataset_infos.json", SPLITS)
"""Files that libraries write about a dataset, next to its rows."""
CACHED = re.compile(r"cache-.*\.arrow|tmp.*\.arrow")
"""Files that the library `datasets` writes as it works, next to rows."""
COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
"""Word in a file's path → its split, with the hub's rules."""
SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<rest>\.[^/]*)")


def is_data_file(name: str) -> bool:
    """Whether this is the name of a Parquet or JSONL file, compressed JSONL included."""
    path = PurePosixPath(name.lower())
    if path.name in NO_DATA or CACHED.fullmatch(path.name):
        return False
    if path.suffix in COMPRESSED:
        path = path.with_suffix("")
        return path.suffix in JSON_SUFFIXES
    return path.suffix in DATA_SUFFIXES


def data_files(
    names: Iterable[str], readme: str | None, split: str | None, subset: str | None
) -> list[str]:
    """The files of the split, in reading order.

    Args:
        names: paths of all files, relative to the folder, with `/`.
        readme: text of its README.md.
        split: None = the only one.
        subset: a configuration in the README, or a folder. None = the only or default one.

    Raises:
        ValueError: no such split or subset exists, there are several and none is named, or a shard
            is missing. The message lists those that exist.
    """
    there = sorted(name for name in _without_states(names) if _visible(name))
    configs = _configs(readme)
    splits = _config_splits(configs, there, subset) if configs else _name_splits(there, subset)
    return _chosen_files(splits, split)


def _chosen_files(splits: Mapping[str, list[str]], split: str | None) -> list[str]:
    """The files of the split. See `data_files`."""
    if not splits:
        raise ValueError(f"contains no data file ({', '.join(DATA_SUFFIXES)})")
    named = sorted(name for name in splits if name)
    if split is None and len(splits) > 1:
        other = f", and files without a split ({splits[''][0]})" if "" in splits else ""
        raise ValueError(f"contains the splits {named}{other}; name one of them as split")
    chosen = splits.get(split) if split else next(iter(splits.values()))
    if chosen is None:
        raise ValueError(f"contains no split {split!r}; it has {named}")
    _refuse_missing_shards(chosen)
    return chosen


def _visible(name: str) -> bool:
    return not any(part.startswith((".", "_")) for part in PurePosixPath(name).parts)


def _below(names: Sequence[str], subset: str | None) -> list[str]:
    """The data files, restricted to the subset's folder if one is named."""
    found = [name for name in names if is_data_file(name)]
    if subset is None:
        return found
    below = [name for name in found if subset in PurePosixPath(name).parts[:-1]]
    if not below:
        folders = sorted({PurePosixPath(name).parts[0] for name in found if "/" in name})
        raise ValueError(f"contains no subset {subset!r}; it has the folders {folders}")
    return below


def _name_splits(names: Sequence[str], subset: str | None) -> dict[str, list[str]]:
    """Split → files. Files without a split's word in their path are `train` if all files are like
    that; else their split is ""."""
    splits: dict[str, list[str]] = {}
    for name in _below(names, subset):
        words = re.split(r"[^a-z0-9]+", name.lower())
        found = next((SPLIT_WORDS[word] for word in reversed(words) if word in SPLIT_WORDS), "")
        splits.setdefault(found, []).append(name)
    return {"train": splits[""]} if set(splits) == {""} else splits


def _configs(readme: str | None) -> list[dict[str, object]]:
    """The `configs` in the README's front matter that name data files."""
    if readme is None or not readme.startswith("---"):
        return []
    try:
        tree = parse_yaml(readme.split("\n---", 1)[0].removeprefix("---"))
    except yaml.YAMLError:
        return []
    configs = tree.get("configs") if isinstance(tree, dict) else None
    if not isinstance(configs, list):
        return []
    return [config for config in configs if isinstance(config, dict) and config.get("data_files")]


def _chosen(configs: Sequence[dict[str, object]], subset: str | None) -> dict[str, object]:
    by_name = {str(config.get("config_name", "default")): config for config in configs}
    default = [config for config in configs if config.get("default")] or configs[:1]
    if subset is None and (len(by_name) == 1 or "default" in by_name or default[0].get("default")):
        return by_name.get("default", default[0])
    if subset not in by_name:
        found = "contains several subsets" if subset is None else f"contains no subset {subset!r}"
        raise ValueError(f"{found}; name one of {sorted(by_name)} as subset")
    return by_name[subset]


def _config_splits(
    configs: Sequence[dict[str, object]], names: Sequence[str], subset: str | None
) -> dict[str, list[str]]:
    """Split → files that match the patterns of the chosen configuration."""
    splits: dict[str, list[str]] = {}
    try:
        for split, patterns in _patterns(_chosen(configs, subset)["data_files"]):
            found = [name for pattern in patterns for name in names if _matches(name, pattern)]
            files = [name for name in dict.fromkeys(found) if is_data_file(name)]
            if files:
                splits.setdefault(split, []).extend(files)
    except (KeyError, TypeError, AttributeError):
        raise ValueError("has a README.md with unreadable configs; name the files") from None
    return splits


def _patterns(given: object) -> list[tuple[str, list[str]]]:
    """(Split, patterns) from any of the forms that the hub accepts.

    Raises KeyError, TypeError or AttributeError for another form.
    """
    if isinstance(given, str):
        given = [given]
    if isinstance(given, dict):
        pairs = [*given.items()]
    elif not isinstance(given, list):
        raise TypeError(f"data_files is {type(given).__name__}")
    elif isinstance(given[0], str):
        pairs = [("train", given)]
    else:
        pairs = [(entry["split"], entry["path"]) for entry in given]
    return [(str(split), [path] if isinstance(path, str) else path) for split, path in pairs]


def _matches(name: str, pattern: str) -> bool:
    """Whether a glob with `*`, `?`, `[…]` and `**` (any number of folders) matches the path."""
    return _fit(name.split("/"), pattern.removeprefix("./").split("/"))


def _fit(parts: Sequence[str], globs: Sequence[str]) -> bool:
    if not globs:
        return not parts
    if globs[0] == "**":
        rest = list(itertools.dropwhile("**".__eq__, globs))
        return bool(parts) and (not rest or any(_fit(parts[at:], rest) for at in range(len(parts))))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], globs[0]) and _fit(parts[1:], globs[1:])


def _refuse_missing_shards(names: Sequence[str]) -> None:
    """Raise ValueError if a file `…-00000-of-00003…` lacks one of its siblings."""
    shards = [match for name in names if (match := SHARD.fullmatch(name))]
    families: dict[tuple[str, str, str], set[int]] = {}
    for shard in shards:
        family = shard["stem"], shard["count"], shard["rest"]
        families.setdefault(family, set()).add(int(shard["number"]))
    for (stem, count, rest), numbers in families.items():
        if missing := sorted(set(range(int(count))) - numbers):
            raise ValueError(f"lacks {stem}-{missing[0]:05d}-of-{count}{rest}; download it again")


def _without_states(names: Iterable[str]) -> list[str]:
    """The names without each STATE beside an Arrow file, which is not data."""
    known = [*names]
    saved = {PurePosixPath(name).parent for name in known if name.endswith(".arrow")}
    states = {(parent / STATE).as_posix() for parent in saved}
    return [name for name in known if name not in states]


def folder_files(folder: Path, split: str | None, subset: str | None) -> list[Path]:
    """`data_files` of a local folder, or of what `datasets.save_to_disk` wrote there. Raises
    ValueError, OSError."""
    names = sorted(path.relative_to(folder).as_posix() for path in _files(folder))
    if SPLITS in names and subset is None:
        return [folder / name for name in _saved_split(folder, names, split)]
    readme = folder / "README.md"
    text = readme.read_text(errors="replace") if readme.is_file() else None
    return [folder / name for name in data_files(_saved(folder, names), text, split, subset)]


def _files(folder: Path, within: tuple[str, ...] = ()) -> Iterator[Path]:
    """The visible files of a folder, of its folders, and of those that links lead to. A file that
    a link does not find is one of them, so that reading it fails."""
    real = os.path.realpath(folder)
    for path in folder.iterdir() if real not in within else ():
        if not _visible(path.name):
            continue
        if path.is_dir():
            yield from _files(path, (*within, real))
        elif path.is_file() or path.is_symlink():
            yield path


def _saved_split(folder: Path, names: Sequence[str], split: str | None) -> list[str]:
    """The files of a split that SPLITS lists."""
    tree = _json(folder / SPLITS)
    listed = tree.get("splits") if isinstance(tree, dict) else None
    if not (isinstance(listed, list) and listed and all(isinstance(one, str) for one in listed)):
        raise ValueError(f"has a {SPLITS} without a list of splits; save it again, or remove that")
    if split is None and len(listed) > 1:
        raise ValueError(f"contains the splits {sorted(listed)}; name one of them as split")
    split = listed[0] if split is None else split
    if split not in listed:
        raise ValueError(f"contains no split {split!r}; it has {sorted(listed)}")
    below = [name for name in names if name.startswith(f"{split}/")]
    if not below:
        raise ValueError(f"lacks the folder {split!r}, which its {SPLITS} lists; save it again")
    found = [*filter(is_data_file, _without_states(_saved(folder, below)))]
    if not found:
        raise ValueError(f"contains no data file in its folder {split!r}; save it again")
    _refuse_missing_shards(found)
    return found


def _saved(folder: Path, names: Sequence[str]) -> list[str]:
    """The names without Arrow files that a STATE beside them does not list. Raises ValueError if
    the rows of the STATE are not those of its files."""
    kept = list(names)
    for state in (name for name in names if PurePosixPath(name).name == STATE):
        parent, tree = PurePosixPath(state).parent, _json(folder / state)
        arrows = {name for name in names if _is_arrow_in(parent, name)}
        if not arrows and not (isinstance(tree, dict) and "_data_files" in tree):
            continue  # a file of the user
        listed: Any = tree.get("_data_files") if isinstance(tree, dict) else None
        try:
            files = {(parent / file["filename"]).as_posix() for file in listed}
        except (TypeError, KeyError):
            raise ValueError(
                f"has {state}, which does not list its Arrow files as datasets.save_to_disk does;"
                " save it again, or remove that file"
            ) from None
        if any(tree.get(key) for key in SELECTIONS):
            raise ValueError(
                f"has {state} of a dataset with only some rows of its files; load it with"
                " datasets, call flatten_indices(), and save it again"
            )
        if missing := sorted(files - {*names}):
            raise ValueError(f"lacks {missing[0]}, which its {STATE} lists; save it again")
        kept = [name for name in kept if name not in arrows - files and name != state]
    return kept


def _is_arrow_in(folder: PurePosixPath, name: str) -> bool:
    return name.endswith(".arrow") and PurePosixPath(name).parent == folder


def _json(path: Path) -> Any:
    """The content of a JSON file; None if it has none."""
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError):
        return None
