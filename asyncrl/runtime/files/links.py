"""Refusing symbolic links in a run's directory, so that its files stay there."""

from __future__ import annotations

from pathlib import Path

from asyncrl.contracts.errors import EscapesDirectoryError


def refuse_links(directory: Path, whole: bool = False) -> None:
    """Raise EscapesDirectoryError if the directory or an entry of it is a symbolic link. The
    directory may be missing.

    Args:
        whole: check entries at every depth. By default only direct entries are checked, because a
            sink's folder may contain links.
    """
    for path in (directory, *(directory.rglob("*") if whole else directory.glob("*"))):
        if path.is_symlink():
            raise EscapesDirectoryError(
                f"{path} is a symbolic link, so writing to it would leave {directory}; replace it"
                " with a real file or directory"
            )
