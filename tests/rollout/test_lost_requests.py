"""Requests that are lost with their engine are retried and recorded."""

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
    """A Serve handle whose replicas first raise the errors, then answer."""

    def __init__(self, *errors):
        self.errors, self.seeds, self.generate_many = list(errors), [], self

    def options(self, stream):
        assert stream
        return self

    async def remote(self, requests):
        [(key, request)] = requests.items()
        self.seeds.append(request.seed)
        if self.errors:
            raise self.errors.pop(0)
        yield [(key, await FakeGenerate(version=3).generate(request))]


def rows(directory):
    return [
        json.loads(line)
        for file in directory.glob("lost_requests_*.jsonl")
        for line in file.read_text().splitlines()
    ]


async def test_a_request_that_is_lost_with_its_engine_is_retried_and_recorded_once(tmp_path):
    traceback = "Traceback of a replica\n  EngineDiedError: the vLLM engine's process has died"
    from_a_replica = ray.exceptions.RayTaskError(
        "generate", traceback, EngineDiedError("dead")
    ).as_instanceof_cause()
    handle = Handle(from_a_replica, StaleReplicaError("behind"), ray.exceptions.ActorDiedError())
    generate = ServeGenerate(handle, LostRequests(tmp_path / "kept", 1))
    generated = await generate.generate(replace(REQUEST, deadline_s=30.0))
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
async def test_a_request_whose_replica_ray_kills_or_loses_is_retried(tmp_path, death):
    handle = Handle(death)
    generated = await ServeGenerate(handle, LostRequests(tmp_path / "kept", 1)).generate(
        replace(REQUEST, deadline_s=30.0)
    )
    assert len(generated.completions) == 2 and len(rows(tmp_path / "kept")) == 1


def test_an_engine_that_dies_repeatedly_does_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(lost, "MOST", 3)
    keep = LostRequests(tmp_path, 0)
    for seed in range(10):
        keep(replace(REQUEST, seed=seed), EngineDiedError("dead"))
    assert [row["seed"] for row in rows(tmp_path)] == [0, 1, 2]


def test_a_file_that_cannot_be_written_raises_nothing(tmp_path):
    (tmp_path / "kept").write_text("in the way")
    LostRequests(tmp_path / "kept", 0)(REQUEST, EngineDiedError("dead"))
