"""Metrics of a step's batch: staleness, rewards and lengths. Pure functions.
`asyncrl/observe/metrics.yaml` explains each name."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from asyncrl.contracts.messages import Scored
from asyncrl.contracts.nodes import FORKED, REPEATED, SEPARATE
from asyncrl.contracts.outcomes import NO_BASELINE
from asyncrl.contracts.rows import SESSION_ENDS

MASKED = ("unscored", "bad_logprob", "over_long", "no_token", "no_teacher")
"""Statuses of trajectories that are not trained. Sessions have more: see SESSION_ENDS."""


def batch_metrics(
    batch: Sequence[Scored], version: int, staleness: Sequence[int], max_staleness: int
) -> dict[str, float | list[int]]:
    """Metrics of the batch that the learner trained at `version`. Means of rewards are over usable
    trajectories, means of lengths over all trajectories, and other means over groups.

    Args:
        staleness: of each group, in versions.
    """
    counted = Counter(staleness)
    rewards = [reward for scored in batch for reward in scored.rewards]
    completions = _trajectories(batch)
    metrics: dict[str, float | list[int]] = {
        "staleness/mean": sum(staleness) / len(batch),
        "staleness/max": max(staleness),
        "staleness/histogram": [counted[age] for age in range(max_staleness + 1)],
        "staleness/in_flight_mean": (
            sum(scored.newest - scored.oldest_version for scored in batch) / len(batch)
        ),
        "staleness/in_buffer_mean": sum(version - scored.newest for scored in batch) / len(batch),
        "reward/mean": sum(rewards) / len(rewards),
        "reward/std": statistics.pstdev(rewards),
        **_quantiles("reward/", rewards),
        "rollout/completion_tokens": sum(scored.tokens for scored in batch) / completions,
        **_quantiles(
            "rollout/completion_tokens_", [length for scored in batch for length in scored.lengths]
        ),
        "rollout/truncated_ratio": sum(scored.truncated for scored in batch) / completions,
    }
    for name in dict.fromkeys(name for scored in batch for name in scored.reward_parts):
        known = [scored.reward_parts[name] for scored in batch if name in scored.reward_parts]
        metrics[f"reward/{name}"] = sum(known) / len(known)
    return (
        metrics
        | _by_source(batch)
        | _reference_age(batch, version)
        | _baselines(batch)
        | _session_tokens(batch, version - max_staleness)
    )


def _quantiles(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """The smallest and largest value, and the 10%, 50% and 90% quantiles, each a value that
    occurs. Empty without values."""
    ordered = sorted(values)
    shares = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}
    return {
        f"{prefix}{name}": float(ordered[max(0, math.ceil(share * len(ordered)) - 1)])
        for name, share in (shares.items() if ordered else ())
    }


def _session_tokens(batch: Sequence[Scored], oldest_version: int) -> dict[str, float | list[int]]:
    """What became of the sampled tokens of a step's sessions. The parts add up to the total. Empty
    without an environment.

    Args:
        oldest_version: tokens of earlier versions are not trained.
    """
    known = [scored.sessions for scored in batch if scored.sessions is not None]
    if not known:
        return {}
    tokens: Counter[str] = Counter()
    for sessions in known:
        tokens.update(sessions.tokens)
    stale = sum(
        count
        for scored in batch
        for version, count in zip(scored.versions, scored.loss_tokens, strict=True)
        if version < oldest_version
    )
    if stale:
        tokens.update(stale=stale, trained=-stale)
    return {
        "session/repeated_tokens": sum(sessions.repeated for sessions in known),
        "session/tokens_sampled": tokens.total(),
        "session/tokens_trained": tokens.pop("trained", 0),
        **{f"session/tokens_{reason}": count for reason, count in sorted(tokens.items())},
    }


def _baselines(batch: Sequence[Scored]) -> dict[str, float | list[int]]:
    """Means over the groups' baselines. Empty without baselines."""
    known = [scored.baseline for scored in batch if scored.baseline is not None]
    rewards = [baseline.reward for baseline in known if baseline.reward is not None]
    if not rewards:
        return {}
    return {
        "baseline/reward": sum(rewards) / len(rewards),
        "baseline/tokens": sum(baseline.tokens for baseline in known) / len(known),
        "baseline/truncated_ratio": sum(baseline.truncated for baseline in known) / len(known),
    }


def _reference_age(batch: Sequence[Scored], version: int) -> dict[str, float | list[int]]:
    """How old the reference policy was that scored the groups. Empty without one."""
    known = [scored.reference_version for scored in batch if scored.reference_version is not None]
    return {"reference/age_mean": version - sum(known) / len(known)} if known else {}


