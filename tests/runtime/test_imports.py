"""Packages can be hidden from a library that would import them."""

import sys

import pytest

from asyncrl.runtime.imports import hidden


def test_a_hidden_package_is_not_installed_and_then_is_again():
    with pytest.raises(RuntimeError, match="failed"), hidden("antigravity"):
        with pytest.raises(ImportError):
            import antigravity  # noqa: F401
        raise RuntimeError("failed")
    assert "antigravity" not in sys.modules


def test_a_package_that_is_imported_stays():
    import json

    with hidden("json"):
        assert sys.modules["json"] is json
    assert sys.modules["json"] is json
