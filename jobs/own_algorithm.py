"""Examples of a custom loss, advantage and group filter. The first two give the same numbers as the
built-in `ppo` and `grpo`.

--algorithm.loss jobs.own_algorithm:clipped --algorithm.advantage jobs.own_algorithm:standardized
--algorithm.group_filter jobs.own_algorithm:mixed
"""

import torch


def clipped(logprobs, old_logprobs, advantages, low=0.2, high=0.28):
    """PPO's clipped ratio, as in `algorithm.loss: ppo`. `low` and `high` can be set as
    `arguments`."""
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    stopped = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
    return loss, {"clipped": stopped, "ratio_below_half": ratio < 0.5}


def standardized(rewards):
    """GRPO's advantage, as in `algorithm.advantage: grpo`."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def mixed(rewards):
    """Keep only groups with two different rewards, as `algorithm.filter_zero_variance` does."""
    return rewards.min() < rewards.max()
