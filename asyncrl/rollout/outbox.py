"""Finished groups in a rollout worker. The scoring reader takes them, and the worker keeps them
until they are acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Generic, TypeVar

from asyncrl.contracts.errors import OutboxClosedError

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """Items by ordinal, each waiting, then taken, then acknowledged and forgotten. A new reader's
    first take makes the old reader's items available again.

    So a group is offered until its scored row is safe, and may be taken more than once. The
    consumer drops duplicates.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Item] = {}
        self._taken: dict[int, Item] = {}
        self._reader: str | None = None
        self._retired: set[str] = set()
        self._closed = False
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        """Groups not yet acknowledged."""
        return len(self._waiting) + len(self._taken)

    @property
    def has_reader(self) -> bool:
        """Whether a reader has asked for groups yet."""
        return self._reader is not None

    async def put(self, ordinal: int, item: Item) -> None:
        """Offer a finished group. It replaces a group of the same ordinal."""
        async with self._changed:
            self._taken.pop(ordinal, None)
            self._waiting[ordinal] = item
            self._changed.notify_all()

    async def take(self, reader: str, most: int, wait_s: float) -> list[Item]:
        """Up to `most` groups, in the order in which they finished; an empty list if none finishes
        within `wait_s` seconds.

        Raises:
            OutboxClosedError: the outbox is closed, or another reader has replaced this one.
        """
        async with self._changed:
            self._announce(reader)
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(
                        lambda: self._waiting or self._closed or reader != self._reader
                    )
            except TimeoutError:
                return []
            if self._closed or reader != self._reader:
                raise OutboxClosedError(
                    "closed" if self._closed else f"reader {reader} was replaced by {self._reader}"
                )
            ordinals = list(self._waiting)[:most]
            for ordinal in ordinals:
                self._taken[ordinal] = self._waiting.pop(ordinal)
            return [self._taken[ordinal] for ordinal in ordinals]

    async def ack(self, ordinals: Iterable[int]) -> None:
        """Forget these groups, taken or not. Unknown ordinals are ignored, since an acknowledgment
        may come twice."""
        async with self._changed:
            for ordinal in ordinals:
                self._taken.pop(ordinal, None)
                self._waiting.pop(ordinal, None)

    async def close(self) -> None:
        """End all takes."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _announce(self, reader: str) -> None:
        if reader in self._retired:
            raise OutboxClosedError(f"reader {reader} was replaced by {self._reader}")
        if self._reader not in (None, reader):
            self._retired.add(str(self._reader))
            self._waiting = self._taken | self._waiting
            self._taken = {}
            self._changed.notify_all()
        self._reader = reader
