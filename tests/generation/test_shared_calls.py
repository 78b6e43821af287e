"""Requests that share Serve calls, with a fake handle in place of Serve."""

import asyncio
from dataclasses import replace

import pytest
from ray.exceptions import ActorDiedError

from asyncrl.contracts.errors import GenerationTimeoutError, StaleReplicaError
from asyncrl.contracts.messages import GenerateRequest, WeightsId
from asyncrl.generation.shared_calls import MOST_IN_CALL, SharedCalls

pytestmark = pytest.mark.timeout(20)

REQUEST = GenerateRequest((4, 5), 2, 8, 1.0, min_weights=WeightsId("run", 1, 3))


class Response:
    """The answers of one call. `put` yields some, an exception ends them, None too."""

    def __init__(self, requests):
        self.requests, self.cancelled = requests, False
        self.coming = asyncio.Queue()

    def put(self, *answers):
        self.coming.put_nowait(list(answers))

    def end(self, error=None):
        self.coming.put_nowait(error)

    def cancel(self):
        self.cancelled = True
        self.end(asyncio.CancelledError())

    def __aiter__(self):
        return self

    async def __anext__(self):
        item = await self.coming.get()
        if isinstance(item, BaseException):
            raise item
        if item is None:
            raise StopAsyncIteration
        return item


class Handle:
    """Keeps every call, and what was given up."""

    def __init__(self):
        self.calls, self.given_up, self.generate_many = [], [], self

    def options(self, stream):
        assert stream
        return self

    def remote(self, requests):
        self.calls.append(Response(requests))
        return self.calls[-1]


@pytest.fixture
def handle(monkeypatch):
    made = Handle()

    async def ask_all(handle, method, keys, timeout_s):
        assert (handle, method) == (made, "drop_requests")
        made.given_up.append(keys)

    monkeypatch.setattr("asyncrl.generation.shared_calls.ask_all", ask_all)
    return made


async def some_turns():
    for _ in range(5):
        await asyncio.sleep(0)


def start(shared, count, request=REQUEST):
    return [asyncio.create_task(shared.generate(replace(request, seed=n))) for n in range(count)]


async def test_requests_of_one_moment_share_calls(handle):
    """Holds the cost of a group down: 64 requests make 8 calls."""

    shared = SharedCalls(handle)
    tasks = start(shared, 64)
    await some_turns()
    assert [len(call.requests) for call in handle.calls] == [MOST_IN_CALL] * 8
    for call in handle.calls:
        call.put(*((key, request.seed) for key, request in call.requests.items()))
        call.end()
    assert await asyncio.gather(*tasks) == list(range(64))


async def test_each_request_is_answered_as_soon_as_it_is_done(handle):
    short, long = start(SharedCalls(handle), 2)
    await some_turns()
    [call] = handle.calls
    first, second = call.requests
    call.put((first, "short"))
    assert await short == "short" and not long.done()
    call.put((second, GenerationTimeoutError("late")))
    with pytest.raises(GenerationTimeoutError, match="late"):
        await long


async def test_a_call_has_requests_with_the_same_demands(handle):
    """The router chooses one replica for all of them."""

    shared = SharedCalls(handle)
    newer = replace(REQUEST, min_weights=WeightsId("run", 1, 4))
    held = replace(REQUEST, replica="held")
    tasks = [task for one in (REQUEST, newer, held) for task in start(shared, 2, one)]
    await some_turns()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    demands = [
        {(request.replica, request.min_weights.version) for request in call.requests.values()}
        for call in handle.calls
    ]
    assert demands == [{(None, 3)}, {(None, 4)}, {("held", 3)}]


async def test_sessions_of_different_replicas_do_not_share_calls(handle):
    """Those of the same replica do: one call has several sessions."""

    shared = SharedCalls(handle, lambda request: request.session and request.session[0])
    names = ["a1", "b1", "a2", "b2", "a3", None]
    tasks = [asyncio.create_task(shared.generate(replace(REQUEST, session=name))) for name in names]
    await some_turns()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    found = [[request.session for request in call.requests.values()] for call in handle.calls]
    assert found == [["a1", "a2", "a3"], ["b1", "b2"], [None]]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (None, StaleReplicaError),
        (ActorDiedError(), ActorDiedError),
        (asyncio.CancelledError(), StaleReplicaError),
    ],
)
async def test_a_replica_that_ends_fails_what_it_has_not_answered(handle, end, expected):
    answered, lost = start(SharedCalls(handle), 2)
    await some_turns()
    [call] = handle.calls
    call.put((next(iter(call.requests)), "answer"))
    call.end(end)
    with pytest.raises(expected):
        await lost
    assert await answered == "answer"


async def test_one_request_of_a_call_is_given_up_and_the_others_stay(handle):
    tasks = start(SharedCalls(handle), 3)
    await some_turns()
    [call] = handle.calls
    keys = list(call.requests)
    tasks[0].cancel()
    tasks[2].cancel()
    await some_turns()
    assert handle.given_up == [[keys[0], keys[2]]] and not call.cancelled
    call.put((keys[1], "kept"))
    call.end()
    assert await tasks[1] == "kept"


async def test_what_was_given_up_before_the_replica_had_the_call_is_given_up_again(handle):
    """The call may wait in the router while the replicas hear what to drop."""

    tasks = start(SharedCalls(handle), 3)
    await some_turns()
    [call] = handle.calls
    keys = list(call.requests)
    tasks[0].cancel()
    await some_turns()
    call.put((keys[1], "answer"))
    await tasks[1]
    await some_turns()
    assert handle.given_up == [[keys[0]], [keys[0]]] and not call.cancelled
    call.put((keys[2], "answer"))
    await tasks[2]
    await some_turns()
    assert call.cancelled, "only a request without a caller is left"


async def test_a_call_that_nobody_waits_for_is_canceled(handle):
    tasks = start(SharedCalls(handle), 2)
    await some_turns()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await some_turns()
    assert handle.calls[0].cancelled


async def test_a_request_that_is_canceled_before_it_is_sent_is_not_sent(handle):
    shared = SharedCalls(handle)
    task = asyncio.create_task(shared.generate(REQUEST))
    await asyncio.sleep(0)
    task.cancel()
    await some_turns()
    assert handle.calls == []
