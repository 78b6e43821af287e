"""A rollout worker with a fake generator: requests, retries, deadlines and failures of a group."""

import asyncio
from dataclasses import replace

import pytest

from asyncrl.config import Config
from asyncrl.contracts.errors import GenerationTimeoutError, RolloutFailedError, StaleReplicaError
from asyncrl.contracts.group_table import groups_from_table, table_from_ipc
from asyncrl.contracts.rows import Prompt, VersionSpan
from asyncrl.preflight.specs import worker_spec
from asyncrl.rollout.worker import RolloutWorker, rollout_seed
from asyncrl.testing import FakeGenerate

PROMPT = Prompt(5, 0, "1+2=", (4, 5, 6), {"answer": "3"})


def make_config(data=None, algorithm=None, staleness=None, **rollout):
    return Config.model_validate(
        {
            "name": "worker",
            "max_steps": 1,
            "model": {"path": "unused"},
            "data": {"train": "unused", **(data or {})},
            "algorithm": algorithm or {},
            "staleness": staleness or {},
            "rollout": {"n_samples_per_prompt": 4, "max_completion_length": 8, **rollout},
            "reward": {"functions": {"exact": {"function": "asyncrl.rewards.builtin:exact_match"}}},
        }
    )


class Recording(FakeGenerate):
    """First raises the errors, then answers with completions."""

    def __init__(self, *errors):
        super().__init__()
        self.errors, self.requests = list(errors), []

    async def generate(self, request):
        self.requests.append(request)
        if self.errors:
            raise self.errors.pop(0)
        return await super().generate(request)


def make_worker(generate, **rollout):
    return RolloutWorker(worker_spec(make_config(**rollout), "run", 2, lambda: generate))


async def test_a_group_waits_in_the_outbox_as_one_row():
    worker = make_worker(FakeGenerate())
    finished = await worker.rollout(PROMPT, 0)
    table = table_from_ipc(await worker.take("reader", 8, 1.0))
    assert table.num_rows == 1
    finished, group = finished, groups_from_table(table)[0]
    assert (finished.ordinal, finished.oldest_version) == (5, 0)
    assert group.attempt == 2 and group.prompt == PROMPT
    assert finished.tokens == sum(len(t.completion.token_ids) for t in group.trajectories)
    assert all(
        t.completion.text == " ".join(map(str, t.completion.token_ids)) and set(t.loss_mask) == {1}
        for t in group.trajectories
    )


@pytest.mark.parametrize(("max_length", "most"), [(None, 8), (9, 6), (4, 1)])
async def test_a_completion_ends_at_max_length_with_its_prompt(max_length, most):
    generate = Recording()
    await make_worker(generate, data={"max_length": max_length}).rollout(PROMPT, 0)
    assert [request.max_tokens for request in generate.requests] == [most]


async def test_a_request_keeps_the_tokens_that_the_config_keeps():
    generate = Recording()
    config = make_config(
        top_p=0.9,
        top_k=50,
        min_p=0.05,
        algorithm={"loss": "reinforce"},
        staleness={"max_staleness": 0},
    )
    await RolloutWorker(worker_spec(config, "run", 2, lambda: generate)).rollout(PROMPT, 0)
    assert [(request.top_p, request.top_k, request.min_p) for request in generate.requests] == [
        (0.9, 50, 0.05)
    ]


async def test_a_retry_needs_the_version_that_is_committed_by_then():
    generate = Recording(StaleReplicaError("behind"))
    generate.version = 3
    worker = make_worker(generate)
    rollout = asyncio.create_task(worker.rollout(PROMPT, 1))
    while not generate.requests:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await worker.committed(3)
    await rollout
    first, second = generate.requests
    assert (first.min_weights.version, second.min_weights.version) == (1, 3)
    assert first.seed == second.seed == rollout_seed(0, 5)


async def test_a_group_fails_at_its_deadline_with_the_last_error():
    with pytest.raises(
        RolloutFailedError,
        match=r"group 5 .* rollout.deadline_s = 0.3 s .*StaleReplicaError: behind",
    ):
        await make_worker(Recording(*[StaleReplicaError("behind")] * 100), deadline_s=0.3).rollout(
            PROMPT, 0
        )


