"""Updates of a real Serve replica: log-prob parity, every parameter, generations in flight, and
catching up."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from disturbed import disturb
from stub_replicas import Application

from asyncrl.contracts.errors import GenerationTimeoutError, StaleReplicaError
from asyncrl.contracts.messages import Details, GenerateRequest, Manifest, StreamPiece, WeightsId
from asyncrl.generation.app import ServeGenerate, start_generators, stop_generators
from asyncrl.generation.settings import registry_name
from asyncrl.weights import push
from asyncrl.weights.push import ServeWeightSync
from asyncrl.weights.version_registry import open_registry

pytestmark = pytest.mark.timeout(600)

TOLERANCE = 1e-4


def prompts(count: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 20, (count,), generator=generator).tolist()
    return [
        tuple(torch.randint(4, 52, (length,), generator=generator).tolist()) for length in lengths
    ]


def request(
    prompt: tuple[int, ...] = (5, 6, 14, 7), n: int = 1, max_tokens: int = 16, **settings: Any
) -> GenerateRequest:
    return GenerateRequest(
        prompt, n, max_tokens, settings.pop("temperature", 1.0), seed=3, ignore_eos=True, **settings
    )


def parity(model: Any, reference: Any, asked: list[tuple[int, ...]], answers: list[Any]) -> float:
    """Largest log-prob difference over all completions, in nats."""
    worst = 0.0
    for prompt, answer in zip(asked, answers, strict=True):
        for completion in answer.completions:
            worst = max(
                worst,
                (reference(model, prompt, completion.token_ids) - torch.tensor(completion.logprobs))
                .abs()
                .max()
                .item(),
            )
    return worst


@pytest.fixture
def sync(generators: Any) -> ServeWeightSync:
    return ServeWeightSync(generators.handle, generators.registry, push_timeout_s=60)


async def test_the_tensor_that_differs_most_from_the_published_one_is_named(
    generators: Any, sync: ServeWeightSync, publish: Any, load_reference: Any, tiny_model: Any
) -> None:
    model = load_reference(tiny_model)
    parameters = disturb(model, seed=5)
    version = generators.next_version()
    await sync.push(publish(parameters, version=version))
    assert (
        await sync.differing_tensor()
        == f"all {len(parameters) + 1} tensors that could be compared by name are the same on"
        f" both sides ({len(parameters)} were published)"
    )
    for name in (
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.input_layernorm.weight",
    ):
        # The replica keeps its version. The manifest that is compared with it differs in one
        # tensor.
        sync._last = publish(
            {**parameters, name: parameters[name].detach().flip(0).contiguous()},
            version=version,
        )
        text = await sync.differing_tensor()
        assert text.startswith(
            f"of {len(parameters) + 1} tensors compared 1 differ, most of all {name!r} on replica "
        ), text


async def test_parity_after_every_parameter_changed_and_a_bucket_ends_inside_qkv(
    generators: Any,
    sync: ServeWeightSync,
    publish: Any,
    reference: Any,
    load_reference: Any,
    tiny_model: Any,
) -> None:
    model = load_reference(tiny_model)
    version = generators.next_version()
    manifest = publish(disturb(model, seed=1), version=version, bucket_bytes=20 << 10)
    bucket = {entry.name: entry.bucket for entry in manifest.tensors}
    layer = "model.layers.0.self_attn."
    assert len({bucket[layer + part + ".weight"] for part in ("q_proj", "k_proj", "v_proj")}) > 1
    report = await sync.push(manifest)
    assert report.version == version
    assert len(report.replicas) == 1
    asked = prompts(32)
    generate = ServeGenerate(generators.handle)
    wanted = WeightsId("test", 1, version)
    answers = await asyncio.gather(
        *[generate.generate(request(prompt, max_tokens=64, min_weights=wanted)) for prompt in asked]
    )
    assert all(
        len(c.token_ids) == 64 and c.versions[0].version == version
        for a in answers
        for c in a.completions
    )
    assert parity(model, reference, asked, answers) <= TOLERANCE
    greedy = await generate.generate(request(asked[0], max_tokens=16, temperature=0.0))
    again = await generate.generate(request(asked[0], max_tokens=16, temperature=0.0))
    assert greedy.completions == again.completions
    assert parity(model, reference, asked[:1], [greedy]) <= TOLERANCE


async def test_every_parameter_is_updated(
    generators: Any,
    sync: ServeWeightSync,
    publish: Any,
    reference: Any,
    load_reference: Any,
    tiny_model: Any,
) -> None:
    model = load_reference(tiny_model)
    disturb(model, seed=2)
    generate = ServeGenerate(generators.handle)
    for name, parameter in model.named_parameters():
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
        version = generators.next_version()
        await sync.push(publish(dict(model.named_parameters()), version=version))
        answer = await generate.generate(
            request(max_tokens=12, min_weights=WeightsId("test", 1, version))
        )
        assert parity(model, reference, [(5, 6, 14, 7)], [answer]) <= TOLERANCE, name
        with torch.no_grad():
            parameter.copy_(before)
        assert parity(model, reference, [(5, 6, 14, 7)], [answer]) > 10 * TOLERANCE, (
            f"{name} has no effect on log-probs, so this tests nothing"
        )


def held_back(cluster: Any, manifest: Manifest) -> tuple[Manifest, Any]:
    """The manifest, with a first bucket that cannot be fetched before `gate.open.remote()`."""

    class Gate:
        def __init__(self) -> None:
            self.opened = asyncio.Event()

        async def open(self) -> None:
            self.opened.set()

        async def passed(self, bucket: Any) -> Any:
            await self.opened.wait()
            return bucket

    gate = cluster.remote(Gate).options(num_cpus=0).remote()
    return (
        replace(manifest, buckets=(gate.passed.remote(manifest.buckets[0]), *manifest.buckets[1:])),
        gate,
    )


def test_update_in_flight(
    ray_cluster: Any,
    generators: Any,
    sync: ServeWeightSync,
    publish: Any,
    load_reference: Any,
    tiny_model: Any,
) -> None:
    async def generated() -> int:
        return int((await generators.handle.status.remote()).tokens_generated)

    async def run() -> None:
        model = load_reference(tiny_model)
        first, second = generators.next_version(), generators.next_version()
        await sync.push(publish(disturb(model, seed=3), version=first))
        generate = ServeGenerate(generators.handle)
        updated = asyncio.Event()
        spread = [asyncio.Event() for _ in range(16)]

        async def keep_generating(prompt: Any, index: int) -> list[Any]:
            """Generate until the update is over. First answers differ in length: otherwise all
            completions might be at their first token when the update comes."""
            answers = [await generate.generate(request(prompt, n=8, max_tokens=12 * (index + 1)))]
            spread[index].set()
            while not updated.is_set():
                answers.append(await generate.generate(request(prompt, n=8, max_tokens=200)))
            return answers

        running = [
            asyncio.create_task(keep_generating(prompt, index))
            for index, prompt in enumerate(prompts(16))
        ]
        await asyncio.gather(*(event.wait() for event in spread))
        manifest, gate = held_back(ray_cluster, publish(disturb(model, seed=4), version=second))
        push = asyncio.create_task(sync.push(manifest))
        before = await generated()
        while await generated() < before + 128:
            pass
        await gate.open.remote()
        report = await push
        updated.set()
        (timings,) = report.replicas.values()
        print("update with 128 in flight:", dict(timings))
        at_pause = (await generators.handle.status.remote()).tokens_at_pause
        answers = [answer for many in await asyncio.gather(*running) for answer in many]
        completions = [c for answer in answers for c in answer.completions]
        both = [c for c in completions if [span.version for span in c.versions] == [first, second]]
        assert timings["in_flight"] == len(at_pause)
        assert timings["recomputed_tokens"] >= sum(at_pause), "and their prompts"
        assert len(both) >= timings["in_flight"] / 2 > 0
        assert sorted(c.versions[0].end for c in both) == sorted(
            count for count in at_pause if 0 < count < 200
        )
        assert timings["tokens_during_fetch"] > 0
        assert timings["pause_s"] < 2
        for answer in answers:
            assert_times_fit(answer, second, timings)

    asyncio.run(run())


def assert_times_fit(answer: Any, version: int, timings: Any) -> None:
    """A completion with tokens of both versions was under way at the update, and one with tokens of
    the old version alone had ended."""
    for completion, (began, ended) in zip(answer.completions, answer.times, strict=True):
        assert answer.started_at <= began < ended <= answer.finished_at
        newest = completion.versions[-1].version
        assert (ended > timings["applied_at"]) == (newest == version)
        if {span.version for span in completion.versions} != {newest}:
            assert began < timings["applied_at"]
        assert timings["paused_at"] < timings["applied_at"]


async def test_a_rest_keeps_completions_and_takes_a_version(
    generators: Any, sync: ServeWeightSync, publish: Any, load_reference: Any, tiny_model: Any
) -> None:
    async def generated() -> int:
        return int((await generators.handle.status.remote()).tokens_generated)

    model = load_reference(tiny_model)
    first, second = generators.next_version(), generators.next_version()
    await sync.push(publish(disturb(model, seed=3), version=first))
    generate, before = ServeGenerate(generators.handle), await generated()
    long = asyncio.create_task(generate.generate(request(n=64, max_tokens=200)))
    while await generated() < before + 128 and not long.done():
        pass
    await sync.rest()
    at_rest = await generated()
    new = asyncio.create_task(generate.generate(request(max_tokens=4)))
    report = await sync.push(publish(disturb(model, seed=4), version=second))
    (timings,) = report.replicas.values()
    assert timings["in_flight"] == 64 and await generated() == at_rest
    assert not long.done() and not new.done()
    await sync.wake()
    for completion in (await long).completions:
        assert [span.version for span in completion.versions] == [first, second]
        assert len(completion.token_ids) == 200
    (completion,) = (await new).completions
    assert [span.version for span in completion.versions] == [second]


async def test_a_replica_that_missed_the_broadcast_takes_the_version_from_the_registry(
    generators: Any, publish: Any, load_reference: Any, tiny_model: Any
) -> None:
    version = generators.next_version()
    await generators.registry.announce.remote(
        publish(disturb(load_reference(tiny_model), seed=6), version=version)
    )
    answer = await ServeGenerate(generators.handle).generate(
        request(min_weights=WeightsId("test", 1, version))
    )
    assert answer.completions[0].versions[0].version == version


async def test_versions_never_decrease_and_repeats_change_nothing(
    generators: Any, sync: ServeWeightSync, publish: Any, load_reference: Any, tiny_model: Any
) -> None:
    older, newer = generators.next_version(), generators.next_version()
    parameters = disturb(load_reference(tiny_model), seed=8)
    old, new = publish(parameters, version=older), publish(parameters, version=newer)
    report = await sync.push(new)
    assert await sync.push(new) == report
    assert (await generators.handle.apply_version.remote(old)).weights.version == newer
    with pytest.raises(ValueError, match="announced after"):
        await sync.push(old)


async def test_a_stale_replica_refuses_and_the_caller_gives_up_at_its_deadline(
    generators: Any,
) -> None:
    unknown = WeightsId("test", 1, 10**9)
    with pytest.raises(StaleReplicaError, match="nothing newer"):
        await generators.handle.generate.remote(request(min_weights=unknown))
    started = time.monotonic()
    with pytest.raises(GenerationTimeoutError, match="StaleReplicaError"):
        await ServeGenerate(generators.handle).generate(
            request(min_weights=unknown, deadline_s=1.0)
        )
    assert time.monotonic() - started < 10


async def test_bad_versions_are_refused_before_anything_changes(
    generators: Any, sync: ServeWeightSync, publish: Any, load_reference: Any, tiny_model: Any
) -> None:
    parameters = disturb(load_reference(tiny_model), seed=9)
    name = "model.layers.1.mlp.up_proj.weight"
    bad = {
        "lacks": {n: p for n, p in parameters.items() if n != name},
        "has shape": parameters | {name: parameters[name][:-1]},
    }
    before = await generators.handle.status.remote()
    answer = await generators.handle.generate.remote(request(temperature=0.0))
    for words, changed in bad.items():
        with pytest.raises(RuntimeError, match=words):
            await sync.push(publish(changed, version=generators.next_version()))
    after = await generators.handle.status.remote()
    assert after.weights == before.weights
    assert (
        await generators.handle.generate.remote(request(temperature=0.0))
    ).completions == answer.completions
    # The version registry now has a version that cannot be applied: replace it with a good one.
    await sync.push(publish(parameters, version=generators.next_version()))


async def test_deadline_aborts(generators: Any) -> None:
    with pytest.raises(GenerationTimeoutError, match="not done in"):
        await generators.handle.generate.remote(request(n=64, max_tokens=250, deadline_s=0.05))
    with pytest.raises(ValueError, match="max_model_len"):
        await generators.handle.generate.remote(request(max_tokens=300))


def test_pause_of_an_empty_update(generators: Any) -> None:
    pauses = [generators.handle.pause_empty.remote().result()["pause_s"] for _ in range(5)]
    print("empty pauses:", pauses)
    assert sorted(pauses)[2] <= 0.25


@pytest.mark.slow
async def test_a_replica_that_starts_between_publish_and_commit_catches_up(
    generators: Any,
    sync: ServeWeightSync,
    publish: Any,
    load_reference: Any,
    tiny_model: Any,
    engine_starts: list[str],
) -> None:
    """The only replica is killed while the version registry has a version that no replica has
    applied. Its successor starts with that version."""

    before = await generators.handle.status.remote()
    manifest = publish(
        disturb(load_reference(tiny_model), seed=10), version=generators.next_version()
    )
    await generators.registry.announce.remote(manifest)
    engine_starts.append("restarted replica")
    os.kill(before.pid, signal.SIGKILL)
    wanted = WeightsId("test", 1, manifest.version)
    answer = await ServeGenerate(generators.handle).generate(
        request(min_weights=wanted, deadline_s=500)
    )
    after = await generators.handle.status.remote()
    assert answer.replica == after.replica != before.replica
    assert after.weights == wanted
    report = await sync.push(manifest)
    assert set(report.replicas) == {after.replica}
    assert report.unroutable == ()


def test_a_replica_returns_the_stacks_of_its_engine(generators: Any) -> None:
    [(replica, stacks)] = asyncio.run(ServeGenerate(generators.handle).stacks())
    assert replica == generators.handle.status.remote().result().replica
    assert stacks and all(re.search(r"File .* in \w+ < File ", stack) for stack in stacks), stacks


async def test_a_restarted_registry_gets_the_version_again(
    ray_cluster: Any,
    generators: Any,
    sync: ServeWeightSync,
    publish: Any,
    load_reference: Any,
    tiny_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(push, "ANNOUNCE_EVERY_S", 0.1)
    manifest = publish(
        disturb(load_reference(tiny_model), seed=12), version=generators.next_version()
    )

    async with asyncio.timeout(120):
        await sync.push(manifest)
        assert await generators.registry.learner_on_device.remote() is False
        ray_cluster.kill(generators.registry, no_restart=False)
        while await generators.registry.learner_on_device.remote() is not None:
            pass  # its process still ends
        keeping = asyncio.create_task(sync.keep_announced())
        while await generators.registry.learner_on_device.remote() is None:
            pass
        while (found := await generators.registry.current.remote()) is None:
            pass
        assert found.version == manifest.version
        keeping.cancel()


@pytest.fixture
def two_replicas(ray_cluster: Any, generators: Any, engine_starts: list[str]) -> Iterator[Any]:
    """An application of its own with two replicas: `handle` and `registry`."""
    name = "test-two-replicas"
    registry = open_registry(registry_name(name))
    settings = generators.app.generator.model_copy(update={"num_replicas": 2})
    engine_starts.extend(["two replicas"] * 2)
    try:
        handle = start_generators(generators.app.model_copy(update={"generator": settings}), name)
        yield Application(handle, registry)
    finally:
        stop_generators(name)
        ray_cluster.kill(registry)


@pytest.mark.faults
async def test_two_replicas_on_two_cores(
    two_replicas: Any, publish: Any, load_reference: Any, tiny_model: Any
) -> None:
    manifest = publish(disturb(load_reference(tiny_model), seed=11))

    sync = ServeWeightSync(two_replicas.handle, two_replicas.registry, push_timeout_s=60)
    report = await sync.push(manifest)
    assert len(report.replicas) == 2
    assert not report.unroutable
    statuses = await two_replicas.handle.broadcast("status").results_async()
    assert [status.weights.version for status in statuses] == [manifest.version] * 2
    wanted = WeightsId("test", 1, manifest.version)
    generate = ServeGenerate(two_replicas.handle)
    answers = await asyncio.gather(
        *[generate.generate(request(p, min_weights=wanted)) for p in prompts(32)]
    )
    assert len({answer.replica for answer in answers}) == 2
    scored = await generate.logprobs([((5, 6), answers[0].completions[0].token_ids)], wanted)
    assert set(scored) == {answer.replica for answer in answers}


async def test_a_stream_continues_through_an_update(
    generators: Any, sync: ServeWeightSync, publish: Any, load_reference: Any, tiny_model: Any
) -> None:
    """Its last piece has the version spans of all tokens, and no piece is lost."""

    model = load_reference(tiny_model)
    first, second = generators.next_version(), generators.next_version()
    await sync.push(publish(disturb(model, seed=11), version=first))
    # Streams of one length would end at the same moment, in which the update could come.
    lengths = (110, 140, 170, 200)
    streaming = [asyncio.Event() for _ in lengths]

    async def keep_streaming(length: int, own: asyncio.Event) -> list[list[StreamPiece]]:
        streams: list[list[StreamPiece]] = []
        while not streams or not push.done():
            streams.append([])
            async for piece in generators.handle.options(stream=True).stream.remote(
                request(max_tokens=length), Details(top=1)
            ):
                streams[-1].append(piece)
                own.set()
        return streams

    async def update() -> None:
        await asyncio.gather(*(event.wait() for event in streaming))
        await sync.push(publish(disturb(model, seed=12), version=second))

    push = asyncio.create_task(update())
    found = await asyncio.gather(*map(keep_streaming, lengths, streaming))
    streams = [
        (length, pieces) for length, many in zip(lengths, found, strict=True) for pieces in many
    ]
    for length, pieces in streams:
        assert (
            sum(len(piece.tokens.ids) for piece in pieces)
            == sum(len(piece.tokens.top) for piece in pieces)
            == length
        )
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert pieces[-1].versions[0].start == 0 and pieces[-1].versions[-1].end == length
    assert any(
        [span.version for span in pieces[-1].versions] == [first, second] for _, pieces in streams
    )
