"""The HTTP endpoint of standing generators, compatible with OpenAI's API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.serving.standing import build_standing_app as build_standing_app

__getattr__ = lazy_exports(
    __name__,
    build_standing_app="standing",
)
