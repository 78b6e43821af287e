"""Advantages of single turns of sessions, from the rewards of turns. Uses numpy and no torch,
because scoring workers import it."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.algorithms.advantages.group_advantage import (
    GroupAdvantage,
    TurnRewards,
    group_advantages,
)


def turn_credits(rewards: Sequence[float | None], gamma: float) -> list[float | None]:
    """Return the credit of each turn of a session: its reward plus gamma times the credit of the
    next turn. So 0 leaves its own reward, and 1 adds all rewards up to the end. These are the
    discounted returns of GiGPO (arXiv:2505.10978, section 3.3).

    A turn without a reward passes on what follows it. It has no credit (None) if nothing does.

    Example:
        turn_credits([1.0, None, 4.0], 0.5) == [2.0, 2.0, 4.0]
    """
    found: list[float | None] = [None]
    for reward in reversed(rewards):
        after = found[-1] if gamma > 0 else None
        found.append(reward if after is None else (reward or 0.0) + gamma * after)
    return found[:0:-1]


def turn_advantages(
    rewards: Sequence[Sequence[float | None]],
    advantages: Sequence[float | None],
    usable: Sequence[bool],
    advantage: GroupAdvantage,
    turns: TurnRewards,
) -> list[list[float] | None]:
    """Return the advantage of each turn of the sessions of one group; None for a session that is
    not usable.

    Turn k of session i has A_i + coef · C_ik. C_ik is its credit as the advantage
    compares it with those of turn k of the other usable sessions: for grpo,
    (c_ik - mean) / (std + 1e-6). A turn without a credit has C_ik = 0, and so has one without a
    counterpart. The sum is that of MT-GRPO (arXiv:2505.11821) and of GiGPO (arXiv:2505.10978, eq.
    8), and MT-GRPO compares turns of the same number.

    Args:
        rewards: of the turns of each session, in order. Lengths may differ.
        advantages: of the sessions.
        usable: whether a session is trained. Others have no part in the statistics.

    Example:
        turns = TurnRewards(coef=1)
        turn_advantages([[1.0, 0.0], [0.0]], [0.5, -0.5], [True, True], DrGrpo(), turns)
        == [[1.0, 0.5], [-1.0]]
    """
    credits = [turn_credits(of_session, turns.gamma) for of_session in rewards]
    found = [
        [float(of_session or 0.0)] * len(of_turns) if use else None
        for of_turns, of_session, use in zip(rewards, advantages, usable, strict=True)
    ]
    for number in range(max(map(len, credits), default=0)):
        at = [of_turns[number] if number < len(of_turns) else None for of_turns in credits]
        counted = [use and credit is not None for use, credit in zip(usable, at, strict=True)]
        compared = group_advantages(at, counted, advantage)
        for session, term in zip(found, compared, strict=True):
            if session is not None and term is not None:
                session[number] += turns.coef * term
    return found
