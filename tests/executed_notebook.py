"""Executes a notebook of the project in a kernel of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def executed(notebook: Path, folder: Path, **variables: str) -> list[Any]:
    """The outputs of all cells. Raises CellExecutionError if one fails.

    Args:
        folder: the kernel's working directory.
        variables: environment variables of the kernel.
    """
    content = nbformat.read(notebook, as_version=4)
    NotebookClient(
        content, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute(env=os.environ | {"IPYTHONDIR": str(folder / "ipython")} | variables)
    return [output for cell in content.cells for output in cell.get("outputs", ())]


def printed(outputs: list[Any]) -> str:
    """What the cells wrote to standard output."""
    return "".join(
        output.text
        for output in outputs
        if output.output_type == "stream" and output.name == "stdout"
    )


def kinds(outputs: list[Any]) -> set[str]:
    """The MIME types of what the cells show."""
    return {kind for output in outputs for kind in output.get("data", {})}
