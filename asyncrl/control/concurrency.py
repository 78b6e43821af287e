"""How many groups are generated at once: as many as the engines' KV caches hold, found while
running.

Past that point an engine preempts: it throws the KV cache of a running completion away and computes
it again later, so more at once makes less in the end. Well below it the engine idles. Where the
point lies depends on how long completions are, which changes while a policy learns.
"""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import Any

from asyncrl.contracts.messages import EngineLoad

__all__ = ["Concurrency", "first_limit"]

GROW_BELOW = 0.82
"""Share of the KV cache in use below which more groups may run."""
TRIM_ABOVE = 0.92
CUT = 0.9
"""What remains of the limit after a preemption."""


def first_limit(kv_tokens: int, max_num_seqs: int, samples: int, longest: int) -> float:
    """Groups to begin with: a completion holds half of its tokens on average while it runs, so
    twice as many as fit when each is as long as it may be; and no more than the engines run at
    once, with one group in the queue.

    Args:
        kv_tokens: tokens that the KV caches of all engines hold.
        max_num_seqs: completions that all engines run at once.
        samples: completions of a group.
        longest: tokens of the longest prompt and completion.
    """
    return min(2 * kv_tokens / (samples * longest), max_num_seqs / samples + 1)


class Concurrency:
    """A limit on the groups that run at once, moved by what the engines say with every group they
    finish.

    grow: the limit is what holds groups back, and the cache has room: one more for each group that
    finishes at first, so it doubles in the time that a group takes; once an engine has been full,
    one more for each `limit` groups. trim: the cache is nearly full, or more completions wait in
    the queue than keep the engine full: the finished group is not replaced. cut: a completion was
    preempted: a tenth less, and no further cut until as many groups have finished as then ran,
    since those were admitted under the old limit.
    """

    def __init__(self, first: float, most: int, queue: int = 0, adaptive: bool = True) -> None:
        """
        Args:
            first: groups to begin with.
            most: the limit never exceeds it (the staleness budget, or less).
            queue: completions that may wait in an engine's queue; while some do, the limit does not
                grow.
            adaptive: False = `most`, always.
        """
        self.most, self.queue, self.adaptive = most, queue, adaptive
        self.limit = min(max(first, 1.0), most) if adaptive else float(most)
        self.decisions: Counter[str] = Counter()
        self.loads: dict[str, EngineLoad] = {}
        """What each replica said last; a replica that was replaced has said its last word."""
        self._searching = True
        self._settling = 0
        """Groups that have to finish before the next cut."""

    def may_run(self, running: int) -> bool:
        """Whether another group may be generated."""
        return running < int(self.limit)

    def observe(self, load: EngineLoad, running: int) -> None:
        """Move the limit after a group has finished.

        Args:
            running: groups that ran, the finished one included.
        """
        before = self.loads.pop(load.replica, None)
        self.loads[load.replica] = load
        preempted = load.preemptions > (before.preemptions if before is not None else 0)
        if not self.adaptive:
            return
        self._settling = max(0, self._settling - 1)
        if preempted or load.kv_use > TRIM_ABOVE or load.waiting > self.queue:
            self._searching = False
            if not preempted:
                self._lower("trim", running - 1)
            elif not self._settling:
                self._lower("cut", running * CUT)
                self._settling = running
        elif (
            load.kv_use < GROW_BELOW and not load.waiting and running >= int(self.limit) < self.most
        ):
            self.limit = min(self.limit + (1.0 if self._searching else 1.0 / self.limit), self.most)
            self.decisions["grow"] += 1

    @property
    def preemptions(self) -> int:
        """Of all engines so far."""
        return sum(load.preemptions for load in self.loads.values())

    def metrics(self) -> dict[str, Any]:
        """The limit, the decisions so far, what all engines have lost so far, and how the one is
        that spoke last."""
        found: dict[str, Any] = {
            "control/concurrency": int(self.limit),
            "control/preemptions": self.preemptions,
        }
        found |= {
            f"control/concurrency_{decision}": self.decisions[decision]
            for decision in ("grow", "trim", "cut")
        }
        aborted = [
            sum(counts)
            for counts in zip_longest(*(load.aborted for load in self.loads.values()), fillvalue=0)
        ]
        found |= {"control/aborted_completions": sum(aborted), "control/aborted_by_length": aborted}
        found["control/aborted_tokens"] = sum(load.aborted_tokens for load in self.loads.values())
        if self.loads:
            last = next(reversed(self.loads.values()))
            found |= {"control/kv_use": last.kv_use, "control/engine_waiting": last.waiting}
        return found

    def _lower(self, decision: str, limit: float) -> None:
        self.limit = max(1.0, min(self.limit, limit))
        self.decisions[decision] += 1
