"""Versions that are adapters (LoRA) on a real Serve replica: log-prob parity with PEFT, several
versions at a time, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import glob
import json
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from asyncrl.config import GeneratorConfig
from asyncrl.contracts.messages import Details, GenerateRequest, Manifest, WeightsId
from asyncrl.generation.app import ServeGenerate, start_generators, stop_generators
from asyncrl.generation.engine.adapters import Adapters
from asyncrl.generation.settings import GeneratorApp, registry_name
from asyncrl.weights.layout import plan_buckets
from asyncrl.weights.manifest import ManifestError, check_manifest, expected_tensors, tensors_of
from asyncrl.weights.push import ServeWeightSync
from asyncrl.weights.staging import Staged
from asyncrl.weights.version_registry import open_registry

TOLERANCE = 2e-5
RANK, SLOTS = 4, 2
LAYER = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


class Served(NamedTuple):
    """An application of one replica."""

    handle: Any
    registry: Any
    directories: Callable[[], list[str]]
    """Names of its adapters' folders."""
    next_version: Callable[[], int]
    sync: ServeWeightSync


class Versions(NamedTuple):
    push: Callable[..., Awaitable[tuple[int, dict[str, float]]]]
    models: dict[int, Any]


@pytest.fixture(scope="module")
def served(ray_cluster: Any, tiny_model: Path, engine_starts: list[str]) -> Iterator[Any]:
    """One replica that takes adapters: `handle`, `registry`, `directories()`, `next_version()`."""
    name, versions = "test-adapters", iter(range(1, 1000))
    registry = open_registry(registry_name(name))
    app = GeneratorApp(
        model=str(tiny_model),
        max_model_len=256,
        generator=GeneratorConfig(num_cpus=0.2, max_num_seqs=32, kv_cache_memory_bytes=16 << 20),
        max_lora_rank=RANK,
        max_loras=SLOTS,
    )
    engine_starts.append("adapters")
    handle = start_generators(app, name)
    pid = handle.status.remote().result(timeout_s=60).pid

    def directories() -> list[str]:
        places = {tempfile.gettempdir(), "/tmp"}
        return sorted(
            Path(found).name
            for place in places
            for found in glob.glob(f"{place}/asyncrl_engine_{pid}_*/adapter-*")
        )

    sync = ServeWeightSync(handle, registry, push_timeout_s=60)
    yield Served(handle, registry, directories, lambda: next(versions), sync)
    stop_generators(name)
    ray_cluster.kill(registry)
    assert directories() == []


def asked(prompt: tuple[int, ...], tokens: int, n: int = 1, **settings: Any) -> GenerateRequest:
    return GenerateRequest(prompt, n, tokens, 1.0, seed=5, ignore_eos=True, **settings)


@pytest.fixture
def versions(served: Any, publish: Any, adapted: Any) -> Any:
    """`await push(seed)` pushes a version and returns it with its model and its report; `check`
    compares a completion with its version's model."""
    made: dict[int, Any] = {}

    async def push(seed: int, **settings: Any) -> tuple[int, dict[str, float]]:
        version = served.next_version()
        made[version], matrices, adapter = adapted(seed, **settings)
        manifest = dataclasses.replace(publish(matrices, version=version), adapter=adapter)
        report = await served.sync.push(manifest)
        (timings,) = report.replicas.values()
        return version, timings

    return Versions(push, made)


