"""The job of `test_engine_across_nodes.py`: drives generators whose engine has two nodes. Prints
what it saw as JSON after `RESULT`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from disturbed import disturb
from ray._private.state import actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import AutoModelForCausalLM

from asyncrl.config import GeneratorConfig
from asyncrl.contracts.messages import GenerateRequest, Manifest
from asyncrl.generation.app import start_generators, stop_generators
from asyncrl.generation.settings import GeneratorApp, registry_name
from asyncrl.weights.fingerprint import difference_text, fingerprint, row_products
from asyncrl.weights.layout import bucket_checksum, plan_buckets
from asyncrl.weights.version_registry import open_registry

NAME = "across-nodes"
PROMPTS = [(5 + i, 6, 14 + i % 7) for i in range(8)]


def publish(parameters: dict[str, torch.Tensor], version: int) -> Manifest:
    entries, sizes = plan_buckets(
        [(name, tuple(p.shape), "float32") for name, p in parameters.items()], 32 << 10
    )
    buckets = [np.zeros(size, dtype=np.uint8) for size in sizes]
    for entry in entries:
        data = parameters[entry.name].detach().contiguous().numpy().reshape(-1).view(np.uint8)
        buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes] = data
    refs = tuple(ray.put(bucket) for bucket in buckets)
    checksums = tuple(bucket_checksum(bucket) for bucket in buckets)
    return Manifest("run", 1, version, entries, refs, sizes, checksums)


def processes() -> tuple[dict[str, Any], dict[str, Any]]:
    """Ray's entries of the replica and of the follower that live."""
    (replica,) = [
        actor
        for actor in actors().values()
        if actor["State"] == "ALIVE" and actor["ActorClassName"].startswith("ServeReplica")
    ]
    (follower,) = followers()
    return replica, follower


def until(state: Callable[[], Any], what: str, limit_s: float = 240) -> Any:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if found := state():
                return found
        except Exception as error:
            what = f"{what}: {type(error).__name__}: {error}"[:600]
        time.sleep(0.5)
    raise AssertionError(f"not in {limit_s:g} s: {what}")


def files(node: str) -> list[str]:
    """asyncrl's and vLLM's files in the shared memory of a node."""

    def look() -> list[str]:
        return [
            p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(("asyncrl", "vllm"))
        ]

    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.get(ray.remote(look).options(num_cpus=0, scheduling_strategy=place).remote())


def worst_difference(handle: Any, model: Any) -> float:
    """Largest difference of log-probs, in nats, between the generators and transformers."""
    worst = 0.0
    asked = [
        handle.generate.remote(GenerateRequest(prompt, 2, 32, 1.0, seed=5, ignore_eos=True))
        for prompt in PROMPTS
    ]
    for prompt, answer in zip(PROMPTS, asked, strict=True):
        for completion in answer.result(timeout_s=120).completions:
            ids = completion.token_ids
            assert len(ids) == 32
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0].float()
            theirs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
            ours = theirs.gather(1, torch.tensor(ids)[:, None])[:, 0]
            worst = max(worst, (ours - torch.tensor(completion.logprobs)).abs().max().item())
    return worst


def tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def main(address: str, model: str, split: str, deaths: bool) -> dict[str, Any]:
    ray.init(address=address, log_to_driver=False)
    generator = GeneratorConfig.model_validate(
        {split: 2, "nnodes": 2, "max_num_seqs": 16, "kv_cache_memory_bytes": 8 << 20}
    )
    registry = open_registry(registry_name(NAME))
    app = GeneratorApp(model=model, max_model_len=128, generator=generator)
    began = time.monotonic()
    handle = start_generators(app, NAME)
    result: dict[str, Any] = {"start_s": time.monotonic() - began}
    learner = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    try:
        replica, follower = processes()
        nodes = [actor["Address"]["NodeID"] for actor in (replica, follower)]
        result["nodes"] = len(set(nodes))
        result["before"] = worst_difference(handle, learner)
        parameters = disturb(learner, seed=1)
        manifest = publish(parameters, 1)
        status = handle.apply_version.remote(manifest).result(timeout_s=120)
        result["applied"] = status.applied
        result["after"] = worst_difference(handle, learner)
        _, held = handle.fingerprints.remote().result(timeout_s=60)
        published = {
            name: fingerprint(row_products(parameter.detach().numpy()))
            for name, parameter in parameters.items()
        }
        result["fingerprints"] = difference_text(published, {"both nodes": held}, "float32")
        print(result, file=sys.stderr, flush=True)
        result["staged"] = [name for node in nodes for name in files(node) if "weights" in name]
        if deaths:
            _refused_by_the_follower(handle, learner, follower, sum(manifest.sizes), result)
            _killed(handle, learner, registry, manifest, result)
    finally:
        stop_generators(NAME)
    until(lambda: not followers(), "no follower outlives the application", 60)
    result["files"] = {node: files(node) for node in nodes}
    return result


def _refused_by_the_follower(
    handle: Any, learner: Any, follower: dict[str, Any], nbytes: int, result: dict[str, Any]
) -> None:
    """The follower's node has no room for version 2. Nothing changes."""
    process = psutil.Process(follower["Pid"])
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (nbytes - 1, before[1]))
    try:
        other = AutoModelForCausalLM.from_config(learner.config)
        manifest = publish(disturb(other, seed=2), 2)
        handle.apply_version.remote(manifest).result(timeout_s=120)
    except Exception as error:
        result["refused"] = f"{type(error).__name__}: {error}".strip().splitlines()[-1]
    process.rlimit(psutil.RLIMIT_FSIZE, before)
    status = handle.status.remote().result(timeout_s=60)
    result["kept"] = [status.weights.version, status.broken]
    result["kept_difference"] = worst_difference(handle, learner)


def _killed(
    handle: Any, learner: Any, registry: Any, manifest: Manifest, result: dict[str, Any]
) -> None:
    ray.get(registry.announce.remote(manifest))
    first, follower = processes()
    lost = [process for pid in (first["Pid"], follower["Pid"]) for process in tree(pid)]
    (worker,) = [
        child
        for child in psutil.Process(follower["Pid"]).children()
        if "Worker" in " ".join(child.cmdline())
    ]
    began = time.monotonic()
    worker.kill()

    def replaced(old: int) -> bool:
        status = handle.status.remote().result(timeout_s=10)
        return status.pid != old and status.weights is not None

    until(
        lambda: replaced(first["Pid"]),
        "a worker of the follower was killed, and the replica is the same",
    )
    result["replaced_s"] = time.monotonic() - began
    result["survivors"] = [process.pid for process in psutil.wait_procs(lost, 60)[1]]
    result["replaced"] = worst_difference(handle, learner)
    second, follower = until(processes, "one replica and one follower")
    lost = tree(follower["Pid"])
    psutil.Process(second["Pid"]).kill()
    result["orphans"] = [process.pid for process in psutil.wait_procs(lost, 60)[1]]
    # Its successor deletes what it left in shared memory.
    until(lambda: replaced(second["Pid"]), "the replica was killed, and has no successor")


def followers() -> list[dict[str, Any]]:
    return [
        actor
        for actor in actors().values()
        if actor["State"] != "DEAD" and actor["ActorClassName"] == "Follower"
    ]


if __name__ == "__main__":
    address, model, split, deaths = sys.argv[1:]
    print("RESULT", json.dumps(main(address, model, split, deaths == "deaths")), flush=True)
