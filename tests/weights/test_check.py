"""The log-prob comparison, on a learner and a generator that agree, differ by a little, or give
NaN."""

import asyncio
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
    """Samples with the log-probs that it also scores."""

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
        results.append(await probe_check.after_commit(version))
    return results


def test_counts_the_tokens_and_goes_on():
    first, later = asyncio.run(versions(check(0.0), 0, 20))
    assert (
        first
        == later
        == {
            "check/logprob_max_diff": 0.0,
            "check/logprob_mean_diff": 0.0,
            "check/tokens": 16.0,
        }
    )


def test_refuses_past_the_tolerance():
    with pytest.raises(RuntimeError, match=r"differ by up to 1\.00e-03 at version 0"):
        asyncio.run(versions(check(1e-3), 0))


def test_probes_are_sampled_from_the_whole_distribution():
    """Whatever the rollouts keep of it: the learner's log-probs are over all tokens."""

    requests = []

    class Recording(Consistent):
        async def generate(self, request):
            requests.append(request)
            return await super().generate(request)

    asyncio.run(versions(check(generate=Recording()), 0))
    assert [(one.top_p, one.top_k, one.min_p, one.stop, one.ignore_eos) for one in requests] == [
        (1.0, 0, 0.0, (), True)
    ] * 2


class OneOff(Consistent):
    """Two replicas, of which one scores with other weights."""

    async def logprobs(self, rows, min_weights):
        right = (await super().logprobs(rows, min_weights))["fake"]
        return {"fake": right, "off": [tuple(value - 1e-3 for value in row) for row in right]}


def test_every_replica_is_compared():
    with pytest.raises(RuntimeError, match=r"by up to 1\.00e-03 at version 20, .*32 tokens"):
        asyncio.run(versions(check(generate=OneOff()), 0, 20))


def test_in_bfloat16_the_mean_of_each_replica_is_bounded():
    """Not the mean over replicas, in which one that is off would be lost among many."""
    with pytest.raises(
        RuntimeError,
        match=r"in the mean by 1\.00e-03 at version 20, above weights.logprob_tolerance = 0.0009",
    ):
        asyncio.run(versions(check(tolerance=9e-4, statistic="mean", generate=OneOff()), 0, 20))
    assert compare([[0.0, 0.0]], [[[0.2, 0.0]]])["check/logprob_mean_diff"] == pytest.approx(0.1)


def test_nan_is_never_within_the_tolerance():
    assert compare([[float("nan")]], [[[0.0]]])["check/logprob_max_diff"] == float("inf")


def test_past_the_tolerance_it_says_which_tensor_differs_most():
    async def names_one():
        return "of 2 tensors compared 1 differ, most of all 'w' on replica r"

    async def fails():
        raise RuntimeError("no replica answered\nand more")

    for explain, end in (
        (names_one, "; of 2 tensors compared 1 differ, most of all 'w' on replica r"),
        (fails, r"; the tensors could not .* \(RuntimeError: no replica answered\)"),
    ):
        failing = check(1e-3)
        failing.explain = explain
        with pytest.raises(RuntimeError, match=f"do not compute the same model{end}$"):
            asyncio.run(versions(failing, 0))
