"""The loss of a reward model: a pure function of the scores of both sides of a pair."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(chosen: Tensor, rejected: Tensor, center_coef: float) -> Tensor:
    """Return the loss [B] of B pairs: -log σ(chosen - rejected) + c·(chosen + rejected)².

    The first term is the Bradley-Terry model as in InstructGPT (arXiv:2203.02155, eq. 1). It only
    sees differences, so the second term keeps scores around 0 (Eisenstein et al. 2023,
    arXiv:2312.09244), with c = center_coef. It is TRL's `center_rewards_coefficient`.

    Args:
        chosen, rejected: [B] scores.
    """
    chosen, rejected = chosen.double(), rejected.double()
    return -logsigmoid(chosen - rejected) + center_coef * (chosen + rejected).square()
