"""The prefix cache of siblings and of the turns of a session, with a real engine under
`in_flight: keep`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from disturbed import disturb
from engines import EngineActor

from asyncrl.config import GeneratorConfig
from asyncrl.contracts.messages import Details, GenerateRequest
from asyncrl.contracts.rows import Completion
from asyncrl.generation.engine.arguments import engine_environment
from asyncrl.generation.engine.requests import Answered
from asyncrl.generation.settings import GeneratorApp
from asyncrl.weights.manifest import expected_tensors
from asyncrl.weights.staging import fetch_version

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK, SLOTS = 32, 4
"""Tokens of a cache block, and completions that the engine runs at once."""
PROMPT = tuple(4 + (7 * place + place // 5) % 50 for place in range(70))
TURN = GenerateRequest(PROMPT, 1, 40, 1.0, seed=5, ignore_eos=True, session="s")
LONG = GenerateRequest((5, 6, 14), 1, 150, 1.0, seed=6, ignore_eos=True)
TOLERANCE = 1e-4


class Cached:
    """The engine in its actor, with the versions that it takes."""

    def __init__(self, ray: Any, actor: Any, model: Path, publish: Any, folder: Path) -> None:
        self._ray, self._actor, self._publish = ray, actor, publish
        self._model, self._folder, self._version = model, folder, 0

    def answer(self, request: GenerateRequest) -> Answered:
        made: Answered = self._ray.get(self._actor.answer.remote(request), timeout=120)
        return made

    def stream(self, request: GenerateRequest) -> tuple[int, ...]:
        """Ids of a streamed completion."""
        ids: tuple[int, ...] = self._ray.get(self._actor.streamed.remote(request), timeout=120)
        return ids

    def update(self, model: Any, runs: int = 0, *requests: GenerateRequest) -> tuple[int, Any]:
        """Apply the model's weights while completions run. Returns the version, and what the
        actor's `across` returns."""
        self._version += 1
        staged = fetch_version(
            self._publish(dict(model.named_parameters()), version=self._version),
            expected_tensors(self._model, "float32"),
            60,
            self._folder,
        )
        try:
            across = self._actor.across.remote(
                staged.update_info(), self._version, runs, list(requests)
            )
            return self._version, self._ray.get(across, timeout=120)
        finally:
            staged.remove()


@pytest.fixture(scope="module")
def cached(
    ray_cluster: Any,
    untied_model: Path,
    publish: Any,
    engine_starts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cached]:
    async def until(condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    class CacheActor(EngineActor):
        async def streamed(self, request: GenerateRequest) -> tuple[int, ...]:
            pieces = self.engine.requests.stream(request, Details())
            return tuple([token async for piece in pieces for token in piece.tokens.ids])

        async def across(
            self, update: Any, version: int, runs: int, requests: list[GenerateRequest]
        ) -> tuple[list[Answered], list[Answered], int]:
            """Apply a version while `runs` long completions run and these requests are under way.
            Returns the answers to the long ones and to these, and how many were submitted again."""
            before, counts = self.engine.stats.tokens_generated, list[int]()
            long = [asyncio.create_task(self.answer(replace(LONG, seed=n))) for n in range(runs)]
            await until(lambda: self.engine.stats.tokens_generated >= before + 2 * runs)
            mine = [asyncio.create_task(self.answer(request)) for request in requests]
            original = self.engine._state.kept.submit_again

            async def submit_again(llm: Any) -> int:
                counts.append(await original(llm))
                return counts[-1]

            self.engine._state.kept.submit_again = submit_again  # type: ignore[method-assign]
            if not runs:  # until each request has tokens
                sampled = before + 2 * len(requests)
                await until(lambda: self.engine.stats.tokens_generated >= sampled)
            else:  # until vLLM has each request
                known = self.engine._state.llm.output_processor.request_states
                await until(lambda: len(known) >= runs + len(requests))
            await self.apply(update, version)
            self.engine._state.kept.submit_again = original  # type: ignore[method-assign]
            return await asyncio.gather(*long), await asyncio.gather(*mine), counts[0]

    app = GeneratorApp(
        model=str(untied_model),
        max_model_len=256,
        cache_block=BLOCK,
        generator=GeneratorConfig(
            max_num_seqs=SLOTS, kv_cache_memory_bytes=4 << 20, in_flight="keep"
        ),
    )
    engine_starts.append("engine with sessions")
    actor = (
        ray_cluster.remote(CacheActor)
        .options(num_cpus=0, runtime_env={"env_vars": engine_environment("cpu")})
        .remote(app)
    )
    print("start:", ray_cluster.get(actor.start.remote(), timeout=500))
    yield Cached(ray_cluster, actor, untied_model, publish, tmp_path_factory.mktemp("staged"))
    ray_cluster.kill(actor)


@pytest.fixture
def apart(reference: Any) -> Callable[[Any, GenerateRequest, Completion], float]:
    """How far a completion's log-probs are from those of a transformers model."""

    def worst(model: Any, request: GenerateRequest, completion: Completion) -> float:
        expected = reference(model, request.prompt_ids, completion.token_ids)
        return float((expected - torch.tensor(completion.logprobs)).abs().max())

    return worst


def next_turn(request: GenerateRequest, completion: Completion, seed: int) -> GenerateRequest:
    """The request of the turn after this one, with 20 tokens of an environment."""
    added = tuple(4 + (11 * place + seed) % 50 for place in range(20))
    return replace(
        request, prompt_ids=(*request.prompt_ids, *completion.token_ids, *added), seed=seed
    )


def versions(completion: Completion) -> list[int]:
    return [span.version for span in completion.versions]


def test_a_turn_reads_only_what_is_new(
    cached: Cached, apart: Any, load_reference: Any, untied_model: Path
) -> None:
    model = load_reference(untied_model)
    cached.update(disturbed(model, 1))
    (first,), found, _ = cached.answer(TURN)
    assert found == (0,)
    second = next_turn(TURN, first, 7)
    (after,), found, _ = cached.answer(second)
    assert found == (96,), "three whole blocks of 70 + 40 - 1 tokens"
    (alone,), of_nobody, _ = cached.answer(replace(second, session=None))
    (other,), of_other, _ = cached.answer(replace(second, session="t"))
    assert of_nobody == of_other == (128,), "all requests share the blocks of the same tokens"
    assert after.token_ids == alone.token_ids == other.token_ids
    assert after.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)
    assert apart(model, second, after) <= TOLERANCE
    branches, found, _ = cached.answer(replace(second, n=3, seed=8))
    assert found == (128,) * 3, "130 prompt tokens, and their last one is always computed"
    for branch in branches:
        assert apart(model, second, branch) <= TOLERANCE
    assert cached.stream(second) == after.token_ids


