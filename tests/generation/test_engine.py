"""A real engine without Serve: an untied head, updates of generations in flight, a failed update,
and a kill that leaves no process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from disturbed import disturb
from engines import EngineActor

from asyncrl.config import GeneratorConfig
from asyncrl.contracts.errors import StaleReplicaError
from asyncrl.contracts.messages import Details, GenerateRequest
from asyncrl.generation.engine.arguments import engine_environment
from asyncrl.generation.engine.engine import LoadTimes
from asyncrl.generation.held_outputs import HOLD_S
from asyncrl.generation.settings import GeneratorApp
from asyncrl.weights.manifest import expected_tensors
from asyncrl.weights.staging import fetch_version

pytestmark = pytest.mark.timeout(600)

PAUSE_S = 0.3
"""How much longer every update pauses the engine."""
KV_TOKENS = 8192
"""Tokens of 1 KiB each: 2 layers, keys and values, 2 heads of 32 float32."""


@pytest.fixture(scope="module")
def holder(ray_cluster: Any, untied_model: Path, engine_starts: list[str]) -> Iterator[Any]:
    class SlowActor(EngineActor):
        async def start(self) -> LoadTimes:
            load = await super().start()
            original = self.engine.rest.pause

            async def pause() -> Any:
                unfinished = await original()
                await asyncio.sleep(PAUSE_S)
                return unfinished

            self.engine.rest.pause = pause  # type: ignore[method-assign]
            return load

        async def most_probable(self, request: GenerateRequest, top: int) -> int:
            """Stream a completion with its most probable tokens: the number of its tokens."""
            pieces = self.engine.requests.stream(request, Details(prompt=False, top=top))
            return sum([len(piece.tokens.ids) async for piece in pieces])

        async def generated(self) -> int:
            return self.engine.stats.tokens_generated

        async def generated_amid_update(
            self, first: list[GenerateRequest], last: GenerateRequest, update: Any, version: int
        ) -> list[Any]:
            """Apply the version once all the first requests and one completion of the last request
            have tokens. Returns the completions of the last request."""

            async def sampling(count: int) -> None:
                states = self.engine._state.llm.output_processor.request_states
                while sum(not state.is_prefilling for state in states.values()) < count:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)

            tasks = [asyncio.create_task(self.generate(request)) for request in first]
            await sampling(len(first))
            tasks.append(asyncio.create_task(self.generate(last)))
            await sampling(len(first) + 1)
            await self.apply(update, version)
            return list((await asyncio.gather(*tasks))[-1])

        async def preempted(self) -> tuple[int, int]:
            return self.engine.stats.preemptions, self.engine.kv_cache_tokens

        async def gap(self) -> float:
            return self.engine.stats.take_longest_gap()

        async def messages(self) -> int:
            """Messages of the engine's process that came since the last call."""
            count, self.message_count = getattr(self, "message_count", 0), 0
            original = self.engine.stats.count_step
            if not hasattr(original, "counts"):

                def count_step(*step: Any) -> None:
                    self.message_count += 1
                    original(*step)

                count_step.counts = True  # type: ignore[attr-defined]
                self.engine.stats.count_step = count_step  # type: ignore[method-assign]
            return count

        async def in_flight(self, mode: str) -> None:
            state = self.engine._state
            generator = state.app.generator.model_copy(update={"in_flight": mode})
            state.app = state.app.model_copy(update={"generator": generator})

    app = GeneratorApp(
        model=str(untied_model),
        max_model_len=256,
        generator=GeneratorConfig(
            max_num_seqs=32, kv_cache_memory_bytes=KV_TOKENS << 10, in_flight="keep"
        ),
    )
    engine_starts.append("untied engine")
    actor = (
        ray_cluster.remote(SlowActor)
        .options(num_cpus=0, runtime_env={"env_vars": engine_environment("cpu")})
        .remote(app)
    )
    print("start:", ray_cluster.get(actor.start.remote(), timeout=500))
    yield actor
    ray_cluster.kill(actor)


def test_the_tokens_of_a_whole_completion_come_in_few_messages(
    holder: Any, ray_cluster: Any
) -> None:
    ray_cluster.get(holder.messages.remote())
    began = time.monotonic()
    request = GenerateRequest((5, 6, 14), 1, 200, 1.0, seed=5, ignore_eos=True)
    (completion,) = ray_cluster.get(holder.generate.remote(request), timeout=120)
    seconds = time.monotonic() - began
    assert len(completion.token_ids) == 200
    messages = ray_cluster.get(holder.messages.remote())
    assert 2 <= messages <= min(seconds / HOLD_S + 4, 150)


