"""Requests under which an engine died are asked again, and kept."""

import asyncio
import json
import os
from dataclasses import replace

import pytest
import ray

from asyncrl.contracts.errors import EngineDiedError, StaleReplicaError
from asyncrl.contracts.messages import GenerateRequest, WeightsId
from asyncrl.generation.app import ServeGenerate
from asyncrl.rollout import lost_requests as lost
from asyncrl.rollout.lost_requests import LostRequests
from asyncrl.testing import FakeGenerate

REQUEST = GenerateRequest((4, 5, 6), 2, 8, 1.0, seed=7, min_weights=WeightsId("run", 1, 3))


class Handle:
    """A Serve handle whose replicas answer with the errors given first."""

    def __init__(self, *errors):
        self.errors, self.seeds, self.generate = list(errors), [], self

    def remote(self, request):
        self.seeds.append(request.seed)
        return self._answer(request)

    async def _answer(self, request):
        if self.errors:
            raise self.errors.pop(0)
        return await FakeGenerate(version=3).generate(request)


def rows(directory):
    return [
        json.loads(line)
        for file in directory.glob("lost_requests_*.jsonl")
        for line in file.read_text().splitlines()
    ]


def test_a_request_that_an_engine_died_of_is_asked_again_and_kept_once(tmp_path):
    said = "Traceback of a replica\n  EngineDiedError: the vLLM engine's process has died"
    from_a_replica = ray.exceptions.RayTaskError(
        "generate", said, EngineDiedError("dead")
    ).as_instanceof_cause()
    handle = Handle(from_a_replica, StaleReplicaError("behind"), ray.exceptions.ActorDiedError())
    generate = ServeGenerate(handle, LostRequests(tmp_path / "kept", 1))
    generated = asyncio.run(generate.generate(replace(REQUEST, deadline_s=30.0)))
    assert len(generated.completions) == 2 and handle.seeds == [7] * 4
    (row,) = rows(tmp_path / "kept")
    assert row["error"].endswith("EngineDiedError: the vLLM engine's process has died")
    assert (row["prompt_ids"], row["n"], row["max_tokens"], row["seed"], row["min_version"]) == (
        [4, 5, 6],
        2,
        8,
        7,
        3,
    )
    assert (tmp_path / "kept" / f"lost_requests_1_{os.getpid()}.jsonl").exists()


@pytest.mark.parametrize(
    "death",
    [
        ray.exceptions.OutOfMemoryError("killed"),
        ray.exceptions.NodeDiedError("gone"),
        ray.exceptions.ObjectLostError("ab", None, ""),
    ],
)
def test_a_replica_that_ray_ends_or_that_goes_with_its_node_is_asked_elsewhere(tmp_path, death):
    handle = Handle(death)
    generated = asyncio.run(
        ServeGenerate(handle, LostRequests(tmp_path / "kept", 1)).generate(
            replace(REQUEST, deadline_s=30.0)
        )
    )
    assert len(generated.completions) == 2 and len(rows(tmp_path / "kept")) == 1


def test_an_engine_that_dies_of_everything_does_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(lost, "MOST", 3)
    keep = LostRequests(tmp_path, 0)
    for seed in range(10):
        keep(replace(REQUEST, seed=seed), EngineDiedError("dead"))
    assert [row["seed"] for row in rows(tmp_path)] == [0, 1, 2]


def test_a_full_disk_ends_nothing(tmp_path):
    (tmp_path / "kept").write_text("in the way")
    LostRequests(tmp_path / "kept", 0)(REQUEST, EngineDiedError("dead"))
