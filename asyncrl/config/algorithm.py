"""What a run with generators trains: a policy gradient, or the pairs of online DPO."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from asyncrl.algorithms.advantages import Advantage
from asyncrl.algorithms.advantages.group_advantage import TurnRewards
from asyncrl.algorithms.advantages.grpo import Grpo
from asyncrl.algorithms.corrections import Correction
from asyncrl.algorithms.losses import Loss
from asyncrl.algorithms.losses.ppo import Ppo
from asyncrl.algorithms.pairs import BestWorst, Pairs
from asyncrl.algorithms.preference_losses import OnlinePairLoss, Sigmoid
from asyncrl.algorithms.references import FrozenPolicy, KlInReward, KlTerm, Reference
from asyncrl.config.distillation import DistillationConfig, TeacherKl, TeacherModel
from asyncrl.contracts.section import ByKey, Section, Short
from asyncrl.runtime.functions import FUNCTION


class GroupFilter(Section):
    """Your own function that decides whether a scored group is trained."""

    name: str = Field(pattern=FUNCTION)
    """`package.module:function`, importable in a new process."""
    arguments: dict[str, Any] = Field(default={})
    """Keyword arguments of the function, in addition to those that asyncrl passes."""


class _Algorithm(Section):
    """What both kinds have."""

    filter_zero_variance: bool = False
    """Leave out groups whose rewards are all equal, and admit new groups instead (DAPO's dynamic
    sampling). With advantage: remax, the baseline's reward is one of them."""
    group_filter: Annotated[GroupFilter, Short("name")] | None = None
    """Your own function, as `package.module:function`, that decides whether a scored group is
    trained. New groups are admitted for those left out."""
    allow_uncorrected: bool = False
    """Allow an uncorrected loss on stale tokens."""


class NextToken(Section):
    """The next-token loss on the step's completions with a high reward, a mean over all their
    tokens. VAPO uses 0.1 (arXiv:2504.05118)."""

    coef: float = Field(gt=0)
    """Weight of the loss."""
    min_reward: float = 1.0
    """Least reward of a completion."""


class PolicyGradient(_Algorithm):
    """A policy gradient on rewards, on a teacher, or on both."""

    advantage: Advantage = Grpo()
    """How rewards become advantages. Or your own function, as `package.module:function`
    (docs/how_to/own_algorithm.md)."""
    loss: Loss = Ppo()
    """The loss of a token. Or your own function, as `package.module:function`."""
    loss_aggregation: Literal[
        "token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed"
    ] = "token_mean"
    """`token_mean`: mean over the step's tokens. `sequence_mean_token_sum`: mean over trajectories
    of their token sums. `sequence_mean_token_mean`: mean over trajectories of their token means.
    `fixed`: token sums divided by max_completion_length (Dr. GRPO)."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Bonus for the entropy of each token's distribution, in units of the loss per nat."""
    ce: Annotated[NextToken, Short("coef")] | None = None
    """A next-token loss on the step's best completions: its weight, or a mapping with coef and
    min_reward. None = none."""
    reference: Reference | None = None
    """A KL term with a frozen reference policy: `kl_loss_coef`, in the loss, or `kl_coef`, in the
    reward. None = no reference policy."""
    correction: Correction = Correction()
    distillation: DistillationConfig | None = None
    """On-policy distillation from a teacher, alone or in addition to rewards. Experimental, except
    with `use: top_k`. None = no teacher."""

    @property
    def kl(self) -> KlTerm | None:
        """The KL term with the reference policy or the teacher."""
        if self.distillation is not None:
            return (
                self.distillation.use.kl if isinstance(self.distillation.use, TeacherKl) else None
            )
        return self.reference

    @property
    def kl_coef(self) -> float:
        """How much the KL divergence lowers the reward, per nat."""
        return self.kl.kl_coef if isinstance(self.kl, KlInReward) else 0.0

    @property
    def frozen(self) -> FrozenPolicy | TeacherModel | None:
        """The frozen policy that the run loads."""
        if self.distillation is None:
            return self.reference
        teacher = self.distillation.teacher
        return teacher if isinstance(teacher, TeacherModel) else None

    @property
    def has_reference(self) -> bool:
        """Whether training needs the log-probs of a frozen policy. With distillation, that is the
        teacher."""
        return self.reference is not None or self.distillation is not None

    @property
    def update_interval(self) -> int | None:
        """Versions between two refreshes of the reference policy. None = it stays frozen."""
        return None if self.reference is None else self.reference.update_interval

    @property
    def preference(self) -> None:
        """Pairs are not trained."""
        return None

    @property
    def turn_rewards(self) -> TurnRewards | None:
        """How rewards of turns act; None = they are only measured."""
        return self.advantage.turn_rewards

    @property
    def uses_rewards(self) -> bool:
        """Whether rewards are trained, and not only measured."""
        return self.distillation is None or self.distillation.reward_weight > 0

    @property
    def compares_siblings(self) -> bool:
        """Whether a trajectory's advantage depends on the other trajectories of its group."""
        return self.uses_rewards and self.advantage.compares_siblings

    @property
    def compares_sequences(self) -> bool:
        """Whether the loss of a token may depend on the other tokens of its trajectory."""
        return self.loss.compares_sequences or self.correction.compares_sequences

    @property
    def needs_baseline(self) -> bool:
        """Whether each group needs the prompt's greedy completion."""
        return self.advantage.needs_baseline

    @property
    def needs_whole_groups(self) -> str | None:
        """The setting that compares whole completions of a group, so that none of their tokens can
        be masked; None without."""
        return f"algorithm.advantage: {self.advantage.name}" if self.needs_baseline else None

    @property
    def token_advantages(self) -> str | None:
        """The setting that gives each token its own advantage; None if none does."""
        if self.advantage.of_each_token:
            return f"advantage: {self.advantage.name}"
        if self.turn_rewards is not None:
            return "advantage.turns"
        adds = self.distillation is not None and self.distillation.adds_advantage
        return "distillation.use: advantage" if adds else None

    @property
    def corrected(self) -> bool:
        """Whether every token's gradient includes a function of π_learner / π_behavior."""
        return self.loss.old_policy == "behavior" or self.correction.truncation is not None

    @property
    def compares_behavior(self) -> str | None:
        """The part of the objective that compares the generator's log-probs with others; None if
        there is none."""
        if self.distillation is not None and self.distillation.adds_advantage:
            return "the teacher's advantage"
        if self.distillation is not None and self.distillation.top_k:
            return "the metric distill/reverse_kl"
        if self.loss.old_policy != "learner":
            return f"the ratio of loss: {self.loss.name} against old_policy: {self.loss.old_policy}"
        if self.correction.acts:
            return "the correction"
        return "the KL term" if self.has_reference else None

    @model_validator(mode="after")
    def parts_fit_together(self) -> PolicyGradient:
        _check_parts(self)
        return self