def test_a_completion_continues_beside_one_that_wants_more_log_probs(
    holder: Any, ray_cluster: Any
) -> None:
    """vLLM gives all completions of a step as many log-probs as one of them asks for."""
    request = GenerateRequest((5, 6, 14), 1, 200, 1.0, seed=5, ignore_eos=True)
    (alone,) = ray_cluster.get(holder.generate.remote(request), timeout=120)
    whole = holder.generate.remote(request)
    beside = replace(request, max_tokens=20, seed=6)
    for top in (5, 1, 3):
        wanted = holder.most_probable.remote(beside, top)
        assert ray_cluster.get(wanted, timeout=120) == 20
        if top == 5:
            assert not ray_cluster.wait([whole], timeout=0)[0], "it continues meanwhile"
    (completion,) = ray_cluster.get(whole, timeout=120)
    assert completion.token_ids == alone.token_ids
    assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_generations_in_flight_at_an_update(
    holder: Any,
    ray_cluster: Any,
    untied_model: Path,
    publish: Any,
    reference: Any,
    load_reference: Any,
    tmp_path: Path,
) -> None:
    prompts = [(5 + i, 6, 14 + i % 7) for i in range(16)]
    length, versions = 200, iter(range(11, 100))

    def stage(model: Any) -> tuple[int, Any]:
        """The next version, and its staged weights."""
        version = next(versions)
        weights = publish(dict(model.named_parameters()), version=version)
        expected = expected_tensors(untied_model, "float32")
        return version, fetch_version(weights, expected, 60, tmp_path)

    def apply(version: int, staged: Any) -> tuple[dict[str, float], Any]:
        """The timings, and the completion of a request that comes during the update."""
        try:
            update = holder.apply.remote(staged.update_info(), version)
            late = holder.generate.remote(
                GenerateRequest(prompts[0], 1, 20, 1.0, seed=5, ignore_eos=True)
            )
            return ray_cluster.get(update, timeout=120), ray_cluster.get(late, timeout=120)[0]
        finally:
            staged.remove()

    for mode in ("recompute", "drain", "keep"):
        ray_cluster.get(holder.in_flight.remote(mode))
        old, new = load_reference(untied_model), load_reference(untied_model)
        disturb(old, seed=21)
        disturb(new, seed=22)
        initial, staged = stage(old)
        apply(initial, staged)
        version, staged = stage(new)
        model_of = {initial: old, version: new}
        before = ray_cluster.get(holder.generated.remote())
        asked = [
            holder.generate.remote(GenerateRequest(prompt, 1, length, 1.0, seed=5, ignore_eos=True))
            for prompt in prompts
        ]
        while ray_cluster.get(holder.generated.remote()) < before + 10 * len(prompts):
            pass
        ray_cluster.get(holder.gap.remote())
        timings, late = apply(version, staged)
        assert [span.version for span in late.versions] == [version], (
            "a request that came during the update began with the old weights"
        )
        answers = [completions[0] for completions in ray_cluster.get(asked, timeout=300)]
        worst = dict.fromkeys(model_of, 0.0)
        for prompt, answer in zip(prompts, answers, strict=True):
            for span in answer.versions:
                expected = reference(model_of[span.version], prompt, answer.token_ids)[
                    span.start : span.end
                ]
                apart = (
                    (expected - torch.tensor(answer.logprobs[span.start : span.end]))
                    .abs()
                    .max()
                    .item()
                )
                worst[span.version] = max(worst[span.version], apart)
        gap = ray_cluster.get(holder.gap.remote())
        assert timings["pause_s"] > PAUSE_S > 2 * HOLD_S
        assert mode == "drain" or timings["pause_s"] <= gap + 0.05, (
            "the pause is a gap between tokens of the generations in flight"
        )
        assert gap < 60
        both = sum(len(answer.versions) == 2 for answer in answers)
        print(
            f"in_flight {mode}: {both} of {len(answers)} completions have both versions, log-probs"
            f" differ by at most {worst}, {timings}"
        )
        assert both == 0 if mode == "drain" else both >= len(answers) / 2
        assert worst.pop(min(worst)) <= 1e-4
        # Kept KV is from the old weights, so tokens of the new weights are from neither
        # checkpoint's distribution.
        assert max(worst.values()) > 1e-2 if mode == "keep" else max(worst.values()) <= 1e-4
    assert ray_cluster.get(holder.preempted.remote())[0] == 0, (
        "completions that an update interrupts are not counted as preempted"
    )
    apply(*stage(load_reference(untied_model)))


