"""The HTTP endpoint of standing generators, compatible with OpenAI's API."""

from __future__ import annotations

from asyncrl.runtime.exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    build_standing_app="standing",
)
