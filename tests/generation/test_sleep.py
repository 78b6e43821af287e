"""Engines that free their GPU while they rest. vLLM is a stub that records calls; one test binds
every recorded call to the signatures of the installed vLLM."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
import ray
from engines import StubOutputs, engine_around

from asyncrl.config import GeneratorConfig
from asyncrl.contracts.errors import GpuMemoryError, StaleReplicaError
from asyncrl.contracts.messages import WeightsId
from asyncrl.generation import replica as replica_module
from asyncrl.generation.engine.engine import Engine
from asyncrl.generation.replica import Generator
from asyncrl.generation.settings import GeneratorApp
from asyncrl.weights.engine_fingerprints import EngineFingerprints

GIB = 2**30
TOTAL, CONTEXT, WEIGHTS, CACHE = 80 * GIB, 2 * GIB, 16 * GIB, 40 * GIB
UPDATE = ["start_weight_update", "update_weights", "finish_weight_update"]


class StubLLM:
    """Calls, and the memory of one GPU. As in vLLM, waking the last part resumes generation."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.output_processor = StubOutputs()
        self.on_device = {"weights", "kv_cache"}
        self.others = 0
        """Bytes of the learner."""
        self.paused = False
        self.errored = False
        self.fails: str | None = None

    async def collective_rpc(self, method: str) -> list[tuple[int, int]]:
        assert method == "gpu_memory" and callable(getattr(EngineFingerprints, method))
        sizes = {"weights": WEIGHTS, "kv_cache": CACHE}
        own = CONTEXT + sum(sizes.get(part, 0) for part in self.on_device)
        return [(TOTAL - own - self.others, TOTAL)]

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, arguments, named))
            if self.fails == name:
                raise OSError("lost")
            effect = getattr(type(self), f"_{name}", nothing)
            return await effect(self, *arguments, **named)

        return call

    async def _sleep(self, level: int, mode: str) -> None:
        assert (level, mode) == (1, "keep"), "other levels and modes lose weights or requests"
        self.on_device, self.paused = set(), True

    async def _wake_up(self, tags: list[str]) -> bool:
        assert self.paused and not self.on_device & {*tags}
        self.on_device |= {*tags}
        awake = self.on_device == {"weights", "kv_cache"}
        self.paused = not awake
        return awake

    async def _pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.paused = True

    async def _resume_generation(self) -> None:
        assert self.on_device == {"weights", "kv_cache"}
        self.paused = False

    async def _update_weights(self, request: Any) -> None:
        assert "weights" in self.on_device and self.paused

    @property
    def names(self) -> list[str]:
        return [" ".join([name, *named.get("tags", ())]) for name, _, named in self.calls]


async def nothing(*arguments: Any, **named: Any) -> None:
    return None


def sleeping() -> tuple[Engine, Any]:
    generator = GeneratorConfig(device="cuda", gpu_memory_utilization=0.85)
    app = GeneratorApp(model="unused", generator=generator, sleeps=True, num_gpus=0.4)
    llm: Any = StubLLM()
    return engine_around(llm, app), llm


async def test_weights_update_cache_and_requests_come_back_in_this_order() -> None:
    engine, llm = sleeping()
    await engine.rest.begin()
    await engine.rest.begin()
    assert engine.rest.rests and engine.rest.asleep and not engine._state.opened.is_set()
    assert llm.names == ["sleep"] and not llm.on_device
    await engine.updates.apply({}, 3)
    assert not engine.rest.asleep and engine.version == 3 and llm.on_device == {"weights"}
    assert llm.paused and engine.rest.rests and not engine._state.opened.is_set()
    await engine.rest.end()
    await engine.rest.end()
    assert llm.names == [
        "sleep",
        "wake_up weights",
        *UPDATE,
        "wake_up kv_cache",
        "resume_generation",
    ]
    assert engine._state.opened.is_set() and not llm.paused and engine.broken is None


async def test_a_rest_without_an_update_ends_with_the_same_weights() -> None:
    """After a skipped step, or a rest at the start: level 1 keeps the weights."""

    engine, llm = sleeping()
    for _ in range(2):
        await engine.rest.begin()
        await engine.rest.end()
    shift = ["sleep", "wake_up weights", "wake_up kv_cache", "resume_generation"]
    assert llm.names == 2 * shift and engine.version == 0


async def test_an_awake_engine_takes_a_version_as_ever() -> None:
    engine, llm = sleeping()
    await engine.updates.apply({}, 1)
    assert llm.names == ["pause_generation", *UPDATE, "resume_generation"]


async def test_weights_that_came_late_leave_again_in_the_learners_shift() -> None:
    engine, llm = sleeping()
    await engine.rest.begin()
    await engine.updates.apply({}, 1)
    llm.others = 9 * GIB  # now the learner has the GPU, and only the weights leave
    await engine.rest.begin()
    assert llm.names[-1] == "sleep" and engine.rest.asleep and not llm.on_device
    llm.others = TOTAL - CONTEXT - WEIGHTS - CACHE + 1
    with pytest.raises(GpuMemoryError, match=r"an engine needs back 56\.00 GiB"):
        await engine.rest.end()
    llm.others -= 1
    await engine.rest.end()
    assert engine.broken is None and not engine.rest.rests


