"""The outbox of finished groups: taken once by each reader, kept until acknowledged."""

import asyncio

import pytest

from asyncrl.contracts.errors import OutboxClosedError
from asyncrl.rollout.outbox import Outbox

pytestmark = pytest.mark.timeout(20)


async def test_groups_are_taken_once_and_kept_until_acknowledged():
    outbox = Outbox()
    for ordinal in (3, 1, 2):
        await outbox.put(ordinal, f"group {ordinal}")
    assert await outbox.take("a", 2, 1.0) == ["group 3", "group 1"]
    assert await outbox.take("a", 2, 1.0) == ["group 2"]
    assert await outbox.take("a", 2, 0.001) == []
    assert len(outbox) == 3
    await outbox.ack([1, 3])
    await outbox.ack([1, 99])
    assert len(outbox) == 1


async def test_a_take_waits_for_a_group():
    outbox = Outbox()
    take = asyncio.create_task(outbox.take("a", 8, 5.0))
    await asyncio.sleep(0)
    await outbox.put(7, "group")
    assert await take == ["group"]


async def test_a_new_reader_first_gets_the_groups_that_the_old_one_took():
    outbox = Outbox()
    await outbox.put(0, "zero")
    await outbox.put(1, "one")
    assert await outbox.take("old", 1, 1.0) == ["zero"]
    assert await outbox.take("new", 8, 1.0) == ["zero", "one"]
    with pytest.raises(OutboxClosedError, match="replaced by new"):
        await outbox.take("old", 8, 1.0)


async def test_a_waiting_take_of_a_dead_reader_takes_nothing_from_its_successor():
    outbox = Outbox()
    dead = asyncio.create_task(outbox.take("dead", 8, 5.0))
    await asyncio.sleep(0)
    alive = asyncio.create_task(outbox.take("alive", 8, 5.0))
    await asyncio.sleep(0)
    await outbox.put(0, "zero")
    assert await alive == ["zero"]
    with pytest.raises(OutboxClosedError):
        await dead


async def test_a_group_made_again_replaces_its_taken_copy():
    outbox = Outbox()
    await outbox.put(0, "first")
    await outbox.take("a", 1, 1.0)
    await outbox.put(0, "second")
    assert len(outbox) == 1
    assert await outbox.take("a", 1, 1.0) == ["second"]


async def test_closing_ends_waiting_takes():
    outbox = Outbox()
    take = asyncio.create_task(outbox.take("a", 1, 5.0))
    await asyncio.sleep(0)
    await outbox.close()
    with pytest.raises(OutboxClosedError, match="closed"):
        await take
