"""Frozen models, which only score tokens: the reference policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.frozen.reference import start_reference as start_reference

__getattr__ = lazy_exports(
    __name__,
    start_reference="reference",
)
