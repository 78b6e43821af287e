"""The permissions of Ray's token."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.run.cluster.ray_token import keep_token_private


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of the token in a new home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / ".ray" / "auth_token"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_token_that_others_may_read_becomes_private(token: Path) -> None:
    token.parent.mkdir()
    token.write_text("a token")
    token.chmod(0o644)
    keep_token_private()
    assert mode(token) == 0o600 and token.read_text() == "a token"


@pytest.mark.slow
def test_ray_writes_its_token_into_the_private_file(token: Path) -> None:
    keep_token_private()
    assert (mode(token.parent), mode(token)) == (0o700, 0o600)
    made = "from ray._private.authentication import authentication_token_setup as setup\n"
    made += "setup.enable_token_auth_by_default()\nsetup.ensure_token_if_auth_enabled()"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    subprocess.run([sys.executable, "-c", made], env=environment, check=True, timeout=60)
    assert mode(token) == 0o600 and len(token.read_text()) > 30


def test_a_token_from_the_environment_makes_no_file(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a token")
    keep_token_private()
    assert not token.parent.exists()