def _check_parts(algorithm: PolicyGradient) -> None:
    """Raise ValueError for the first rule that does not hold. Messages begin with a setting of
    `algorithm`."""
    if algorithm.distillation is not None:
        _check_distillation(algorithm, algorithm.distillation)
    _check_correction(algorithm)
    _check_token_advantages(algorithm)
    _check_kl_in_reward(algorithm)
    _check_filter(algorithm)


def _check_correction(algorithm: PolicyGradient) -> None:
    loss, truncation = algorithm.loss, algorithm.correction.truncation
    if truncation is not None and loss.old_policy == "behavior":
        has_it = "old_policy" in type(loss).model_fields
        way = (
            f"write loss: {{name: {loss.name}, old_policy: learner}}"
            if has_it
            else "use a loss with old_policy: learner, such as ppo or reinforce"
        )
        raise ValueError(
            f"correction.truncation: {truncation.level} with old_policy: behavior of loss:"
            f" {loss.name} would count the behavior policy twice; leave it out, or {way}"
        )
    if algorithm.allow_uncorrected and algorithm.corrected:
        raise ValueError(
            "allow_uncorrected: true only has an effect with an uncorrected loss; leave it out"
        )


def _check_token_advantages(algorithm: PolicyGradient) -> None:
    setting = algorithm.token_advantages
    if algorithm.loss.needs_one_advantage:
        needs = f"loss: {algorithm.loss.name}"
    elif algorithm.correction.sequence_mask is not None:
        needs = "algorithm.correction.sequence_mask"
    else:
        return
    if setting is not None:
        raise ValueError(
            f"{setting} gives each token an advantage of its own, and {needs} needs one per"
            " trajectory; leave one of them out"
        )


def _check_kl_in_reward(algorithm: PolicyGradient) -> None:
    advantage, kl_coef = algorithm.advantage, algorithm.kl_coef
    if not kl_coef:
        return
    setting = f"{_kl_section(algorithm)}.kl_coef"
    if advantage.no_kl_in_reward:
        raise ValueError(
            f"{setting} = {kl_coef:g} does not work with advantage: {advantage.name}."
            f" {advantage.no_kl_in_reward}"
        )
    if advantage.no_penalties:
        raise ValueError(
            f"{setting} = {kl_coef:g} lowers rewards, and advantage: {advantage.name}"
            f" {advantage.no_penalties}; use kl_loss_coef"
        )


def _kl_section(algorithm: PolicyGradient) -> str:
    return "reference" if algorithm.distillation is None else "distillation.use.kl"


def _check_filter(algorithm: PolicyGradient) -> None:
    if not algorithm.filter_zero_variance:
        return
    if algorithm.advantage.learns_from_equal:
        raise ValueError(
            f"filter_zero_variance drops groups that advantage: {algorithm.advantage.name} learns"
            " from; leave one of them out"
        )
    if algorithm.turn_rewards is not None:
        raise ValueError(
            "filter_zero_variance drops groups in which only the turns of advantage.turns differ;"
            " leave one of them out"
        )
    if algorithm.kl_coef:
        raise ValueError(
            f"filter_zero_variance has no effect with {_kl_section(algorithm)}.kl_coef, which makes"
            " all rewards different; use kl_loss_coef, or leave one of them out"
        )


