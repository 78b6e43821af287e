"""An update that does not come to its end leaves an engine that says so. The engine around it is a stub: no vLLM."""

import asyncio
from types import SimpleNamespace

import pytest

from asyncrl.generation.engine import Engine
from asyncrl.generation.settings import GeneratorApp


async def nothing(**arguments):
    return None


def engine(update_weights):
    made = Engine(GeneratorApp(model="unused"))
    made._llm = SimpleNamespace(
        pause_generation=nothing,
        resume_generation=nothing,
        start_weight_update=nothing,
        update_weights=update_weights,
        output_processor=SimpleNamespace(request_states={}),
        errored=False,
    )
    return made


def test_a_failed_update_breaks_the_engine():
    async def fails(request):
        raise OSError("lost")

    broken = engine(fails)
    with pytest.raises(RuntimeError, match="the update of version 3 failed: OSError: lost"):
        asyncio.run(broken.apply({}, 3))
    assert broken.version == 0 and "OSError" in broken.broken


def test_so_does_a_cancelled_one():
    async def hangs(request):
        await asyncio.Event().wait()

    broken = engine(hangs)

    async def cancelled():
        await asyncio.wait_for(broken.apply({}, 3), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    with pytest.raises(RuntimeError, match="the update of version 3 failed: CancelledError"):
        asyncio.run(broken.check())
