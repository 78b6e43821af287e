"""The losses of preferences, each with its settings. This module imports no torch.

A score is a completion's log-ratio of learner to reference policy, see `algorithms.preference`. d
is the chosen side's score minus the rejected side's, and the logit is beta·d.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from asyncrl.contracts.section import ByName, Section

if TYPE_CHECKING:
    from torch import Tensor


class _Preference(Section):
    """What every loss of preferences has."""

    has_reference: ClassVar[bool] = True
    """Whether the loss compares with a reference policy."""

    beta: float = Field(default=0.1, gt=0, le=1000)
    """Strength of the reference: a small beta lets the policy move further from it."""

    @property
    def uses_means(self) -> bool:
        """Whether a completion's score is a mean over its tokens, not a sum."""
        return False


class _OfPairs(_Preference):
    """A loss of pairs."""

    def of_pairs(self, difference: Tensor) -> Tensor:
        """Return the loss [B] of pairs with these differences d [B]."""
        raise NotImplementedError


class Sigmoid(_OfPairs):
    """DPO (arXiv:2305.18290)."""

    name: Literal["sigmoid"] = "sigmoid"
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs with swapped labels."""
    length_normalized: bool = False
    """Use the mean instead of the sum of a side's log-probs."""

    @property
    def uses_means(self) -> bool:
        return self.length_normalized

    def of_pairs(self, difference: Tensor) -> Tensor:
        """-log σ(beta·d) (eq. 7). With label smoothing e, the labels are swapped with probability
        e: -(1 - e)·log σ(beta·d) - e·log σ(-beta·d) (conservative DPO, Mitchell 2023)."""
        return smoothed(self.beta * difference, self.label_smoothing)


class Ipo(_OfPairs):
    """IPO (arXiv:2310.12036), with mean log-probs."""

    name: Literal["ipo"] = "ipo"

    @property
    def uses_means(self) -> bool:
        return True

    def of_pairs(self, difference: Tensor) -> Tensor:
        """(d - 1 / (2·beta))² (eq. 17), with means over tokens. Its authors confirmed that, and
        TRL's `ipo` is the same. With sums, the loss would grow with length."""
        return (difference - 1 / (2 * self.beta)).square()


class Hinge(_OfPairs):
    """SLiC (arXiv:2305.10425)."""

    name: Literal["hinge"] = "hinge"
    length_normalized: bool = False
    """Use the mean instead of the sum of a side's log-probs."""

    @property
    def uses_means(self) -> bool:
        return self.length_normalized

    def of_pairs(self, difference: Tensor) -> Tensor:
        """max(0, 1 - beta·d), here on log-ratios to the reference as in RSO (arXiv:2309.06657)."""
        return (1 - self.beta * difference).clamp(min=0)


class Simpo(_OfPairs):
    """Mean log-probs without a reference (arXiv:2405.14734). The paper uses a beta of 2 to 10."""

    name: Literal["simpo"] = "simpo"
    has_reference: ClassVar[bool] = False
    simpo_margin: float = Field(default=0.5, ge=0)
    """Target margin gamma, in units of the logit."""

    @property
    def uses_means(self) -> bool:
        return True

    def of_pairs(self, difference: Tensor) -> Tensor:
        """-log σ(beta·d - margin) (eq. 6)."""
        return smoothed(self.beta * difference - self.simpo_margin, 0.0)


class Kto(_Preference):
    """Of single completions with a label (arXiv:2402.01306). Weights times counts of both labels
    should have a ratio of 1 to 4/3, after the paper."""

    name: Literal["kto"] = "kto"
    desirable_weight: float = Field(default=1.0, gt=0)
    """Weight of completions with label true."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Weight of completions with label false."""


def smoothed(logit: Tensor, smoothing: float) -> Tensor:
    """The logistic loss [B] of labels that are swapped with this probability."""
    from torch.nn.functional import logsigmoid

    loss = -logsigmoid(logit)
    return loss if not smoothing else (1 - smoothing) * loss - smoothing * logsigmoid(-logit)


PairLoss: TypeAlias = Sigmoid | Ipo | Hinge | Simpo
OnlinePairLoss: TypeAlias = Annotated[Sigmoid | Ipo, ByName("sigmoid")]
PreferenceLoss: TypeAlias = Annotated[PairLoss | Kto, ByName("sigmoid")]
