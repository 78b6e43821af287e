"""Installs a wheel of the project in a fresh environment."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: object, **options) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_installs_and_its_command_answers(tmp_path: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    run(uv, "build", "--wheel", "--out-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("asyncrl-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "asyncrl/py.typed" in names and "asyncrl/config/schema.py" in names
    assert not [name for name in names if name.startswith(("tests/", "jobs/", "docs/"))]
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
