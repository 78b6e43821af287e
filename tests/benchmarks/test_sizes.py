"""The figures of `make sizes`, for a small package made here."""

import ast
from pathlib import Path

from benchmarks.sizes import folder_imports, function_lengths, levels, sizes


def package(root: Path, **sources: str) -> Path:
    for name, source in sources.items():
        path = root / "asyncrl" / name.replace("__", "/")
        path = path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (root / "docs").mkdir()
    (root / "docs" / "page.md").write_text("three short words\n")
    return root


def test_a_small_package_is_counted(tmp_path: Path) -> None:
    long_function = "def long():\n" + "    pass\n" * 61
    found = sizes(
        package(
            tmp_path,
            cli="from asyncrl.control.loop import f\n",
            control__loop="from typing import Any\n\ndef f(config: Config) -> Any:\n    return 1\n",
            data__rows="import asyncrl.control\n" + long_function,
        )
    )
    assert found["folders; modules outside folders"] == "2; 1"
    assert found["imports between folders; levels"] == "2; 2"
    assert found["functions above 60 lines; longest"] == "1; 62"
    assert found["lines with Any, imports aside"] == "1"
    assert found["signatures with `config: Config`; files"] == "1; 1"
    assert found["words of README"] == "none" and found["words of docs"] == "3"


def test_a_circle_of_folders_is_named() -> None:
    assert levels({("a", "b"), ("b", "c")}) == "3"
    assert levels({("a", "b"), ("b", "a"), ("a", "c")}) == "circle among a, b"


def test_a_method_counts_as_a_function() -> None:
    tree = ast.parse("class A:\n    def f(self):\n        return 1\n\n    async def g(self): ...\n")
    assert list(function_lengths(tree)) == [2, 1]


def test_the_package_itself_has_no_circle() -> None:
    root = Path(__file__).parents[2]
    sources = sorted((root / "asyncrl").rglob("*.py"))
    arrows = folder_imports(root, {path: ast.parse(path.read_text()) for path in sources})
    assert len(arrows) > 50 and levels(arrows).isdigit()
