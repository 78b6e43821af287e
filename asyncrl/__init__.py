"""Asynchronous reinforcement-learning post-training for large language models, on Ray.

Importing the package is cheap: it loads each export on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.run.embedded import train
    from asyncrl.rundir.reader import open_run

__all__ = ["open_run", "train"]


def __getattr__(name: str) -> object:
    if name == "open_run":
        from asyncrl.rundir.reader import open_run

        return open_run
    if name == "train":
        from asyncrl.run.embedded import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