def test_a_loop_ends_a_completion(holder: Any, ray_cluster: Any) -> None:
    """The greedy completions of a small random model loop. Each ends at the token that completes
    the repetitions, with the finish reason `repetition`."""
    ngram, times = 8, 5

    def ask(prompt: tuple[int, ...], repetition: tuple[int, int] | None) -> Any:
        request = GenerateRequest(prompt, 1, 200, 0.0, ignore_eos=True, repetition=repetition)
        return ray_cluster.get(holder.generate.remote(request), timeout=120)[0]

    def first_end(ids: tuple[int, ...]) -> int | None:
        ends = [
            end
            for end in range(1, len(ids) + 1)
            for n in range(1, ngram + 1)
            if end >= n * times and ids[end - n * times : end] == ids[end - n : end] * times
        ]
        return ends[0] if ends else None

    ended = 0
    for first in (5, 9, 20, 30):
        whole, stopped = ask((first, 6), None), ask((first, 6), (ngram, times))
        end = first_end(whole.token_ids)
        assert whole.finish_reason == "length" and len(whole.token_ids) == 200
        assert stopped.token_ids == whole.token_ids[:end] and len(stopped.logprobs) == len(
            stopped.token_ids
        )
        assert stopped.finish_reason == ("length" if end in (None, 200) else "repetition")
        ended += stopped.finish_reason == "repetition"
    assert ended, "no completion looped, so nothing was tested"


def test_a_baseline_is_the_greedy_completion_beside_the_samples(
    holder: Any, ray_cluster: Any, untied_model: Path, load_reference: Any
) -> None:
    """Of the same request, whose sampled completions it does not change, in both ways in which a
    request for several completions runs."""
    model, prompt, length = load_reference(untied_model), (5, 6, 14), 24
    expected: list[int] = []
    with torch.no_grad():
        while len(expected) < length:
            logits = model(torch.tensor([[*prompt, *expected]])).logits[0, -1]
            expected.append(int(logits.argmax()))
    for mode in ("recompute", "keep"):
        ray_cluster.get(holder.in_flight.remote(mode))
        request = GenerateRequest(prompt, 3, length, 0.7, seed=5, ignore_eos=True, top_p=0.9)
        alone, three = ray_cluster.get(
            [holder.generate.remote(one) for one in (request, replace(request, baseline=True))],
            timeout=120,
        )
        assert [one.token_ids for one in three[:3]] == [one.token_ids for one in alone]
        assert len(three) == 4 and list(three[3].token_ids) == expected
        assert len(three[3].logprobs) == length and three[3].versions == three[0].versions


def test_a_sibling_first_scheduled_after_an_update_does_not_use_the_prompts_old_cache(
    holder: Any,
    ray_cluster: Any,
    untied_model: Path,
    publish: Any,
    reference: Any,
    load_reference: Any,
    tmp_path: Path,
) -> None:
    """31 completions leave one slot for two siblings, whose prompt is longer than one cache block.
    The second sibling runs after the others. The update comes while the first one runs, unless the
    machine is so busy that the update comes after it."""
    ray_cluster.get(holder.in_flight.remote("keep"))
    fillers = [
        GenerateRequest((5 + i % 7, 6), 1, 230, 1.0, seed=i, ignore_eos=True) for i in range(31)
    ]
    prompt = tuple(4 + i % 40 for i in range(140))
    pair = GenerateRequest(prompt, 2, 110, 1.0, seed=5, ignore_eos=True)
    tries = range(101, 106)
    for version in tries:
        new = load_reference(untied_model)
        disturb(new, seed=version)
        staged = fetch_version(
            publish(dict(new.named_parameters()), version=version),
            expected_tensors(untied_model, "float32"),
            60,
            tmp_path,
        )
        answer = holder.generated_amid_update.remote(fillers, pair, staged.update_info(), version)
        first, second = ray_cluster.get(answer, timeout=120)
        staged.remove()
        if len(first.versions) == 2 and len(second.versions) == 1:
            break
    else:
        pytest.fail(f"in {len(tries)} tries no update came while only the first sibling ran")
    assert second.versions[0].version == version
    expected = reference(new, prompt, second.token_ids)
    assert (expected - torch.tensor(second.logprobs)).abs().max().item() <= 1e-4
    staged = fetch_version(
        publish(dict(load_reference(untied_model).named_parameters()), version=tries.stop),
        expected_tensors(untied_model, "float32"),
        60,
        tmp_path,
    )
    ray_cluster.get(holder.apply.remote(staged.update_info(), tries.stop), timeout=120)
    staged.remove()


