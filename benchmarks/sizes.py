"""Prints how large the package is: files, functions, imports between folders, words in the docs.

    python -m benchmarks.sizes [DIRECTORY]

The figures have no limits. They show where there is much to read.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "asyncrl"
LONG_FUNCTION = 60
"""Lines, at 100 columns."""


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for name, value in sizes(root).items():
        print(f"{name:<52} {value}")


def sizes(root: Path) -> dict[str, str]:
    """Title → value of each figure of the project in `root`."""
    sources = {path: path.read_text() for path in sorted((root / PACKAGE).rglob("*.py"))}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    lines = sorted(source.count("\n") for source in sources.values() if source.strip())
    functions = sorted(length for tree in trees.values() for length in function_lengths(tree))
    folders = {_folder(root, path) for path in sources} - {""}
    loose = [path for path in sources if path.parent == root / PACKAGE and path.stem != "__init__"]
    arrows = folder_imports(root, trees)
    readme = root / "README.md"
    return {
        "modules": f"{len(lines)}",
        "lines of a module: median; longest": f"{statistics.median(lines):.0f}; {lines[-1]}",
        "lines of the package": str(sum(lines)),
        "folders; modules outside folders": f"{len(folders)}; {len(loose)}",
        "imports between folders; levels": f"{len(arrows)}; {levels(arrows)}",
        "functions": f"{len(functions)}, median {statistics.median(functions):.0f} lines",
        f"functions above {LONG_FUNCTION} lines; longest": (
            f"{sum(length > LONG_FUNCTION for length in functions)}; {functions[-1]}"
        ),
        "lines with Any, imports aside": str(sum(_any_lines(text) for text in sources.values())),
        "signatures with `config: Config`; files": _config_signatures(sources),
        "words of README": str(len(readme.read_text().split())) if readme.exists() else "none",
        "words of docs": str(
            sum(len(page.read_text().split()) for page in (root / "docs").rglob("*.md"))
        ),
    }


def function_lengths(tree: ast.Module) -> Iterator[int]:
    """Lines of each function, from `def` to its last line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.end_lineno - node.lineno + 1


def folder_imports(root: Path, trees: dict[Path, ast.Module]) -> set[tuple[str, str]]:
    """(importing folder, imported folder) of the package. A module outside folders counts as
    one."""
    modules = {".".join(path.relative_to(root).with_suffix("").parts) for path in trees}
    arrows = set()
    for path, tree in trees.items():
        if path == root / PACKAGE / "__init__.py":
            continue  # it only re-exports names
        for node in ast.walk(tree):
            for name in _imported(node):
                if name.startswith(f"{PACKAGE}.") and (name in modules or _is_folder(root, name)):
                    arrows.add((_folder(root, path) or path.stem, name.split(".")[1]))
    return {(source, target) for source, target in arrows if source != target}


def levels(arrows: set[tuple[str, str]]) -> str:
    """The longest chain of imports between folders, or the folders of an import cycle."""
    targets: dict[str, set[str]] = {}
    for source, target in arrows:
        targets.setdefault(source, set()).add(target)
        targets.setdefault(target, set())
    level: dict[str, int] = {}
    while len(level) < len(targets):
        ready = [name for name in targets if name not in level and targets[name] <= set(level)]
        if not ready:
            return f"circle among {', '.join(sorted(set(targets) - set(level)))}"
        level |= {name: 1 + max((level[one] for one in targets[name]), default=0) for name in ready}
    return str(max(level.values(), default=0))


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _is_folder(root: Path, module: str) -> bool:
    return (root / Path(*module.split("."))).is_dir()


def _folder(root: Path, path: Path) -> str:
    parts = path.relative_to(root / PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def _any_lines(source: str) -> int:
    return sum(
        bool(re.search(r"\bAny\b", line)) and not line.lstrip().startswith(("from ", "import "))
        for line in source.splitlines()
    )


def _config_signatures(sources: dict[Path, str]) -> str:
    counts = [len(re.findall(r"\bconfig: Config\b", source)) for source in sources.values()]
    return f"{sum(counts)}; {sum(count > 0 for count in counts)}"


if __name__ == "__main__":
    main()