def _check_distillation(algorithm: PolicyGradient, distillation: DistillationConfig) -> None:
    """The teacher replaces the reference policy. Without reward_weight, rewards are only
    measured, so settings of their advantage do nothing."""
    if algorithm.reference is not None:
        raise ValueError(
            "reference has no effect with algorithm.distillation, whose teacher replaces the"
            " reference policy; leave it out, or write"
            " algorithm: {distillation: {use: {name: ref_kl, kl: {kl_loss_coef: …}}}}"
        )
    if algorithm.uses_rewards:
        return
    default = type(algorithm)()
    for name in ("loss", "correction") if distillation.top_k else ():
        if getattr(algorithm, name) != getattr(default, name):
            raise ValueError(
                f"{name} has no effect with algorithm.distillation.use: top_k and"
                " reward_weight = 0: the divergence is no policy loss; leave it out, or set"
                " reward_weight: 1"
            )
    for name in ("advantage", "filter_zero_variance"):
        if getattr(algorithm, name) != getattr(default, name):
            raise ValueError(
                f"{name} has no effect with algorithm.distillation.reward_weight = 0, which only"
                " measures rewards; leave it out, or set reward_weight: 1"
            )
    if algorithm.kl_coef:
        raise ValueError(
            f"distillation.use.kl.kl_coef = {algorithm.kl_coef:g} has no effect with"
            " reward_weight = 0, which only measures rewards; use kl_loss_coef"
        )


class OnlinePreferenceConfig(Section):
    """Asynchronous online DPO: pairs of a group's completions replace advantages."""

    loss: OnlinePairLoss = Sigmoid()
    """Loss of a pair."""
    pairs: Pairs = BestWorst()
    """Which pairs of a group are trained."""
    weight_cap: float | None = Field(default=2.0, ge=1)
    """Weight each pair by min(π_learner / π_behavior of both completions, weight_cap), for tokens
    that an older version sampled. None = no weight, which max_staleness above 1 refuses unless
    algorithm.allow_uncorrected is set."""
    ce_coef: float = Field(default=0.0, ge=0)
    """Weight of the next-token loss on the chosen sides, a mean over their tokens (RPO,
    arXiv:2404.19733)."""


class PreferenceTraining(_Algorithm):
    """Online DPO instead of a policy gradient."""

    KEY: ClassVar[str] = "preference"

    preference: OnlinePreferenceConfig
    """Online DPO: pairs of a group's completions replace advantages. `preference: {}` takes the
    defaults."""
    reference: FrozenPolicy = FrozenPolicy()
    """The reference policy of the pairs."""

    distillation: ClassVar[None] = None
    kl: ClassVar[None] = None
    turn_rewards: ClassVar[None] = None
    kl_coef: ClassVar[float] = 0.0
    entropy_coef: ClassVar[float] = 0.0
    ce: ClassVar[None] = None
    has_reference: ClassVar[bool] = True
    uses_rewards: ClassVar[bool] = True
    compares_siblings: ClassVar[bool] = True
    compares_sequences: ClassVar[bool] = False
    needs_baseline: ClassVar[bool] = False
    needs_whole_groups: ClassVar[str | None] = "algorithm.preference"
    token_advantages: ClassVar[str | None] = None

    @property
    def frozen(self) -> FrozenPolicy:
        """The frozen policy that the run loads."""
        return self.reference

    @property
    def update_interval(self) -> int | None:
        """Versions between two refreshes of the reference policy. None = it stays frozen."""
        return self.reference.update_interval

    @property
    def corrected(self) -> bool:
        """Whether each pair has an off-policy weight."""
        return self.preference.weight_cap is not None

    @property
    def compares_behavior(self) -> str | None:
        """See `PolicyGradient.compares_behavior`."""
        return "preference.weight_cap" if self.corrected else None

    @model_validator(mode="after")
    def uncorrected_pairs_are_meant(self) -> PreferenceTraining:
        if self.allow_uncorrected and self.corrected:
            raise ValueError(
                "allow_uncorrected: true only has an effect with an uncorrected loss; leave it out,"
                " or set preference.weight_cap: null"
            )
        return self

    @model_validator(mode="after")
    def penalties_come_before_pairs(self) -> PreferenceTraining:
        penalty = self.preference.pairs.missing_eos_penalty
        if penalty and self.filter_zero_variance:
            raise ValueError(
                "filter_zero_variance compares rewards without preference.pairs.missing_eos_penalty"
                f" = {penalty:g}, so it would filter groups that give a pair; leave one of them out"
            )
        return self


AlgorithmConfig: TypeAlias = Annotated[PreferenceTraining | PolicyGradient, ByKey()]
