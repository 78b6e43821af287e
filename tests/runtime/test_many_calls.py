"""Calls that share messages: each answer comes at once, exactly once, and none is lost."""

import asyncio
import random
from functools import partial

import pytest

from asyncrl.runtime.ray.many_calls import Calls

pytestmark = pytest.mark.timeout(20)


async def value(result, gate=None):
    if gate is not None:
        await gate.wait()
    if isinstance(result, Exception):
        raise result
    return result


async def test_a_short_call_does_not_wait_for_a_long_one():
    calls, gate = Calls(), asyncio.Event()
    calls.start("long", partial(value, "late", gate))
    calls.start("short", partial(value, "soon"))
    life, received, answers = await calls.ended(calls.life)
    assert answers == [("short", "soon")] and len(calls) == 1
    gate.set()
    assert (await calls.ended(life, received))[2] == [("long", "late")]
    assert len(calls) == 0


async def test_what_ends_at_one_moment_comes_in_one_answer():
    calls = Calls()
    for number in range(50):
        calls.start(number, partial(value, number))
    assert [len(answers) async for answers in calls.until_all_ended()] == [50]


async def test_an_answer_is_kept_until_the_reader_says_that_it_has_it():
    calls = Calls()
    calls.start(1, partial(value, "one"))
    first = await calls.ended(calls.life)
    # The message was lost, so the reader repeats its last question.
    assert await calls.ended(calls.life) == first
    calls.start(2, partial(value, "two"))
    await asyncio.sleep(0)
    life, received, answers = await calls.ended(first[0], first[1])
    assert (received, answers) == (2, [(2, "two")])
    # A reader that asks a process that has ended, or its first question, learns of this one.
    assert await calls.ended("another life", 2) == (life, 1, [])
    assert await calls.ended() == (life, 1, [])
    for key in (3, 4):
        calls.start(key, partial(value, key))
    await asyncio.sleep(0)
    assert (await calls.ended(life, 2))[2] == [(3, 3), (4, 4)]
    # A question that was sent earlier and arrives late takes nothing away.
    assert (await calls.ended(life, 1))[2] == [(3, 3), (4, 4)]


async def test_a_canceled_call_has_no_answer_and_a_second_under_its_key_replaces_it():
    calls, gate, canceled = Calls(), asyncio.Event(), []

    async def first():
        try:
            await gate.wait()
        except asyncio.CancelledError:
            canceled.append("first")
            raise

    calls.start("gone", partial(value, "never", gate))
    calls.start("again", first)
    await asyncio.sleep(0)
    calls.start("again", partial(value, "second"))
    calls.cancel(["gone", "unknown"])
    gate.set()
    assert [answers async for answers in calls.until_all_ended()] == [[("again", "second")]]
    assert canceled == ["first"]


async def test_no_call_is_left_when_all_are_canceled():
    calls = Calls()
    calls.start(1, partial(value, "never", asyncio.Event()))
    reading = asyncio.create_task(anext(calls.until_all_ended(), "the end"))
    await asyncio.sleep(0)
    calls.cancel([1])
    assert (await reading) == "the end"


async def test_an_exception_is_an_answer_and_carries_its_stack():
    calls = Calls()
    calls.start(1, partial(value, KeyError("tokens")))
    [(_, error)] = (await calls.ended(calls.life))[2]
    assert isinstance(error, KeyError) and error.__traceback__ is None
    assert "raise result" in error.__notes__[0]


async def test_a_call_whose_part_was_canceled_has_an_answer_too():
    calls, part = Calls(), asyncio.get_running_loop().create_future()

    async def waits():
        return await part

    calls.start(1, waits)
    await asyncio.sleep(0)
    part.cancel()
    [(key, error)] = (await calls.ended(calls.life))[2]
    assert (key, str(error)) == (1, "a part of the call was canceled")


@pytest.mark.parametrize("seed", range(20))
async def test_random_calls_have_one_answer_each_unless_canceled(seed):
    chance, calls = random.Random(seed), Calls()
    expected, got, life, received = set(range(60)), [], calls.life, 0

    async def takes(number):
        for _ in range(chance.randrange(6)):
            await asyncio.sleep(0)
        return number

    for number in range(60):
        calls.start(number, partial(takes, number))
        if chance.random() < 0.2:
            before = len(calls)
            calls.cancel([gone := chance.randrange(number + 1)])
            if len(calls) < before:
                expected.discard(gone)
        if chance.random() < 0.3:
            await asyncio.sleep(0)
        if chance.random() < 0.3 and got != sorted(expected):
            lost = chance.random() < 0.3
            if calls._ended:
                new_life, new_received, answers = await calls.ended(life, received)
                if not lost:
                    life, received = new_life, new_received
                    got += [answer for _, answer in answers]
    while len(got) < len(expected):
        life, received, answers = await calls.ended(life, received)
        got += [answer for _, answer in answers]
    got, expected = sorted(got), sorted(expected)
    assert got == expected
