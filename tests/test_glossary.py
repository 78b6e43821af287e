"""One word, one meaning: no other file uses a synonym that the glossary rules out."""

import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

from asyncrl.contracts.outcomes import OUTCOMES

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "concepts" / "glossary.md"
OTHERS_NAMES = (
    ROOT / "asyncrl" / "config" / "other_systems.yaml",
    ROOT / "asyncrl" / "rundir" / "outcomes.py",
    ROOT / "docs" / "how_to" / "coming_from.md",
    ROOT / "tests" / "rundir" / "test_reader.py",
)
"""Files that explain names of other systems or of an older asyncrl."""

PLACES_PROCESSES = ("_place_ranks",)
"""Names with the verb: to place a process on a node."""


def rows() -> list[list[str]]:
    table = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1:]]


RULED_OUT = {
    synonym: word for word, _, synonyms in rows() for synonym in synonyms.split(", ") if synonym
}


@cache
def texts() -> dict[Path, str]:
    kinds = (
        "asyncrl/**/*.py",
        "asyncrl/**/*.yaml",
        "jobs/**/*",
        "benchmarks/**/*",
        "docs/**/*",
        "*.md",
    )
    kinds += ("tests/**/*.py", "notebooks/*", "serve_configs/*", ".github/**/*")
    paths = {path for kind in kinds for path in ROOT.glob(kind) if path.is_file()}
    apart = {GLOSSARY, ROOT / "CHANGELOG.md", Path(__file__), *OTHERS_NAMES}
    return {
        path: path.read_text()
        for path in sorted(paths - apart)
        if path.suffix in (".py", ".md", ".yaml", ".yml", ".ipynb")
    }


@cache
def lowered(text: str) -> str:
    return text.lower()


def places(synonym: str, text: str) -> list[str]:
    """Lines with the word, alone or as part of a name such as `fate_of`."""
    if synonym.lower() not in lowered(text):
        return []
    pattern = re.compile(rf"(?<![A-Za-z]){re.escape(synonym)}(?![A-Za-z])", re.IGNORECASE)
    return [line for line in text.splitlines() if pattern.search(line)]


def test_the_glossary_is_read() -> None:
    assert len(rows()) >= 15 and RULED_OUT["fate"] == "outcome"
    assert len(texts()) > 400
    folders = {path.relative_to(ROOT).parts[0] for path in texts()}
    assert folders >= {"tests", "notebooks", "serve_configs", ".github", "docs", "jobs"}


@pytest.mark.parametrize("line", ["a fate of", "fate_of = 1", "run.fate()", "Fate"])
def test_a_synonym_is_found(line: str) -> None:
    assert places("fate", line) == [line] and not places("fate", "phosphate fatedly")


@pytest.mark.parametrize("synonym", RULED_OUT)
def test_no_synonym_is_used(synonym: str) -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path, text in texts().items()
        if (lines := places(synonym, text))
    }
    assert not found, f"write {RULED_OUT[synonym]!r} instead of {synonym!r}"


@pytest.mark.parametrize("package", ["agents", "environments", "sessions"])
def test_a_session_is_not_called_an_attempt(package: str) -> None:
    """Attempts are those of a run, and these packages know of none."""
    folders = [ROOT / top / package for top in ("asyncrl", "tests")]
    mine = {
        str(path.relative_to(ROOT)): text
        for path, text in texts().items()
        if folders[0] in path.parents or folders[1] in path.parents
    }
    assert {name.split("/")[0] for name in mine} == {"asyncrl", "tests"}
    found = [name for name, text in mine.items() if "attempt" in text.lower()]
    assert not found, "write 'session', or 'try' where it can be tried again"


def test_the_glossary_names_every_outcome() -> None:
    (meaning,) = [meaning for word, meaning, _ in rows() if word == "outcome"]
    assert not [outcome for outcome in OUTCOMES if not places(outcome, meaning)]


def vague_names(source: str) -> set[str]:
    """Names with `place` as a noun, which says nothing of what it is."""
    if "place" not in source.lower():
        return set()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    names = {token.string for token in tokens if token.type == tokenize.NAME}
    parts = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
    return {
        name
        for name in names.difference(PLACES_PROCESSES)
        if {"place", "places"} & {part.lower() for part in parts.findall(name)}
    }


@pytest.mark.parametrize("name", ["place", "_places", "NodePlace", "NO_PLACE", "place_of"])
def test_a_vague_name_is_found(name: str) -> None:
    assert vague_names(f"{name} = 1  # a comment") == {name}


@pytest.mark.parametrize("name", ["placement_group", "while_placed", "replace", "_place_ranks"])
def test_a_name_of_placement_is_no_vague_one(name: str) -> None:
    assert not vague_names(f"{name}('place')")


def test_no_name_says_place() -> None:
    """An index, an offset, a folder, a slot and a rank have these names."""
    package = ROOT / "asyncrl"
    found = {
        str(path.relative_to(package)): names
        for path in package.glob("**/*.py")
        if (names := vague_names(path.read_text()))
    }
    assert not found


OWNERS = {
    "attempt": {"run", "rundir"},
    "branch": {"contracts", "sessions"},
    "node": {"contracts"},
    "outcome": {"contracts", "run", "rundir"},
    "shift": {"learning"},
    "station": {"run"},
    "step": {"algorithms", "contracts", "learning", "run"},
    "turn": {"algorithms", "contracts", "rollout", "rundir", "sessions", "testing", "text"},
}
"""Word of the glossary → the folders that may have it in the names of classes and files. In another
folder it would have a second meaning."""
STANDARD = {"ClusterNode", "NodeRank", "ToolTurns", "TooManySkippedStepsError"}
"""Names with a standard term of two words, or with the word in its meaning."""


def named(path: Path) -> set[str]:
    """The names of a file, of its folders below the package's, and of its classes."""
    classes = re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
    return {path.stem, *path.relative_to(ROOT / "asyncrl").parts[1:-1], *classes} - STANDARD


def has(name: str, word: str) -> bool:
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return bool({word, f"{word}s", f"{word}es"} & {part.lower() for part in parts})


@pytest.mark.parametrize("name", ["turn", "_Turns", "TurnFormat", "device_turns"])
def test_a_word_in_a_name_is_found(name: str) -> None:
    assert has(name, "turn") and not has("returned", "turn")


@pytest.mark.parametrize(("word", "folders"), OWNERS.items())
def test_a_word_has_one_meaning_in_names(word: str, folders: set[str]) -> None:
    assert word in {row[0] for row in rows()}
    package = ROOT / "asyncrl"
    found = {
        str(path.relative_to(package)): names
        for path in package.glob("*/**/*.py")
        if path.relative_to(package).parts[0] not in folders
        and (names := {name for name in named(path) if has(name, word)})
    }
    assert not found
