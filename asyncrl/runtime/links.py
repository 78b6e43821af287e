"""A run stays in its directory: no link in it leads elsewhere."""

from __future__ import annotations

from pathlib import Path

from asyncrl.contracts.errors import EscapesDirectoryError

__all__ = [
    "refuse_links",
]


def refuse_links(directory: Path, whole: bool = False) -> None:
    """Raise EscapesDirectoryError if the directory, or an entry of it, is a symbolic link; it need
    not exist.

    Args:
        whole: entries at every depth count. (Otherwise those right below it: a sink's own folder
            may hold links.)
    """
    for path in (directory, *(directory.rglob("*") if whole else directory.glob("*"))):
        if path.is_symlink():
            raise EscapesDirectoryError(
                f"{path} is a symbolic link, so what is written there would leave {directory}; put"
                " a real file or directory in its place"
            )
