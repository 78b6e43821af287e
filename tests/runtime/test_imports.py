"""Packages can be hidden from a library that would import them."""

import sys

import pytest

from asyncrl.runtime.imports import hidden


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