@pytest.mark.parametrize("moment", ["update", "wake"])
async def test_memory_that_the_learner_still_holds_is_named_and_nothing_changes(
    moment: str,
) -> None:
    engine, llm = sleeping()
    await engine.rest.begin()
    llm.others = 30 * GIB
    with pytest.raises(GpuMemoryError) as refused:
        await (engine.rest.end() if moment == "wake" else engine.updates.apply({}, 1))
    assert str(refused.value) == (
        "the generators' shift cannot begin: an engine needs back 56.00 GiB of GPU memory, but"
        " 48.00 GiB of 80.00 GiB are free: the learner, and what stays of the engine, hold"
        " 32.00 GiB; lower generator.gpu_memory_utilization = 0.85"
    )
    assert llm.names == ["sleep"] and engine.broken is None and engine.rest.asleep
    llm.others = 0
    await engine.rest.end()
    assert not engine.rest.rests and engine.version == 0


@pytest.mark.parametrize("fails", ["sleep", "wake_up", "update_weights", "resume_generation"])
async def test_a_failure_halfway_breaks_the_engine(fails: str) -> None:
    engine, llm = sleeping()
    llm.fails = fails
    with pytest.raises(RuntimeError, match="failed: OSError: lost"):
        await engine.rest.begin()
        await engine.updates.apply({}, 1)
        await engine.rest.end()
    assert engine.broken is not None and engine._state.opened.is_set()


async def test_an_engine_that_does_not_wake_whole_is_broken() -> None:
    engine, llm = sleeping()
    await engine.rest.begin()
    llm.on_device = {"another part"}
    with pytest.raises(RuntimeError, match="vLLM still sleeps after its weights and its KV"):
        await engine.rest.end()
    assert engine.broken is not None


async def test_weights_on_the_host_are_not_read() -> None:
    engine, _ = sleeping()
    await engine.rest.begin()
    with pytest.raises(RuntimeError, match="rests, so its weights are not on the GPU"):
        await engine.updates.fingerprints()


class Bare(Generator):
    """A replica that has only these attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __del__(self) -> None: ...  # type: ignore[override]


async def test_a_request_does_not_load_a_version_in_the_learners_shift() -> None:
    engine, llm = sleeping()
    await engine.rest.begin()
    late = Bare(engine=engine, replica="a", held=False, weights=WeightsId("r", 0, 1))
    with pytest.raises(StaleReplicaError, match=r"rests at .*, and the learner uses its GPU"):
        await late._catch_up_for(WeightsId("r", 0, 2))
    assert llm.names == ["sleep"]


async def test_an_engine_starts_once_the_learner_has_left_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_module, "SHIFT_EVERY_S", 0.001)
    answers, asked = [True, None, True, False], list[str]()

    async def registry(method: str, absent: Any) -> Any:
        assert absent is False, "without a version registry, no learner holds the GPU"
        asked.append(method)
        return answers[len(asked) - 1]

    await Bare(_ask_registry=registry)._wait_for_device()
    assert asked == ["learner_on_device"] * 4, "silence does not say that the GPU is free"


class SilentRegistry:
    """A version registry that fails to answer, or never does."""

    def __init__(self, error: Exception | None) -> None:
        self.learner_on_device, self.error = self, error

    async def remote(self) -> None:
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("registry", "answer"),
    [
        (None, False),
        (SilentRegistry(ray.exceptions.ActorDiedError()), None),
        (SilentRegistry(None), None),
    ],
    ids=["absent", "dead", "hangs"],
)
async def test_a_silent_registry_is_not_an_absent_one(
    monkeypatch: pytest.MonkeyPatch, registry: Any, answer: Any
) -> None:
    monkeypatch.setattr(replica_module, "REGISTRY_S", 0.01)
    monkeypatch.setattr(replica_module, "find_registry", lambda name: registry)
    replica = Bare(_registry_name="registry")
    assert await replica._ask_registry("learner_on_device", absent=False) is answer


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_calls_fit_the_installed_vllm() -> None:
    """What no CPU can run is at least what vLLM's classes take and return."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import SLEEP_TAGS

    engine, llm = sleeping()
    await engine.rest.begin()
    await engine.updates.apply({}, 1)
    await engine.rest.end()
    await engine.updates.apply({}, 2)
    calls = llm.calls
    assert {name for name, _, _ in calls} >= {"sleep", "wake_up", *UPDATE}
    for name, arguments, named in calls:
        method = getattr(AsyncLLM, name)
        assert inspect.iscoroutinefunction(method), name
        inspect.signature(method).bind(None, *arguments, **named)
    assert {"weights", "kv_cache"} == SLEEP_TAGS
    assert inspect.signature(AsyncLLM.wake_up).return_annotation in (bool, "bool")
    assert AsyncEngineArgs(model="m", enable_sleep_mode=True).enable_sleep_mode
    # A wake of the last part resumes the scheduler, and a sleep clears the cache of prefixes.
    assert "self.resume_scheduler()" in inspect.getsource(EngineCore.wake_up)
    assert "clear_prefix_cache = level >= 1" in inspect.getsource(EngineCore.sleep)
