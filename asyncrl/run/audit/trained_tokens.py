"""Recomputes the tokens that a step trained, from the rows of its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asyncrl.algorithms.pairs import choose_pairs, shuffled_rewards
from asyncrl.run.audit.books import Books, OutcomeRow, trained_at
from asyncrl.rundir.audited_rows import Row


def trained_tokens(books: Books, batch: Sequence[tuple[OutcomeRow, Row]]) -> int:
    """Return the loss tokens that the step on these trained groups counted.

    A policy step trains every trajectory with status ok, without the tokens that `on_stale: mask`
    masks. A step of online DPO trains the pairs that the rewards give, and counts a trajectory once
    for each of its pairs. A resume cannot change the settings of pairs, so those of the last
    attempt hold for all.
    """
    config = books.run.config
    preference = config.algorithm.preference
    if preference is None:
        return sum(row.loss_tokens(books.oldest_allowed(outcome) or 0) for outcome, row in batch)
    # The order in which the buffer gives groups to the learner decides how rewards are shuffled.
    ordered = sorted(batch, key=lambda item: (item[1].oldest or 0, item[1].ordinal))
    groups = [row.candidates for _, row in ordered]
    if config.reward.shuffle:
        rewards = shuffled_rewards(
            [group.rewards for group in groups],
            [group.usable for group in groups],
            (config.seed, trained_at(batch[0][0])),
        )
        groups = [
            replace(group, rewards=drawn) for group, drawn in zip(groups, rewards, strict=True)
        ]
    return sum(
        row.losses[index]
        for (_, row), group in zip(ordered, groups, strict=True)
        for pair in choose_pairs(group, preference.pairs)
        for index in pair
    )