def apart(model: Any, reference: Any, prompt: tuple[int, ...], ids: Any, logprobs: Any) -> float:
    wanted = reference(model, prompt, tuple(ids))
    return float((wanted - torch.tensor(tuple(logprobs))).abs().max())


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_completions_have_the_log_probs_and_the_version_of_the_newest_adapter(
    served: Any, versions: Any, reference: Any
) -> None:
    generate, worst = ServeGenerate(served.handle), 0.0
    # Longer than a block of the cache of prefixes, so the second version would reuse the first
    # one's KV if they shared a key.
    long = tuple(4 + (7 * i + 3) % 48 for i in range(150))
    for seed, settings in ((1, {}), (2, {"use_rslora": True})):
        version, timings = await versions.push(seed, **settings)
        model = versions.models[version]
        assert timings["pause_s"] == 0.0 and timings["fetch_s"] > 0 and timings["apply_s"] > 0
        wanted = WeightsId("test", 1, version)
        for prompt, tokens, n in (((5, 6, 7), 64, 3), (long, 20, 1), (long, 20, 1)):
            answer = await generate.generate(asked(prompt, tokens, n, min_weights=wanted))
            assert len({completion.token_ids for completion in answer.completions}) == n
            for completion in answer.completions:
                (span,) = completion.versions
                assert (span.version, span.start, span.end) == (version, 0, tokens)
                parts = prompt, completion.token_ids, completion.logprobs
                worst = max(worst, apart(model, reference, *parts))
        # Many rows at a time, as in a check of the log-probs. A head that may have an adapter
        # would end the engine here.
        rows = [((5, 6, 7), tuple(8 + (i + j) % 40 for j in range(4 + i))) for i in range(16)]
        (scored,) = (await generate.logprobs(rows, wanted)).values()
        for row, values in zip(rows, scored, strict=True):
            worst = max(worst, apart(model, reference, *row, values))
        pieces = served.handle.options(stream=True).stream.remote(asked((5, 6, 7), 9), Details())
        found = [piece async for piece in pieces]
        assert [span.version for span in found[-1].versions] == [version]
        ids = [token for piece in found for token in piece.tokens.ids]
        logprobs = [value for piece in found for value in piece.tokens.logprobs]
        worst = max(worst, apart(model, reference, (5, 6, 7), ids, logprobs))
    print(f"largest log-prob difference from PEFT: {worst:.1e} nats")
    assert worst <= TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_request_keeps_its_adapter_and_the_files_go_with_the_last_request(
    served: Any, versions: Any, reference: Any
) -> None:
    """Three versions in flight on two slots: one is dropped and read again, or waits."""

    generate, started = ServeGenerate(served.handle), []
    in_flight = []
    for seed, tokens in ((3, 250), (4, 200), (5, 20)):
        version, timings = await versions.push(seed)
        in_flight.append(timings["in_flight"])
        tokens_before = (await served.handle.status.remote()).tokens_generated
        request = asked((9, 8, 7), tokens, min_weights=WeightsId("test", 1, version))
        started.append((version, asyncio.ensure_future(generate.generate(request))))
        while (await served.handle.status.remote()).tokens_generated == tokens_before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert in_flight == [0.0, 1.0, 2.0], "requests that older adapters still had at each load"
    directories = served.directories()
    assert len(directories) >= 2
    for version, answer in started:
        (completion,) = (await answer).completions
        assert [span.version for span in completion.versions] == [version]
        parts = (9, 8, 7), completion.token_ids, completion.logprobs
        assert apart(versions.models[version], reference, *parts) <= TOLERANCE
    canceled = asyncio.ensure_future(generate.generate(asked((9, 8, 7), 250)))
    await asyncio.sleep(0.2)
    await versions.push(6)
    canceled.cancel()
    await asyncio.gather(canceled, return_exceptions=True)
    async with asyncio.timeout(30):
        while len(served.directories()) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    answer = await generate.generate(asked((9, 8, 7), 5))
    assert answer.completions[0].versions[0].version == version + 1


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_refused_versions_change_nothing_and_a_late_replica_catches_up(
    served: Any, versions: Any, adapted: Any, publish: Any, tiny_model: Path, load_reference: Any
) -> None:
    version, _ = await versions.push(7)
    _, matrices, settings = adapted(7)
    whole = dict(load_reference(tiny_model).named_parameters())
    other = {name.replace("layers.1", "layers.9"): part for name, part in matrices.items()}
    _, high, high_settings = adapted(8, r=8)
    for parts, adapter, words in (
        (whole, None, "has whole weights, and these generators take adapters"),
        (other, settings, "adapter of another model: 'base_model.model.model.layers.9"),
        (high, high_settings, "adapter of rank 8, and these generators take rank 4 or less"),
        (matrices, settings | {"use_dora": True}, "vLLM refuses the adapter.*DoRA"),
    ):
        manifest = dataclasses.replace(publish(parts, version=version + 1), adapter=adapter)
        with pytest.raises(RuntimeError, match=f"was refused: .*{words}"):
            await ServeWeightSync(served.handle, served.registry, 60).push(manifest)
        status = await served.handle.status.remote()
        assert status.weights == WeightsId("test", 1, version) and status.broken is None
    # A new attempt counts its versions again. The registry has its version, and no push
    # reaches the replica.
    again = dataclasses.replace(publish(matrices, version=1, attempt=2), adapter=settings)
    await served.registry.announce.remote(again)
    wanted = WeightsId("test", 2, 1)
    request = asked((5, 6), 4, min_weights=wanted)
    answer = await ServeGenerate(served.handle).generate(request)
    assert [span.version for span in answer.completions[0].versions] == [1]
    assert (await served.handle.status.remote()).weights == wanted


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_matrix_that_differs_from_the_published_one_is_named(
    served: Any, publish: Any, adapted: Any
) -> None:
    _, matrices, settings = adapted(9)
    sync = served.sync
    manifest = dataclasses.replace(publish(matrices, version=1, attempt=3), adapter=settings)
    await sync.push(manifest)
    text = await sync.differing_tensor()
    assert text.startswith(f"all {len(matrices)} tensors that could be compared by name"), text
    for layer in ("model.layers.1.self_attn.v_proj", "model.layers.0.mlp.down_proj"):
        for side in "AB":
            name = f"base_model.model.{layer}.lora_{side}.weight"
            wrong = {**matrices, name: matrices[name].flip(0).contiguous()}
            sync._last = dataclasses.replace(publish(wrong, version=1, attempt=3), adapter=settings)
            text = await sync.differing_tensor()
            assert f"compared 1 differ, most of all {name!r}" in text, text
    _, held = await served.handle.fingerprints.remote()
    base = {
        name.removesuffix(".weight")
        for name in expected_tensors(settings["base_model_name_or_path"], "float32")
    }
    assert {f"{name}.weight" for name in base} <= {*held, "lm_head.weight"}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_generators_of_whole_weights_refuse_an_adapter(
    generators: Any, publish: Any, adapted: Any
) -> None:
    _, matrices, settings = adapted(1)
    manifest = publish(matrices, version=generators.next_version())
    sync = ServeWeightSync(generators.handle, generators.registry, push_timeout_s=60)
    with pytest.raises(RuntimeError, match="is an adapter of rank 4, and these generators take no"):
        await sync.push(dataclasses.replace(manifest, adapter=settings))


