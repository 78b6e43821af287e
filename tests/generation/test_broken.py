"""An engine that is lost in an update, hangs or ends refuses requests with the reason. vLLM is a
stub."""

import asyncio
import time

import pytest
from engines import StubOutputs, engine_around

from asyncrl.config import GeneratorConfig
from asyncrl.contracts.errors import EngineDiedError, StaleReplicaError
from asyncrl.contracts.messages import Details, GenerateRequest, Tokens
from asyncrl.generation.settings import GeneratorApp


async def nothing(**arguments):
    return None


class StubLLM:
    """vLLM with these methods and attributes. It is its own model config."""

    errored = False
    max_model_len = 64

    def __init__(self, **given):
        self.model_config, self.output_processor = self, StubOutputs()
        self.pause_generation = self.resume_generation = self.start_weight_update = nothing
        vars(self).update(given)


def engine(update_weights):
    return engine_around(StubLLM(update_weights=update_weights), GeneratorApp(model="unused"))


async def test_a_failed_update_breaks_the_engine():
    async def fails(request):
        raise OSError("lost")

    broken = engine(fails)
    with pytest.raises(RuntimeError, match="the update of version 3 failed: OSError: lost"):
        await broken.updates.apply({}, 3)
    assert broken.version == 0 and "OSError" in broken.broken


async def test_a_cancelled_update_breaks_the_engine_too():
    async def hangs(request):
        await asyncio.Event().wait()

    broken = engine(hangs)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(broken.updates.apply({}, 3), 0.05)
    with pytest.raises(RuntimeError, match="the update of version 3 failed: CancelledError"):
        await broken.check()


@pytest.mark.parametrize("moment", ["begin", "end"])
async def test_a_rest_that_fails_breaks_the_engine(moment):
    """A failed pause must not count as a rest: the engine may still generate."""

    async def fails(**arguments):
        raise OSError("lost")

    broken = engine(nothing)
    if moment == "end":
        await broken.rest.begin()
        assert broken.rest.rests
        broken._state.llm.resume_generation = fails
    else:
        broken._state.llm.pause_generation = fails
    with pytest.raises(RuntimeError, match="rest failed: OSError: lost"):
        await getattr(broken.rest, moment)()
    assert broken.rest.rests == (moment == "end") and broken._state.opened.is_set()
    with pytest.raises(RuntimeError, match="rest failed: OSError: lost"):
        await broken.check()


async def test_a_stopped_engine_refuses_requests():
    llm = StubLLM(shutdown=lambda timeout: None)
    stopped = engine_around(llm, GeneratorApp(model="unused"))
    await stopped.stop()
    for ask in (
        stopped.requests.generate(GenerateRequest((1,), 1, 1, 1.0)),
        stopped.requests.logprobs([((1,), (2,))]),
    ):
        with pytest.raises(StaleReplicaError, match="the engine has been stopped"):
            await ask
    with pytest.raises(StaleReplicaError, match="the engine has been stopped"):
        await anext(stopped.requests.stream(GenerateRequest((1,), 1, 1, 1.0), Details()))


@pytest.mark.parametrize("how", ["dies", "falls silent"])
async def test_a_stream_of_an_engine_that_ends_raises_after_its_last_piece(llama_model, how):
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.exceptions import EngineDeadError

    async def generate(prompt, sampling, name, lora_request):
        logprobs = FlatLogprobs([0], [1], [5], [-1.0], [None], [None])
        made = CompletionOutput(0, "", [5], None, logprobs)
        yield RequestOutput(name, None, None, None, [made], finished=False)
        if how == "dies":
            raise EngineDeadError

    ending = engine_around(StubLLM(generate=generate), GeneratorApp(model=str(llama_model)))
    stream = ending.requests.stream(GenerateRequest((1,), 1, 9, 1.0), Details())
    assert (await anext(stream)).tokens == Tokens((5,), (-1.0,))
    with pytest.raises(
        EngineDiedError,
        match="process has died" if how == "dies" else "ended a request without an answer",
    ):
        await anext(stream)


def build(is_sleeping):
    settings = GeneratorConfig(stall_timeout_s=0.5)
    app = GeneratorApp(model="unused", generator=settings)
    return engine_around(StubLLM(is_sleeping=is_sleeping), app)


async def test_an_engine_that_hangs_is_killed():
    async def hangs():
        await asyncio.Event().wait()

    stuck = build(hangs)
    await stuck.check()
    await stuck.check()
    assert not stuck.processes.killed
    await asyncio.sleep(0.6)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"has not answered for generator.stall_timeout_s = 0.5 s"
        ):
            await stuck.check()
    assert stuck.processes.killed


async def test_a_slow_engine_is_not_killed():
    async def slow():
        await asyncio.sleep(0.2)
        return False

    engine = build(slow)
    for _ in range(16):
        await engine.check()
        await asyncio.sleep(0.05)
    # This process hangs while the answer arrives.
    time.sleep(1.0)  # noqa: ASYNC251
    await engine.check()
    assert engine.broken is None and not engine.processes.killed


async def test_a_probe_that_fails_is_an_error():
    async def fails():
        raise TypeError("no such method")

    engine = build(fails)
    await engine.check()
    await asyncio.sleep(0)
    with pytest.raises(TypeError, match="no such method"):
        await engine.check()


async def test_the_same_version_of_another_attempt_shares_no_prefix():
    """An engine that outlives its learner takes the checkpoint's version again."""
    from vllm.logprobs import Logprob
    from vllm.outputs import RequestOutput

    salts = []

    async def generate(prompt, sampling, name, lora_request):
        salts.append(prompt["cache_salt"])
        yield RequestOutput(name, None, None, [None, {2: Logprob(0.0)}], [], finished=True)

    made = engine(lambda request: nothing())
    made._state.llm.finish_weight_update = lambda weight_version: nothing()
    made._state.llm.generate = generate
    for _ in range(2):
        await made.updates.apply({}, 5)
        await made.requests.logprobs([((1,), (2,))])
        await made.requests.logprobs([((1,), (2,))])
    assert len(salts) == 4 and salts[0] == salts[1] != salts[2] == salts[3]
