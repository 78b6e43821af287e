"""Lazy exports of a package: a name is imported on first use, so importing the package is cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable


def lazy_exports(package: str, **homes: str) -> Callable[[str], object]:
    """A module-level `__getattr__` (PEP 562) for a package. Also sets the package's `__all__`.

    Args:
        package: the package's `__name__`.
        homes: exported name → the module of the package that defines it.
    """
    sys.modules[package].__dict__["__all__"] = sorted(homes)

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return load