def manifest_of(shapes: dict[str, tuple[int, ...]], **adapter: object) -> Manifest:
    entries, sizes = plan_buckets([(name, shape, "float32") for name, shape in shapes.items()], 999)
    buckets: Any = (None,) * len(sizes)
    return Manifest("run", 0, 1, entries, buckets, sizes, sizes, adapter=adapter or None)


def test_the_tensors_of_an_adapter_follow_from_the_base_model(tiny_model: Path) -> None:
    base = expected_tensors(tiny_model, "bfloat16")
    rows, columns = base["model.layers.0.self_attn.q_proj.weight"].shape
    good = {f"{LAYER}A.weight": (4, columns), f"{LAYER}B.weight": (rows, 4)}
    expected = tensors_of(manifest_of(good, r=4), base, 4)
    assert {name: tensor.shape for name, tensor in expected.items()} == good
    assert {dtype for tensor in expected.values() for dtype in tensor.dtypes} == {
        "bfloat16",
        "float32",
    }
    other = {name.replace("q_proj", "other"): shape for name, shape in good.items()}
    norm = {name.replace("self_attn.q_proj", "input_layernorm"): good[name] for name in good}
    bare = {name.removeprefix("base_model.model."): shape for name, shape in good.items()}
    for manifest, rank, words in (
        (manifest_of(good), 4, "has whole weights, and these generators take adapters"),
        (manifest_of(good, r=8), 4, "adapter of rank 8, and these generators take rank 4 or less"),
        (manifest_of(good, r=4), None, "these generators take none"),
        (manifest_of(good, r="x"), 4, "adapter of rank x"),
        (manifest_of(other, r=4), 4, "the adapter of another model: .*other.lora_A.weight"),
        (manifest_of(norm, r=4), 4, "the adapter of another model: .*layernorm.lora_A.weight"),
        (manifest_of(bare, r=4), 4, "of another model: 'model.layers"),
        (manifest_of({f"{LAYER}A.weight": (4, columns)}, r=4), 4, "lacks lora_B.weight"),
        (Manifest("run", 0, 1, (), (), (), (), adapter={"r": 4}), 4, "adapter without matrices"),
    ):
        with pytest.raises(ManifestError, match=words):
            tensors_of(manifest, base, rank)
    wrong = manifest_of(good | {f"{LAYER}A.weight": (4, columns + 1)}, r=4)
    with pytest.raises(ManifestError, match="has shape"):
        check_manifest(wrong, tensors_of(wrong, base, 4))


