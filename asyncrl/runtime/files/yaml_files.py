"""Reading YAML as plain data, with a bounded size after alias expansion."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from asyncrl.runtime.files.opening import read_text

LARGEST_TEXT = 4 << 20
"""Maximum characters of a file."""
MOST_NODES = 100_000
"""Maximum nodes (keys, values, lists, mappings) with every alias expanded. A few lines of nested
aliases can expand to billions."""
LONGEST_INTEGER = 100
"""Maximum characters of an integer."""
MOST_DIRECTIVES, DIRECTIVE = 8, re.compile(r"^%", re.MULTILINE)
"""For thousands, libyaml takes minutes."""
FAST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where PyYAML has it: ten times as fast."""
INTEGER = "tag:yaml.org,2002:int"
DEEPEST = 64
"""Maximum nesting of lists and mappings."""


def read_yaml(path: Path) -> object:
    """The content of a YAML file. Raises like `read_text` and `parse_yaml`."""
    return parse_yaml(read_text(path))


def parse_yaml(text: str) -> object:
    """Parse YAML into plain values, lists and mappings.

    Raises:
        yaml.YAMLError: the text is not YAML, creates objects, or repeats a key in a mapping. Or it
            is too large, too deep or endless after alias expansion.
    """
    if len(text) > LARGEST_TEXT:
        raise yaml.YAMLError(f"it has {len(text):,} characters, above {LARGEST_TEXT:,}")
    if len(DIRECTIVE.findall(text)) > MOST_DIRECTIVES:
        raise yaml.YAMLError(f"it has more than {MOST_DIRECTIVES} lines that begin with %")
    try:
        return _parsed(text, FAST_LOADER)
    except (yaml.MarkedYAMLError, yaml.reader.ReaderError):
        return _parsed(text, yaml.SafeLoader)  # its messages say more


def _parsed(text: str, kind: Any) -> object:
    try:
        if kind is not yaml.SafeLoader:
            _refuse_large(text, kind)
        loader = kind(text)
        tree = loader.get_single_node()
        if tree is None:
            return None
        _expanded(tree, {}, 0)
        value: object = loader.construct_document(tree)
        return value
    except RecursionError:
        raise _too_deep() from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        # Such as an integer of 5,000 digits, a date that does not exist, or an empty `!!int`.
        raise yaml.YAMLError(f"a value cannot be read ({error}); put it in quotes") from None


def _refuse_large(text: str, kind: Any) -> None:
    """Raise for too deep nesting, which would end the process because libyaml's loader is
    recursive, and for too many values."""
    depth = nodes = 0
    for event in yaml.parse(text, kind):
        nodes += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise _too_deep()
        if nodes > MOST_NODES:
            raise _too_many()


def _expanded(node: yaml.Node, known: dict[int, int | None], depth: int) -> int:
    """The number of nodes below this one, itself included, with every alias expanded. `known` has
    None for a node that is being counted."""
    if depth > DEEPEST:
        raise _too_deep()
    if id(node) in known:
        count = known[id(node)]
        if count is None:
            raise yaml.YAMLError(
                "an alias is inside the value that it names, so its expansion is endless; write the"
                " value out"
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
        raise _too_many()
    known[id(node)] = total
    return total


def _refuse_repeated_key(mapping: yaml.MappingNode) -> None:
    """Raise for a repeated key. PyYAML silently keeps the last one, so a second `learner:` would
    reset the first."""
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
    """Raise for half a surrogate pair, which UTF-8 cannot encode, and for an integer too long for
    Python to print."""
    line = f"line {scalar.start_mark.line + 1}"
    if any("\ud800" <= character <= "\udfff" for character in scalar.value):
        raise yaml.YAMLError(f"{line}: a text has half of a surrogate pair; write whole characters")
    if scalar.tag == INTEGER and len(scalar.value) > LONGEST_INTEGER:
        raise yaml.YAMLError(
            f"{line}: a number has {len(scalar.value):,} digits, above {LONGEST_INTEGER}"
        )


def _too_many() -> yaml.YAMLError:
    return yaml.YAMLError(
        f"it has more than {MOST_NODES:,} values, those of its aliases included; write out what is"
        " needed"
    )


def _too_deep() -> yaml.YAMLError:
    return yaml.YAMLError(
        f"lists and mappings are nested more than {DEEPEST} deep; use fewer levels"
    )