def test_siblings_share_their_prompt(
    cached: Cached, apart: Any, load_reference: Any, untied_model: Path
) -> None:
    model = load_reference(untied_model)
    cached.update(disturbed(model, 6))
    group = replace(TURN, session=None, n=SLOTS)
    completions, found, _ = cached.answer(group)
    assert sorted(found) == [0, *[64] * (SLOTS - 1)], "two whole blocks of 70 tokens"
    for completion in completions:
        assert apart(model, group, completion) <= TOLERANCE


def test_nothing_is_reused_after_an_update(
    cached: Cached, apart: Any, load_reference: Any, untied_model: Path
) -> None:
    model = load_reference(untied_model)
    cached.update(disturbed(model, 1))
    (first,), _, _ = cached.answer(TURN)
    second = next_turn(TURN, first, 7)
    cached.answer(second)
    version, _ = cached.update(disturbed(model, 2))
    (after,), found, _ = cached.answer(second)
    assert found == (0,) and versions(after) == [version]
    assert apart(model, second, after) <= TOLERANCE
    assert cached.answer(second)[1] == (128,)


def test_a_turn_in_the_queue_over_an_update_reads_everything_again(
    cached: Cached, apart: Any, load_reference: Any, untied_model: Path
) -> None:
    """vLLM looks for its blocks when it is scheduled, which is after the update."""
    model = load_reference(untied_model)
    cached.update(disturbed(model, 1))
    (first,), _, _ = cached.answer(TURN)
    second = next_turn(TURN, first, 7)
    assert cached.answer(second)[1] == (96,)
    other = replace(TURN, prompt_ids=PROMPT[::-1], session="u", seed=9)
    cached.answer(other)
    assert cached.answer(other)[1] == (64,)
    version, (long, mine, again) = cached.update(disturbed(model, 3), SLOTS, second, other)
    for (completion,), *_ in long:
        assert versions(completion) == [version - 1, version], "the engine was not full"
    assert again == 2
    for request, ((completion,), found, _) in zip((second, other), mine, strict=True):
        assert found == (0,) and versions(completion) == [version]
        assert apart(model, request, completion) <= TOLERANCE


def test_a_turn_after_one_that_an_update_crossed_finds_nothing_of_it(
    cached: Cached, apart: Any, load_reference: Any, untied_model: Path
) -> None:
    model = load_reference(untied_model)
    cached.update(disturbed(model, 1))
    crossing = replace(TURN, max_tokens=100)
    version, (_, [((first,), *_)], again) = cached.update(disturbed(model, 4), 0, crossing)
    assert versions(first) == [version - 1, version] and again == 0
    second = next_turn(TURN, first, 7)
    (after,), found, _ = cached.answer(second)
    assert found == (0,) and versions(after) == [version]
    assert apart(model, second, after) <= TOLERANCE


def disturbed(model: Any, seed: int) -> Any:
    disturb(model, seed)
    return model
