"""Installs a wheel of the project in a fresh environment, and checks what it declares."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IN_SANDBOX = "in_sandbox.py"
"""A program that runs in the sandbox's Python, and imports what that has."""
IN_EXTRAS = {"vllm": "gpu", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""Imported package → the extra that brings it."""


def run(*command: object, **options) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def distributions(requirements: Iterable[str]) -> set[str]:
    """Normalized names of the distributions in requirements such as `ray[serve]==2.60.0`."""
    found = (re.match(r"[\w.-]+", one) for one in requirements)
    return {normalized(one[0]) for one in found if one}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


DECLARED = distributions(PROJECT["dependencies"])


def imported() -> set[str]:
    """Top-level packages that the package imports, without the standard library's and its own."""
    found = set()
    for path in (ROOT / "asyncrl").rglob("*.py"):
        if path.name == IN_SANDBOX:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").partition(".")[0])
    return found - sys.stdlib_module_names - {"asyncrl"}


def test_every_imported_package_is_declared() -> None:
    names = imported()
    assert len(names) > 20 and names >= set(IN_EXTRAS)
    makers = packages_distributions()
    undeclared = {
        name
        for name in names - set(IN_EXTRAS)
        if not {normalized(maker) for maker in makers[name]} & DECLARED
    }
    assert not undeclared, "add them to [project.dependencies]"
    for name, extra in IN_EXTRAS.items():
        brought = distributions(PROJECT["optional-dependencies"][extra])
        assert any(maker.startswith(name) for maker in brought), name


def test_the_release_page_builds_as_this_test_does() -> None:
    page = (ROOT / "docs" / "development" / "releasing.md").read_text()
    assert "`.venv/bin/uv build --wheel`" in page and "python -m build" not in page


@pytest.mark.slow
def test_the_wheel_installs_and_its_command_answers(tmp_path: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    run(uv, "build", "--wheel", "--out-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("asyncrl-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "asyncrl/py.typed" in names and "asyncrl/config/schema.py" in names
    assert not [name for name in names if name.startswith(("tests/", "jobs/", "docs/"))]
    (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    required = Parser().parsestr(text).get_all("Requires-Dist") or []
    assert distributions(one for one in required if "extra ==" not in one) == DECLARED
    run(sys.executable, "-m", "venv", tmp_path / "fresh")
    python = tmp_path / "fresh" / "bin" / "python"
    run(uv, "pip", "install", "--python", python, "--no-deps", wheel)
    # Other packages come from this environment, because installing them would take minutes.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    here = run(sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    (Path(site) / "packages.pth").write_text(here)
    place = run(python, "-c", "import asyncrl; print(asyncrl.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(tmp_path / "fresh")
    assert "usage: asyncrl" in run(tmp_path / "fresh" / "bin" / "asyncrl", "--help", cwd=tmp_path)
