"""The log-prob check, with a learner and a generator that agree, differ slightly, or return NaN."""

import contextlib
from dataclasses import replace

import pytest

from asyncrl.contracts.messages import WeightsId
from asyncrl.testing import FakeGenerate
from asyncrl.weights.check import ProbeCheck, compare


class Learner:
    def __init__(self, generate, error=0.0):
        self.generate, self.error, self.sampled = generate, error, {}

    async def logprobs(self, rows, temperature=1.0):
        return [
            [value + self.error for value in row]
            for row in (await self.generate.logprobs(rows, None))["fake"]
        ]


class Consistent(FakeGenerate):
    """A generator whose sampled log-probs equal its scored ones."""

    async def generate(self, request):
        generated = await super().generate(request)
        completion = generated.completions[0]
        scored = (await self.logprobs([((), completion.token_ids)], None))["fake"][0]
        return replace(generated, completions=(replace(completion, logprobs=scored),))


def check(error=0.0, tolerance=1e-4, statistic="max", generate=None):
    generate = generate or Consistent()
    return ProbeCheck(
        generate,
        Learner(generate, error),
        [(1, 2), (3,)],
        8,
        tolerance,
        statistic,
        WeightsId("run", 0, 0),
    )


async def versions(probe_check, *versions):
    results = []
    for version in versions:
        probe_check.generate.version = version
        await probe_check.at_gather(version)
        results.append(await probe_check.after_commit(version, contextlib.nullcontext))
    return results


async def test_equal_logprobs_pass_and_are_counted():
    first, later = await versions(check(0.0), 0, 20)
    assert (
        first
        == later
        == {
            "check/logprob_max_diff": 0.0,
            "check/logprob_mean_diff": 0.0,
            "check/tokens": 16.0,
        }
    )


async def test_a_difference_above_the_tolerance_raises():
    with pytest.raises(RuntimeError, match=r"differ by up to 1\.00e-03 at version 0"):
        await versions(check(1e-3), 0)


async def test_probes_are_sampled_from_the_whole_distribution():
    """The learner's log-probs are over all tokens, so the rollouts' top_p and similar are
    ignored."""

    requests = []

    class Recording(Consistent):
        async def generate(self, request):
            requests.append(request)
            return await super().generate(request)

    await versions(check(generate=Recording()), 0)
    assert [(r.top_p, r.top_k, r.min_p, r.stop, r.ignore_eos) for r in requests] == [
        (1.0, 0, 0.0, (), True)
    ] * 2


class OneReplicaOff(Consistent):
    """Two replicas. One of them scores with other weights."""

    async def logprobs(self, rows, min_weights):
        right = (await super().logprobs(rows, min_weights))["fake"]
        return {"fake": right, "off": [tuple(value - 1e-3 for value in row) for row in right]}


async def test_every_replica_is_compared():
    with pytest.raises(RuntimeError, match=r"by up to 1\.00e-03 at version 20, .*32 tokens"):
        await versions(check(generate=OneReplicaOff()), 0, 20)


async def test_the_mean_statistic_bounds_the_mean_of_each_replica():
    """The mean over all replicas would hide a single wrong replica among many."""
    with pytest.raises(
        RuntimeError,
        match=r"on average by 1\.00e-03 at version 20, above weights.logprob_tolerance = 0.0009",
    ):
        await versions(check(tolerance=9e-4, statistic="mean", generate=OneReplicaOff()), 0, 20)
    assert compare([[0.0, 0.0]], [[[0.2, 0.0]]])["check/logprob_mean_diff"] == pytest.approx(0.1)


def test_nan_is_never_within_the_tolerance():
    assert compare([[float("nan")]], [[[0.0]]])["check/logprob_max_diff"] == float("inf")


async def test_the_error_names_the_tensor_that_differs_most():
    async def names_a_tensor():
        return "of 2 tensors compared 1 differ, most of all 'w' on replica r"

    async def fails():
        raise RuntimeError("no replica answered\nand more")

    for explain, end in (
        (names_a_tensor, "; of 2 tensors compared 1 differ, most of all 'w' on replica r"),
        (fails, r"; the tensors could not .* \(RuntimeError: no replica answered\)"),
    ):
        failing = check(1e-3)
        failing.explain = explain
        with pytest.raises(RuntimeError, match=f"do not compute the same model{end}$"):
            await versions(failing, 0)
