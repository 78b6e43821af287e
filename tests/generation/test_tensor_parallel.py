"""An engine with two workers. They split every layer (tensor parallelism), or each has half of the
layers (pipeline parallelism)."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from disturbed import disturb
from engines import EngineActor

from asyncrl.config import GeneratorConfig
from asyncrl.contracts.messages import GenerateRequest
from asyncrl.generation.engine.arguments import engine_environment
from asyncrl.generation.settings import GeneratorApp
from asyncrl.weights.fingerprint import difference_text, fingerprint, row_products
from asyncrl.weights.manifest import expected_tensors, tensors_of
from asyncrl.weights.staging import SHARED_MEMORY, fetch_version

pytestmark = pytest.mark.timeout(600)
PROMPTS = [(5 + i, 6, 14 + i % 7) for i in range(8)]


@pytest.mark.parametrize(
    ("model", "split"),
    [
        pytest.param("tiny_model", "tensor_parallel_size", marks=pytest.mark.slow),
        pytest.param("untied_model", "tensor_parallel_size", marks=pytest.mark.faults),
        pytest.param("tiny_model", "pipeline_parallel_size", marks=pytest.mark.faults),
    ],
)
def test_two_workers_take_an_update_of_every_parameter_and_die_together(
    ray_cluster: Any,
    publish: Any,
    reference: Any,
    load_reference: Any,
    engine_starts: list[str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    model: str,
    split: str,
) -> None:
    path = request.getfixturevalue(model)
    sizes = {split: 2, "max_num_seqs": 16, "kv_cache_memory_bytes": 8 << 20}
    settings = GeneratorConfig.model_validate(sizes)
    app = GeneratorApp(model=str(path), max_model_len=128, generator=settings)
    engine_starts.append(f"{split} 2 of {model}")
    actor = (
        ray_cluster.remote(EngineActor)
        .options(num_cpus=0, runtime_env={"env_vars": engine_environment("cpu")})
        .remote(app)
    )
    get = ray_cluster.get
    try:
        print("start:", get(actor.start.remote(), timeout=500))
        _, processes = get(actor.processes.remote())
        queues = [path for path in SHARED_MEMORY.glob("*.queue") if _maker(path) in processes]
        assert queues, "vLLM's queues are not named, so a kill would leave them"
        workers = [pid for pid in processes if "Worker" in " ".join(psutil.Process(pid).cmdline())]
        assert len(workers) == 2, [psutil.Process(pid).cmdline() for pid in processes]

        learner = load_reference(path)
        parameters = disturb(learner, seed=1)
        staged = fetch_version(
            publish(parameters, version=1), expected_tensors(path, "float32"), 60, tmp_path
        )
        print("update:", get(actor.apply.remote(staged.update_info(), 1), timeout=120))
        staged.remove()
        held = get(actor.fingerprints.remote(), timeout=60)
        published = {
            name: fingerprint(row_products(parameter.detach().numpy()))
            for name, parameter in parameters.items()
        }
        text = difference_text(published, {"two workers": held}, "float32")
        assert text.startswith("all "), text
        assert set(held) >= set(published)

        asked = [
            actor.generate.remote(GenerateRequest(prompt, 2, 32, 1.0, seed=5, ignore_eos=True))
            for prompt in PROMPTS
        ]
        worst = 0.0
        for prompt, completions in zip(PROMPTS, get(asked, timeout=120), strict=True):
            for completion in completions:
                assert len(completion.token_ids) == 32
                theirs = torch.tensor(completion.logprobs)
                ours = reference(learner, prompt, completion.token_ids)
                worst = max(worst, (ours - theirs).abs().max().item())
        print("largest difference in nats:", worst)
        assert worst <= 1e-4

        os.kill(workers[1], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while True:  # the next check or the one after it finds the death
            try:
                get(actor.check.remote(), timeout=60)
            except Exception as error:
                assert "has died" in str(error), error
                break
            assert time.monotonic() < deadline
        get(actor.stop.remote(), timeout=60)
        assert not any(map(psutil.pid_exists, processes))
        assert not any(path.exists() for path in queues)
    finally:
        ray_cluster.kill(actor)


@pytest.mark.slow
def test_two_workers_take_adapters(
    ray_cluster: Any,
    publish: Any,
    adapted: Any,
    reference: Any,
    engine_starts: list[str],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """Tensor parallelism splits the matrices of an adapter as it splits the layers."""

    sizes = {"tensor_parallel_size": 2, "max_num_seqs": 16, "kv_cache_memory_bytes": 8 << 20}
    app = GeneratorApp(
        model=str(tiny_model),
        max_model_len=128,
        generator=GeneratorConfig.model_validate(sizes),
        max_lora_rank=4,
        max_loras=2,
    )
    engine_starts.append("tensor_parallel_size 2 with adapters")
    actor = (
        ray_cluster.remote(EngineActor)
        .options(num_cpus=0, runtime_env={"env_vars": engine_environment("cpu")})
        .remote(app)
    )
    get = ray_cluster.get
    try:
        get(actor.start.remote(), timeout=500)
        base = expected_tensors(tiny_model, "float32")
        for version, settings in ((1, {}), (2, {"use_rslora": True})):
            model, matrices, adapter = adapted(version, **settings)
            manifest = dataclasses.replace(publish(matrices, version=version), adapter=adapter)
            staged = fetch_version(manifest, tensors_of(manifest, base, 4), 60, tmp_path)
            get(actor.apply_adapter.remote(staged, adapter, version), timeout=120)
            staged.remove()
            held = get(actor.fingerprints.remote(), timeout=60)
            published = {
                name: fingerprint(row_products(matrix.numpy())) for name, matrix in matrices.items()
            }
            text = difference_text(published, {"two workers": held}, "float32")
            assert text.startswith(f"all {len(published)} "), text
            asked = [
                actor.generate.remote(GenerateRequest(prompt, 2, 32, 1.0, seed=5, ignore_eos=True))
                for prompt in PROMPTS
            ]
            worst = 0.0
            for prompt, completions in zip(PROMPTS, get(asked, timeout=120), strict=True):
                for completion in completions:
                    assert [span.version for span in completion.versions] == [version]
                    theirs = torch.tensor(completion.logprobs)
                    ours = reference(model, prompt, completion.token_ids)
                    worst = max(worst, (ours - theirs).abs().max().item())
            print("largest difference in nats:", worst)
            assert worst <= 1e-4
        get(actor.stop.remote(), timeout=60)
    finally:
        ray_cluster.kill(actor)


def _maker(queue: Path) -> int:
    """The process that made a queue in shared memory."""
    return int(queue.stem.rpartition("-")[2])