def test_a_prompt_at_the_limit_of_the_context_leaves_room_for_one_token(
    holder: Any, ray_cluster: Any
) -> None:
    prompt = tuple(5 + i % 9 for i in range(256))
    (answer,) = ray_cluster.get(
        holder.generate.remote(GenerateRequest(prompt[:-1], 1, 1, 1.0, seed=1, ignore_eos=True)),
        timeout=120,
    )
    assert len(answer.token_ids) == 1 and answer.finish_reason == "length"
    with pytest.raises(
        ValueError, match="prompt of 256 tokens \\+ max_tokens = 1 is above max_model_len = 256"
    ):
        ray_cluster.get(holder.generate.remote(GenerateRequest(prompt, 1, 1, 1.0)), timeout=120)


def test_preemptions_are_counted_when_the_cache_is_full(holder: Any, ray_cluster: Any) -> None:
    """64 completions of 200 tokens in a cache of 8,192."""
    asked = [
        holder.generate.remote(
            GenerateRequest((5 + i % 9, 6), 1, 200, 1.0, seed=i, ignore_eos=True)
        )
        for i in range(64)
    ]
    assert all(
        len(completions[0].token_ids) == 200 for completions in ray_cluster.get(asked, timeout=300)
    )
    preempted, tokens = ray_cluster.get(holder.preempted.remote())
    assert tokens == KV_TOKENS and 0 < preempted <= 200


def test_untied_head_matches_transformers_then_dies_clean(
    holder: Any,
    ray_cluster: Any,
    untied_model: Path,
    publish: Any,
    reference: Any,
    load_reference: Any,
    tmp_path: Path,
) -> None:
    model = load_reference(untied_model)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        tuple(torch.randint(4, 52, (1 + i % 9,), generator=generator).tolist()) for i in range(32)
    ]

    def worst(temperature: float = 1.0) -> float:
        """The largest difference from transformers' log-probs at this temperature."""
        requests = [
            GenerateRequest(p, 1, 64, temperature, seed=5, ignore_eos=True) for p in prompts
        ]
        answers = ray_cluster.get(
            [holder.generate.remote(request) for request in requests], timeout=300
        )
        expected = [
            reference(model, prompt, c.token_ids, temperature)
            for prompt, (c,) in zip(prompts, answers, strict=True)
        ]
        return max(
            (wanted - torch.tensor(c.logprobs)).abs().max().item()
            for wanted, (c,) in zip(expected, answers, strict=True)
        )

    assert worst() <= 1e-4 and worst(0.6) <= 1e-4 and worst(1.7) <= 1e-4
    disturb(model, seed=1)
    staged = fetch_version(
        publish(dict(model.named_parameters()), version=1),
        expected_tensors(untied_model, "float32"),
        60,
        tmp_path,
    )
    timings = ray_cluster.get(holder.apply.remote(staged.update_info(), 1), timeout=120)
    assert timings["in_flight"] == 0
    assert worst() <= 1e-4

    # The file is removed between its check and the update: the weights are lost, and the engine
    # raises that error instead of generating.
    staged.remove()
    with pytest.raises(RuntimeError, match="update of version 2 failed"):
        ray_cluster.get(holder.apply.remote(staged.update_info(), 2), timeout=120)
    with pytest.raises(RuntimeError, match="update of version 2 failed"):
        ray_cluster.get(holder.check.remote(), timeout=60)
    with pytest.raises(StaleReplicaError):
        ray_cluster.get(holder.generate.remote(GenerateRequest((5,), 1, 4, 1.0)), timeout=60)

    # A killed engine cannot clean up, but its processes end with it.
    pid, processes = ray_cluster.get(holder.processes.remote(), timeout=60)
    started = [psutil.Process(process) for process in processes]
    assert [process.cmdline()[0] for process in started] == ["VLLM::EngineCore"], (
        "the process that was started ahead, and no other"
    )
    mapped = {
        line.split()[-1]
        for process in processes
        for line in Path(f"/proc/{process}/maps").read_text().splitlines()
        if "/dev/shm/" in line
    }
    assert mapped == set(), "a killed process would leave these files"
    os.kill(pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []
