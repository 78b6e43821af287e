"""YAML as data alone, of a bounded size after its aliases are expanded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from asyncrl.runtime.files import read_text

__all__ = ["parse_yaml", "read_yaml"]

LARGEST_TEXT = 4 << 20
"""Characters of a file."""
MOST_NODES = 100_000
"""Keys, values, lists and mappings of a file with every alias expanded. A few lines of nested
aliases would otherwise stand for billions."""
LONGEST_INTEGER = 100
"""Characters of a whole number."""
INTEGER = "tag:yaml.org,2002:int"
DEEPEST = 64
"""Lists and mappings inside one another."""


def read_yaml(path: Path) -> Any:
    """What a YAML file holds. Raises as `read_text` and `parse_yaml`."""
    return parse_yaml(read_text(path))


def parse_yaml(text: str) -> Any:
    """Plain values, lists and mappings.

    Raises:
        yaml.YAMLError: this is no YAML, makes objects, has a key twice in one mapping, or is too
            large, too deep or endless with its aliases expanded.
    """
    if len(text) > LARGEST_TEXT:
        raise yaml.YAMLError(f"it has {len(text):,} characters, above {LARGEST_TEXT:,}")
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise _too_deep() from None
    if tree is not None:
        _expanded(tree, {}, 0)
    try:
        return yaml.safe_load(text)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
    ) as error:  # such as an integer of 5,000 digits, or a day that no month has
        raise yaml.YAMLError(f"a value cannot be read ({error}); put it in quotes") from None


def _expanded(node: yaml.Node, known: dict[int, int | None], depth: int) -> int:
    """How many nodes stand for this one when every alias is a copy. `known` has None for a node
    that is being counted."""
    if depth > DEEPEST:
        raise _too_deep()
    if id(node) in known:
        count = known[id(node)]
        if count is None:
            raise yaml.YAMLError(
                "an alias is inside the value that it names, so it would never end; write the value"
                " out"
            )
        return count
    known[id(node)] = None
    if isinstance(node, yaml.MappingNode):
        _refuse_repeated_key(node)
    elif isinstance(node, yaml.ScalarNode):
        _refuse_unusual(node)
    parts = (
        [part for pair in node.value for part in pair]
        if isinstance(node, yaml.MappingNode)
        else node.value
        if isinstance(node, yaml.SequenceNode)
        else []
    )
    total = 1 + sum(_expanded(part, known, depth + 1) for part in parts)
    if total > MOST_NODES:
        raise yaml.YAMLError(
            f"its aliases stand for more than {MOST_NODES:,} values; write out what is needed"
        )
    known[id(node)] = total
    return total


def _refuse_repeated_key(mapping: yaml.MappingNode) -> None:
    """PyYAML keeps the last of two equal keys and says nothing: a second `learner:` would reset the
    first."""
    lines: dict[tuple[str, str], int] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if (key.tag, key.value) in lines:
            raise yaml.YAMLError(
                f"{key.value!r} appears twice, on lines {lines[key.tag, key.value]} and {line};"
                " keep one, with the settings of both"
            )
        lines[key.tag, key.value] = line


def _refuse_unusual(scalar: yaml.ScalarNode) -> None:
    """Half a character, which no file can hold, and a number of thousands of digits, which Python
    refuses to print."""
    line = f"line {scalar.start_mark.line + 1}"
    if any("\ud800" <= character <= "\udfff" for character in scalar.value):
        raise yaml.YAMLError(f"{line}: a text has half of a surrogate pair; write whole characters")
    if scalar.tag == INTEGER and len(scalar.value) > LONGEST_INTEGER:
        raise yaml.YAMLError(
            f"{line}: a number has {len(scalar.value):,} digits, above {LONGEST_INTEGER}"
        )


def _too_deep() -> yaml.YAMLError:
    return yaml.YAMLError(
        f"lists and mappings lie more than {DEEPEST} deep inside one another; use fewer levels"
    )
