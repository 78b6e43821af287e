"""Generators: vLLM engines in Serve replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.generation.app import (
        ServeGenerate as ServeGenerate,
        begin_generators as begin_generators,
        wait_for_generators as wait_for_generators,
    )
    from asyncrl.generation.engine.arguments import engine_environment as engine_environment
    from asyncrl.generation.engine.engine import Engine as Engine, start_engine as start_engine
    from asyncrl.generation.replica import Generator as Generator
    from asyncrl.generation.seeds import draw_in_blocks as draw_in_blocks
    from asyncrl.generation.settings import GeneratorApp as GeneratorApp

__getattr__ = lazy_exports(
    __name__,
    begin_generators="app",
    draw_in_blocks="seeds",
    Engine="engine.engine",
    engine_environment="engine.arguments",
    Generator="replica",
    GeneratorApp="settings",
    ServeGenerate="app",
    start_engine="engine.engine",
    wait_for_generators="app",
)
