"""Generators: vLLM engines in Serve replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.generation.app import ServeGenerate as ServeGenerate
    from asyncrl.generation.arguments import engine_environment as engine_environment
    from asyncrl.generation.engine import Engine as Engine
    from asyncrl.generation.replica import Generator as Generator
    from asyncrl.generation.settings import GeneratorApp as GeneratorApp

__getattr__ = lazy_exports(
    __name__,
    Generator="replica",
    ServeGenerate="app",
    Engine="engine",
    GeneratorApp="settings",
    engine_environment="arguments",
)
