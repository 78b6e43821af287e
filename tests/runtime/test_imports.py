"""Packages can be hidden from a library that would import them, and a user's modules hide none."""

import importlib
import os
import subprocess
import sys

import pytest

from asyncrl.runtime.functions import FunctionError, import_function
from asyncrl.runtime.imports import (
    SAFE,
    SAFE_PATH,
    for_users_programs,
    hidden,
    import_path,
    user_folder_last,
)


def test_a_hidden_package_is_not_installed_and_then_is_again():
    with pytest.raises(RuntimeError, match="failed"), hidden("tabnanny"):
        with pytest.raises(ImportError):
            import tabnanny  # noqa: F401
        raise RuntimeError("failed")
    assert "tabnanny" not in sys.modules


def test_a_package_that_is_imported_stays():
    import json

    with hidden("json"):
        assert sys.modules["json"] is json
    assert sys.modules["json"] is json


def test_a_package_that_the_body_imports_or_removes_is_no_error():
    with hidden("tabnanny"):
        del sys.modules["tabnanny"]
    with hidden("tabnanny"):
        sys.modules["tabnanny"] = sys
    assert sys.modules.pop("tabnanny") is sys


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty current folder; the path and the variables are restored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(SAFE_PATH, "restored")
    monkeypatch.delenv(SAFE_PATH)
    return tmp_path


def test_the_users_folder_is_last_here_and_in_processes(folder, monkeypatch):
    (folder / "tabnanny.py").write_text("raise ValueError('hides')")
    (folder / "of_the_user.py").write_text("VALUE = 7")
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    sys.path[:0] = [str(folder)]
    user_folder_last()
    assert sys.path[-1] == str(folder) and str(folder) not in sys.path[:-1]
    importlib.invalidate_caches()
    assert importlib.import_module("of_the_user").VALUE == 7
    importlib.import_module("tabnanny")
    start = "import tabnanny, sys; print(tabnanny.__file__)"
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True)
    assert done.returncode == 0 and str(folder) not in done.stdout


def test_a_users_programs_have_pythons_usual_path(folder):
    user_folder_last()
    assert os.environ[SAFE_PATH] == SAFE
    for_users_programs()
    assert SAFE_PATH not in os.environ
    os.environ[SAFE_PATH] = "1"
    for_users_programs()
    assert os.environ[SAFE_PATH] == "1"


def test_a_current_folder_that_was_removed_is_left_out(folder):
    folder.rmdir()
    assert "" not in import_path() and str(folder) not in import_path()


def test_a_hidden_module_of_the_user_is_named(folder):
    (folder / "json.py").write_text("def correct(completions): return [1.0]")
    with pytest.raises(
        FunctionError, match=r"json\.py is not used, because module 'json' is .*rename"
    ):
        import_function("reward", "json:correct")
