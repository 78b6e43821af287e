"""Generators: vLLM engines in Serve replicas."""

from __future__ import annotations

from asyncrl.runtime.exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    Engine="engine",
    GeneratorApp="settings",
    engine_environment="arguments",
)
