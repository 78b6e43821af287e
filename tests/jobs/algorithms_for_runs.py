"""A user's loss, advantage and group filter, for whole runs."""

import torch


def weighed(logprobs, old_logprobs, behavior_logprobs, advantages, sequence, sequences):
    """REINFORCE with a ratio of at most 2."""
    assert behavior_logprobs.shape == logprobs.shape and int(sequence.max()) < sequences
    ratio = (logprobs - old_logprobs).exp().clamp(max=2.0)
    return -ratio * advantages, {"clipped": ratio >= 2.0, "halved": torch.full_like(ratio, 0.5)}


def doubled(rewards):
    return 2 * (rewards - rewards.mean())


def unequal(rewards, lengths, **others):
    return len(lengths) == len(rewards) and rewards.min() < rewards.max()
