"""What a step's batch says about the run: staleness, rewards, lengths. Pure; names are explained in docs/metrics.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from asyncrl.control.protocols import Scored

__all__ = ["batch_metrics"]


def batch_metrics(batch: Sequence[Scored], version: int, max_staleness: int) -> dict[str, float | list[int]]:
    """Metrics of the batch that the learner trained at `version`. Means are over groups, those of rewards over usable trajectories, those of
    lengths over all."""
    staleness = [version - scored.begun for scored in batch]
    counted = Counter(staleness)
    rewards = [reward for scored in batch for reward in scored.rewards]
    masked: Counter[str] = Counter()
    for scored in batch:
        masked.update(scored.masked)
    completions = sum(scored.usable for scored in batch) + sum(masked.values())
    metrics: dict[str, float | list[int]] = {
        "staleness/mean": sum(staleness) / len(batch),
        "staleness/max": max(staleness),
        "staleness/histogram": [counted[age] for age in range(max_staleness + 1)],
        "staleness/in_flight_mean": sum(scored.newest - scored.begun for scored in batch) / len(batch),
        "staleness/in_buffer_mean": sum(version - scored.newest for scored in batch) / len(batch),
        "reward/mean": sum(rewards) / len(rewards),
        "reward/zero_variance_ratio": sum(len(set(scored.rewards)) == 1 for scored in batch) / len(batch),
        "rollout/completion_tokens": sum(scored.tokens for scored in batch) / completions,
        "rollout/truncated_ratio": sum(scored.truncated for scored in batch) / completions,
    }
    for name in dict.fromkeys(name for scored in batch for name in scored.reward_parts):
        known = [scored.reward_parts[name] for scored in batch if name in scored.reward_parts]
        metrics[f"reward/{name}"] = sum(known) / len(known)
    return metrics | {f"rollout/{status}_ratio": count / completions for status, count in masked.items()}
