"""A limit on how many groups are generated at once. It adapts until the engines' KV caches are
nearly full.

With more groups, an engine preempts: it discards the KV cache of a running completion and computes
it again later, so throughput falls. With far fewer, the engine idles. The best limit depends on how
long completions are, which changes while a policy learns.
"""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest

from asyncrl.contracts.messages import EngineLoad

GROW_BELOW = 0.82
"""The limit grows while the share of the KV cache in use is below this."""
TRIM_ABOVE = 0.92
"""The limit falls while the share of the KV cache in use is above this."""
CUT = 0.9
"""Factor on the running groups that gives the limit after a preemption."""


def first_limit(kv_tokens: int, max_num_seqs: int, samples: int, longest: int) -> float:
    """Return the limit to start with.

    While a completion runs, it holds half of its tokens on average. So twice as many groups fit as
    would fit at full length. The engines must also be able to run them all, except for one group in
    the queue.

    Args:
        kv_tokens: tokens that fit in the KV caches of all engines.
        max_num_seqs: completions that all engines together run at once.
        samples: completions of a group.
        longest: tokens of the longest prompt plus completion.
    """
    return min(2 * kv_tokens / (samples * longest), max_num_seqs / samples + 1)


class Concurrency:
    """A limit on the groups that run at once. Each finished group reports the load of its engine,
    and the limit moves in one of three ways.

    - grow: the cache has room and as many groups run as the limit allows. At first the limit grows
      by one for each finished group, so it doubles in the time that a group takes. Once an engine
      has been full, it grows by one for each `limit` finished groups.
    - trim: the cache is nearly full, or too many completions wait in the engine's queue. The
      finished group is not replaced.
    - cut: the engine has preempted a completion. The limit falls by a tenth. The next cut comes
      only after all groups that ran then have finished, because the old limit admitted them.
    """

    def __init__(self, first: float, most: int, queue: int = 0, adaptive: bool = True) -> None:
        """
        Args:
            first: the limit at the start.
            most: an upper bound on the limit (the staleness budget, or less).
            queue: completions that may wait in an engine's queue before the limit falls. While any
                wait, it does not grow.
            adaptive: whether the limit moves; if not, it is `most`.
        """
        self.most, self.queue, self.adaptive = most, queue, adaptive
        self.limit = min(max(first, 1.0), most) if adaptive else float(most)
        self.decisions: Counter[str] = Counter()
        self.loads: dict[str, EngineLoad] = {}
        """The last report of each replica, in order of arrival. Reports of replaced replicas stay
        here, so that their counts are not lost."""
        self._searching = True
        """Whether no engine has been full yet."""
        self._settling = 0
        """Groups that must finish before the next cut."""

    def may_run(self, running: int) -> bool:
        """Whether another group may be generated."""
        return running < int(self.limit)

    def observe(self, load: EngineLoad, running: int) -> None:
        """Move the limit after a group has finished.

        Args:
            running: groups that ran, including the finished one.
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
        """Preemptions of all engines so far."""
        return sum(load.preemptions for load in self.loads.values())

    def metrics(self) -> dict[str, object]:
        """Return the limit, the decisions so far, the losses of all engines so far, and the load of
        the engine that reported last."""
        found: dict[str, object] = {
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
