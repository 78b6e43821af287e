"""Weight synchronization: gather, publish, fetch, check and apply a version."""

from __future__ import annotations

from asyncrl.runtime.exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    BACKEND="engine",
    CannotPublishError="published",
    TOKENIZER_MODE="engine",
    version_table="published",
)
