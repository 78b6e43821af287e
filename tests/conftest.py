"""Real parts that tests share: a local Ray cluster, tiny checkpoints, and a Serve application with
a real vLLM replica."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from llama_checkpoint import save_llama

from asyncrl.contracts.messages import Manifest
from asyncrl.runtime.files.temporary import ProcessTemporaryFolder, remove_left_behind

# Before torch is imported. Two test processes with two threads each wait for each other's threads,
# and a step of a tiny model then takes ten times as long. Ranks and engines have their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Serve's controller looks ten times a second by default, which takes 4% of the tests' CPU time.
os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.3")

ENGINE_STARTS: list[str] = []
"""The tests and fixtures that started a vLLM engine in this session, one item per engine
process."""

CHARACTERS = "0123456789+-*=() ?abcdefghijklmnopqrstuvwxyz.,:\n"


LEAVINGS = (
    "asyncrl[_-]*",
    "pymp-*",
    "torchinductor_*",
    "vllm_dist_*",
    "*wandb-*",
    "-".join(["[0-9a-f]" * length for length in (8, 4, 4, 4, 12)]),
)
"""Name patterns of the temporary files of libraries. vLLM's sockets are named by UUIDs."""


BESIDE = (
    "agents",
    "agreement",
    "algorithms",
    "cluster",
    "config",
    "contracts",
    "control",
    "data",
    "environments",
    "frozen",
    "learning",
    "models",
    "observe",
    "packing",
    "preflight",
    "rewards",
    "rollout",
    "run",
    "rundir",
    "sandbox",
    "serving",
    "sessions",
    "testing",
    "text",
    "weights",
    "web",
)
"""Folders whose tests may run beside a Ray cluster and its engines, unless they use one."""
USES_RAY = (
    "test_autoscaling.py",
    "test_cluster_address.py",
    "test_http_engine.py",
    "test_offline_run.py",
    "test_resource_usage.py",
    "test_shared_gpus.py",
    "test_shared_storage.py",
    "test_staging.py",
    "test_teacher_endpoint.py",
    "test_threads.py",
    "test_two_nodes.py",
)
"""Files in these folders that start Ray themselves, get the fixture `ray_cluster` through another
one, or measure which cores are free."""


@cache
def unit(file: str) -> str:
    """What runs in one process: the tests of this file, or all with Ray. More clusters at a time
    would take each other's cores."""
    path = Path(__file__).parents[1] / file
    apart = path.parent.name in BESIDE and path.name not in USES_RAY
    return file if apart and "ray_cluster" not in path.read_text() else "ray"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Check that no test gets a cluster beside the other one."""
    for item in items:
        file = item.nodeid.partition("::")[0]
        if "ray_cluster" in getattr(item, "fixturenames", ()) and unit(file) != "ray":
            raise pytest.UsageError(f"{file} uses ray_cluster: add it to USES_RAY")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let `pytest -n 2` run all tests with Ray in one process, in their order, and the others
    beside them, file by file. The many whole runs of `make test-all` have a process of their own.
    (`--dist loadgroup` has no effect with pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    many_runs = config.option.markexpr == "slow"

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "runs" if many_runs and Path(file).parent.name == "jobs" else unit(file)

    return Units(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what a report cannot carry to another process: text that is not UTF-8."""
    report = yield
    report.sections = [
        (title, text.encode("utf-8", "backslashreplace").decode())
        for title, text in report.sections
    ]
    return report


def leavings() -> set[str]:
    folder = ProcessTemporaryFolder.where()
    return {path.name for pattern in LEAVINGS for path in folder.glob(pattern)}


THERE_BEFORE = leavings()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Give the engine starts of a process of pytest-xdist to the one that prints the summary."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["engine_starts"] = ENGINE_STARTS


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    ENGINE_STARTS.extend(getattr(node, "workeroutput", {}).get("engine_starts", []))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if ENGINE_STARTS:
        terminalreporter.write_line(
            f"vLLM engine starts: {len(ENGINE_STARTS)} ({', '.join(ENGINE_STARTS)})"
        )
    # Engines that tests have killed leave their folders.
    remove_left_behind(ProcessTemporaryFolder.where())
    # Only a notice, because another session on this machine may have made them.
    if left := sorted(leavings() - THERE_BEFORE):
        terminalreporter.write_line(f"left in {ProcessTemporaryFolder.where()}: {', '.join(left)}")