def staged_matrices(place: Path, matrices: dict[str, torch.Tensor]) -> Staged:
    path, tensors, end = place / "staged", [], 0
    with open(path, "wb") as file:
        for name, matrix in matrices.items():
            file.write(b"\1" * 64 + matrix.view(torch.uint8).numpy().tobytes())
            dtype = str(matrix.dtype).removeprefix("torch.")
            tensors.append((name, tuple(matrix.shape), dtype, end + 64))
            end = file.tell()
    return Staged(path, end, tuple(tensors), 0.0)


class StubEngine:
    """vLLM's engine: it only records what it is told."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.fails: Exception | None = None
        """What loading an adapter raises."""

    async def add_lora(self, request: Any) -> bool:
        if self.fails is not None:
            raise self.fails
        self.held.add(request.lora_int_id)
        return True

    async def remove_lora(self, number: int) -> bool:
        self.held.remove(number)
        return True

    async def is_sleeping(self) -> bool:
        return False


async def test_an_adapter_stays_until_its_last_request_has_ended(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    matrices = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.arange(5.0).reshape(1, 5)}
    staged, settings = staged_matrices(tmp_path, matrices), {"r": 2, "lora_alpha": 6}
    llm: Any = StubEngine()

    def directories() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("adapter-*"))

    async def settle() -> None:
        for _ in range(50):
            await asyncio.sleep(0.002)

    adapters = Adapters(SLOTS)
    with adapters.using(llm) as none:
        assert none is None
        assert await adapters.load(llm, tmp_path, staged, settings, 1) == 0
    written = load_file(tmp_path / "adapter-1" / "adapter_model.safetensors")
    assert all(torch.equal(written[name], matrix) for name, matrix in matrices.items())
    assert json.loads((tmp_path / "adapter-1" / "adapter_config.json").read_text()) == settings
    with adapters.using(llm) as first, adapters.using(llm):
        assert first is not None and (first.version, first.scale) == (1, 3.0)
        assert await adapters.load(llm, tmp_path, staged, settings, 2) == 2
        with adapters.using(llm) as second:
            assert second is not None and second.version == 2
            # vLLM reports what its process refuses as a plain Exception.
            llm.fails = Exception("no\nroom")
            with pytest.raises(ManifestError, match="the adapter of version 3: no room"):
                await adapters.load(llm, tmp_path, staged, settings, 3)
            llm.fails = TypeError("a mistake, and no refusal")
            with pytest.raises(TypeError, match="a mistake"):
                await adapters.load(llm, tmp_path, staged, settings, 3)
            llm.fails = None
            await settle()
            assert directories() == ["adapter-1", "adapter-2"] and llm.held == {1, 2}
    await settle()
    assert directories() == ["adapter-2"] and llm.held == {2}
    # The same version again, as in another attempt, is another adapter.
    assert await adapters.load(llm, tmp_path, staged, settings, 2) == 0
    await settle()
    assert directories() == ["adapter-5"] and llm.held == {5}


async def test_at_most_as_many_adapters_as_places_have_requests(tmp_path: Path) -> None:
    """A third adapter's requests wait, with the version that is newest when they begin."""
    staged, settings = staged_matrices(tmp_path, {"a": torch.ones(2, 3)}), {"r": 2, "lora_alpha": 6}
    llm: Any = StubEngine()
    busy: list[int] = []

    adapters, ends = Adapters(SLOTS), [asyncio.Event() for _ in range(5)]

    async def request(number: int) -> int:
        await adapters.wait_for_slot()
        with adapters.using(llm) as adapter:
            assert adapter is not None
            busy.append(len({one.id for one in adapters.live if one.users}))
            await ends[number].wait()
            return adapter.version

    tasks = []
    for number in range(4):
        await adapters.load(llm, tmp_path, staged, settings, number)
        assert len(adapters.live) <= SLOTS + 1
        tasks.append(asyncio.create_task(request(number)))
        await asyncio.sleep(0)
    assert [one.version for one in adapters.live if one.users] == [0, 1]
    canceled = asyncio.create_task(request(4))
    await asyncio.sleep(0)
    canceled.cancel()
    assert not any(task.done() for task in tasks)
    ends[1].set()
    for _ in range(50):
        await asyncio.sleep(0.002)
    assert [(one.version, one.users) for one in adapters.live] == [(0, 1), (3, 2)]
    for end in ends:
        end.set()
    assert await asyncio.gather(*tasks) == [0, 1, 3, 3] and max(busy) == SLOTS == 2
    await asyncio.gather(canceled, *adapters._removals, return_exceptions=True)
    assert [one.version for one in adapters.live] == [3] and llm.held == {4}


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="max_loras = 3 only has an effect with max_lora_rank"):
        GeneratorApp(model="m", max_loras=3)