def _by_source(batch: Sequence[Scored]) -> dict[str, float | list[int]]:
    """Each data source's share of the groups, and the mean reward of its usable trajectories."""
    metrics: dict[str, float | list[int]] = {}
    for source in sorted({scored.source for scored in batch if scored.source is not None}):
        groups = [scored for scored in batch if scored.source == source]
        rewards = [reward for scored in groups for reward in scored.rewards]
        metrics[f"source/{source}_share"] = len(groups) / len(batch)
        metrics[f"source/{source}_reward"] = sum(rewards) / len(rewards) if rewards else math.nan
    return metrics


def scoring_metrics(arrived: Sequence[Scored]) -> dict[str, float]:
    """Metrics of all groups that were scored since the previous step, including those that were
    filtered or dropped. NaN if there are none."""
    trajectories = _trajectories(arrived)
    zero_variance = sum(scored.equal_rewards for scored in arrived)
    counts = {status: sum(scored.masked.get(status, 0) for scored in arrived) for status in MASKED}
    shares = {
        f"rollout/{status}_ratio": count / trajectories if trajectories else math.nan
        for status, count in counts.items()
    }
    names = dict.fromkeys(name for scored in arrived for name in scored.unscored)
    unscored = {
        name: (
            sum(scored.unscored.get(name, 0) for scored in arrived) / trajectories
            if trajectories
            else math.nan
        )
        for name in names
    }
    for name, share in unscored.items():
        function, _, reason = name.partition("/")
        measure = f"{reason or 'unscored'}_ratio"
        shares[f"reward/{function}/{measure}"] = share
        shares[f"reward/{measure}"] = max(share, shares.get(f"reward/{measure}", share))
    compared = [scored for scored in arrived if scored.baseline is not None]
    if compared:
        missing = sum((scored.failure or "").startswith(NO_BASELINE) for scored in compared)
        shares["baseline/missing_ratio"] = missing / len(compared)
    return (
        shares
        | _sessions(arrived)
        | {"reward/zero_variance_ratio": zero_variance / len(arrived) if arrived else math.nan}
        | _signs_of_gibberish(arrived, trajectories)
    )


def _sessions(arrived: Sequence[Scored]) -> dict[str, float]:
    """How sessions ended, their turns, and their time. Empty without an environment."""
    known = [scored.sessions for scored in arrived if scored.sessions is not None]
    count = sum(sum(sessions.ends.values()) for sessions in known)
    if not count:
        return {}
    turns = sum(sessions.turns for sessions in known)
    rewarded = sum(sessions.rewarded_turns for sessions in known)
    turn_rewards = sum(sessions.turn_reward for sessions in known)
    reusable = sum(sessions.reusable for sessions in known)
    branches: Counter[str] = Counter()
    for sessions in known:
        branches.update(sessions.branches)
    leaving = branches.total() - sum(branches[one] for one in (FORKED, REPEATED, SEPARATE))
    hits = sum(sessions.cached for sessions in known) / reusable if reusable else math.nan
    return {
        **{
            f"session/{end}_ratio": sum(sessions.ends.get(end, 0) for sessions in known) / count
            for end in SESSION_ENDS
        },
        "session/turns": turns / count,
        "session/unasked_ratio": sum(sessions.unasked for sessions in known) / count,
        "session/branch_ratio": leaving / max(1, turns),
        **{f"session/branches_{name}": count for name, count in sorted(branches.items())},
        "session/unparsed_ratio": sum(sessions.unparsed for sessions in known) / max(1, turns),
        "session/overridden": sum(sessions.overridden for sessions in known) / count,
        "session/prefix_hit_ratio": hits,
        "session/model_s": sum(sessions.model_s for sessions in known) / count,
        "session/other_s": sum(sessions.other_s for sessions in known) / count,
        **({"session/turn_reward": turn_rewards / rewarded} if rewarded else {}),
    }


def _signs_of_gibberish(arrived: Sequence[Scored], trajectories: int) -> dict[str, float]:
    tokens, characters = (
        sum(scored.tokens for scored in arrived),
        sum(scored.characters for scored in arrived),
    )
    return {
        "rollout/logprob_mean": (
            sum(scored.logprob_sum for scored in arrived) / tokens if tokens else math.nan
        ),
        "rollout/loop_ratio": (
            sum(scored.looping for scored in arrived) / trajectories if trajectories else math.nan
        ),
        "rollout/unprintable_ratio": (
            sum(scored.unprintable for scored in arrived) / characters if characters else math.nan
        ),
    }


def _trajectories(groups: Sequence[Scored]) -> int:
    return sum(scored.usable + sum(scored.masked.values()) for scored in groups)