@pytest.fixture
def full_disk() -> Callable[[int], Any]:
    """`full_disk(size)`: a context in which no file of this process can grow beyond `size`
    bytes."""

    @contextlib.contextmanager
    def limited(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The library of async tests."""
    return "asyncio"


@pytest.fixture(scope="session")
def engine_starts() -> list[str]:
    """Append an item for each engine process that the test starts. The session prints the count;
    the default tests may start three."""
    return ENGINE_STARTS


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster of this session, with two logical CPUs. Its workers can import the tests'
    modules, which actors and rewards need."""
    import ray

    from asyncrl.run.cluster.cluster import start_local_ray
    from asyncrl.runtime.ray.shutdown import shut_down_ray

    folders = sorted({str(path.parent) for path in Path(__file__).parent.rglob("*.py")})
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )

    start_local_ray(2, object_store_memory=512 << 20)
    yield ray
    shut_down_ray()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded two-layer Qwen3 with a character tokenizer and a tied head."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a separate head."""
    return save_tiny(tmp_path_factory.mktemp("models") / "untied", tied=False)


@pytest.fixture(scope="session")
def llama_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-shaped checkpoint: sharded, untied, with a BPE tokenizer and a chat template."""
    return save_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def save_qwen3() -> Callable[..., Path]:
    """`save_qwen3(directory, tied, **changes)`: saves such a checkpoint with other settings."""
    return save_tiny


def save_tiny(directory: Path, tied: bool, **changes: Any) -> Path:
    """Write the checkpoint: config, safetensors, tokenizer, generation config. `changes` are
    settings of the Qwen3Config."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {
        token: index
        for index, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(directory)
    shape = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    settings = {
        **shape,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": tied,
    }
    config = Qwen3Config(**(settings | changes))
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def publish(ray_cluster: Any) -> Callable[..., Manifest]:
    """`publish(parameters, version=1, bucket_bytes=…, run_id=…, attempt=…)`: puts named tensors in
    the object store, as a learner does."""
    from asyncrl.weights.layout import bucket_checksum, plan_buckets

    def put(
        parameters: Mapping[str, Any],
        version: int = 1,
        bucket_bytes: int = 32 << 10,
        run_id: str = "test",
        attempt: int = 1,
    ) -> Manifest:
        entries, sizes = plan_buckets(
            [
                (name, tuple(p.shape), str(p.dtype).removeprefix("torch."))
                for name, p in parameters.items()
            ],
            bucket_bytes,
        )
        buckets = [np.zeros(size, dtype=np.uint8) for size in sizes]
        for entry in entries:
            data = parameters[entry.name].detach().contiguous().numpy().reshape(-1).view(np.uint8)
            buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes] = data
        refs = tuple(ray_cluster.put(bucket) for bucket in buckets)
        return Manifest(
            run_id,
            attempt,
            version,
            entries,
            refs,
            sizes,
            tuple(bucket_checksum(bucket) for bucket in buckets),
        )

    return put


@dataclass(frozen=True)
class Generators:
    """Replicas under Serve, their version registry, settings and application's name. Versions only
    rise, so use `next_version()`."""

    handle: Any
    registry: Any
    app: Any
    name: str
    next_version: Callable[[], int]


@pytest.fixture(scope="session")
def generators(
    ray_cluster: Any, tiny_model: Path, engine_starts: list[str]
) -> Iterator[Generators]:
    """One real vLLM replica under Serve for the session."""
    from asyncrl.config import GeneratorConfig
    from asyncrl.generation.app import start_generators, stop_generators
    from asyncrl.generation.settings import GeneratorApp, registry_name
    from asyncrl.weights.version_registry import open_registry

    name = "test-generators"
    versions = iter(range(1, 1_000_000))
    registry = open_registry(registry_name(name))
    app = GeneratorApp(
        model=str(tiny_model),
        max_model_len=256,
        cache_block=32,  # as in runs with sessions
        generator=GeneratorConfig(num_cpus=0.2, max_num_seqs=128, kv_cache_memory_bytes=64 << 20),
    )
    engine_starts.append("generators")
    handle = start_generators(app, name)
    yield Generators(handle, registry, app, name, lambda: next(versions))
    replicas = handle.broadcast("status").results(timeout_s=60)
    processes = [
        child
        for replica in replicas
        for child in psutil.Process(replica.pid).children(recursive=True)
    ]
    stop_generators(name)
    ray_cluster.kill(registry)
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []


@pytest.fixture
def own_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build applications as if no earlier test had started Ray, and Serve without proxies."""
    monkeypatch.setattr("asyncrl.serving.building.refuse_closed_proxies", lambda: None)
    monkeypatch.setattr("asyncrl.serving.building._visible", lambda model: Path(model).exists())