async def test_a_generator_timeout_fails_the_group():
    with pytest.raises(RolloutFailedError, match="group 5"):
        await make_worker(Recording(GenerationTimeoutError("late"))).rollout(PROMPT, 0)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("tokens"),
        ValueError("an odd request\nwith two lines"),
        ZeroDivisionError(),
    ],
)
async def test_an_unexpected_exception_fails_its_group_with_the_stack(error):
    worker = make_worker(Recording(error))
    with pytest.raises(RolloutFailedError) as failed:
        await worker.rollout(PROMPT, 0)
    message, next_ordinal, under_way = (
        str(failed.value),
        (await worker.rollout(PROMPT, 0)).ordinal,
        await worker.under_way(),
    )
    first, _, stack = message.partition("\n")
    assert (
        first == f"not foreseen: group 5: {type(error).__name__}: {' '.join(str(error).split())}"
        and "raise self.errors.pop(0)" in stack
    )
    assert (next_ordinal, under_way) == (5, 0), "the worker continues"


async def test_a_replica_that_returns_too_few_completions_fails_one_group():
    class Few(FakeGenerate):
        async def generate(self, request):
            generated = await super().generate(request)
            return replace(generated, completions=generated.completions[:1])

    with pytest.raises(
        RolloutFailedError,
        match=(
            r"not foreseen: group 5: RuntimeError: replica .* returned 1 completions for group 5"
        ),
    ):
        await make_worker(Few()).rollout(PROMPT, 0)


def test_seeds_differ_by_ordinal_and_run_seed():
    assert len({rollout_seed(seed, ordinal) for seed in range(3) for ordinal in range(100)}) == 300
    assert 0 <= rollout_seed(0, 0) < 2**48


async def test_requests_contain_the_limits_of_repetition():
    for settings, wanted in (
        ({}, None),
        ({"repetition_stop": 20}, (16, 20)),
        ({"repetition_stop": {"times": 20, "ngram": 4}}, (4, 20)),
    ):
        generate = Recording()
        await make_worker(generate, **settings).rollout(PROMPT, 0)
        assert generate.requests[0].repetition == wanted


REMAX = {"advantage": "remax"}


async def test_a_group_has_a_baseline_only_where_the_advantage_needs_it():
    """It is made in the group's own request, counts as generated, and is none of its
    trajectories."""

    class Old(Recording):
        """The baseline is of an older version than the trajectories."""

        async def generate(self, request):
            generated = await super().generate(request)
            if generated.baseline is None:
                return generated
            ids = generated.baseline.token_ids
            older = replace(generated.baseline, versions=(VersionSpan(1, 0, len(ids)),))
            return replace(generated, baseline=older)

    async def scenario(algorithm):
        generate = Old(StaleReplicaError("behind"))
        generate.version = 2
        worker = make_worker(generate, algorithm=algorithm)
        finished = await worker.rollout(PROMPT, 1)
        [group] = groups_from_table(table_from_ipc(await worker.take("reader", 8, 1.0)))
        return generate.requests, finished, group

    requests, finished, group = await scenario(REMAX)
    assert [(request.n, request.baseline) for request in requests] == [(4, True)] * 2
    assert len(group.trajectories) == 4 and group.baseline.reward is None
    assert finished.baseline_tokens == len(group.baseline.completion.token_ids) > 0
    assert finished.tokens == sum(len(t.completion.token_ids) for t in group.trajectories)
    assert finished.oldest_version == group.oldest_version == 1, "its version is one of the group"
    requests, finished, group = await scenario({})
    assert not any(request.baseline for request in requests) and group.baseline is None
    assert (finished.baseline_tokens, finished.oldest_version) == (0, 2)


async def test_a_group_whose_baseline_did_not_come_fails():
    class Without(FakeGenerate):
        async def generate(self, request):
            return replace(await super().generate(request), baseline=None)

    with pytest.raises(RolloutFailedError, match="returned no greedy completion for group 5"):
        await make_worker(Without(), algorithm=REMAX).rollout(PROMPT, 0)


async def test_a_short_group_travels_in_few_bytes():
    """Holds the cost of a group down: 8 completions of 6 tokens took 1,027 bytes."""

    worker = make_worker(
        FakeGenerate(), n_samples_per_prompt=8, max_completion_length=6, ignore_eos=True
    )
    for ordinal in range(64):
        await worker.rollout(replace(PROMPT, ordinal=ordinal), 0)
    stream = await worker.take("reader", 64, 1.0)
    assert table_from_ipc(stream).num_rows == 64
    assert len(stream) / 64 < 2000
