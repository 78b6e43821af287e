"""A loss, an advantage and a group filter written as one's own; the first two give the numbers of
the built-in `ppo` and `grpo`.

--algorithm.loss jobs.own_algorithm:clipped --algorithm.advantage jobs.own_algorithm:standardized
--algorithm.group_filter jobs.own_algorithm:mixed
"""

import torch


def clipped(logprobs, old_logprobs, advantages):
    """PPO's clipped ratio, as `algorithm.loss: ppo` has it."""
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - 0.2, 1 + 0.28) * advantages)
    stopped = ((advantages > 0) & (ratio > 1 + 0.28)) | ((advantages < 0) & (ratio < 1 - 0.2))
    return loss, {"clipped": stopped, "ratio_below_half": ratio < 0.5}


def standardized(rewards):
    """GRPO's advantage, as `algorithm.advantage: grpo` has it."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def mixed(rewards):
    """Only groups with two different rewards are trained, as under
    `algorithm.filter_zero_variance`."""
    return rewards.min() < rewards.max()
