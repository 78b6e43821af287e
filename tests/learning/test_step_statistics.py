"""What a policy step computes over all of its trajectories before it trains: advantages, values
after cut answers, and the tokens that Clip-Cov and KL-Cov select. Two ranks without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from recorded import learner_config, state_without_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.advantages.gae import Gae
from asyncrl.algorithms.advantages.opo import Opo
from asyncrl.algorithms.advantages.remax import ReMax
from asyncrl.algorithms.covariance import covariances, drawn_between, largest
from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.rows import Completion, Group, Prompt, Trajectory, VersionSpan
from asyncrl.learning.examples.batches import examples_of, shuffle_rewards, with_next_token
from asyncrl.learning.steps import policy_step
from asyncrl.models.micro_batches import Example, MicroBatch, micro_batch
from asyncrl.models.policy import load_policy
from benchmarks.families import family

PARTS = ([0, 3], [1], [2])
"""Examples of the first rank's micro-batches and of the second rank's only one."""


class TwoRanks:
    """Stands in for `forward_batches` and the sum over ranks of two data-parallel ranks, or of two
    ranks that share rows. Each call must come in the same order from both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, logprobs: list[Tensor]) -> None:
        self.logprobs, self.sums = logprobs, np.zeros(0)
        monkeypatch.setattr(policy_step, "forward_batches", self.forward)
        monkeypatch.setattr(policy_step, "_sum_over_ranks", self.summed)
        self.parts: tuple[list[int], ...] = ()

    def forward(
        self, state: Any, examples: list[Example]
    ) -> Iterator[tuple[MicroBatch, tuple[Tensor, Tensor, Tensor]]]:
        for indices in self.parts:
            batch = micro_batch(examples, indices, "cpu", version=state.applied)
            logprobs = torch.cat([self.logprobs[index] for index in batch.order])
            yield batch, (logprobs, torch.zeros_like(logprobs), 10 * logprobs)
        empty = micro_batch(examples, [], "cpu")
        yield empty, (torch.zeros(0), torch.zeros(0), torch.zeros(0))

    def summed(self, state: Any, values: np.ndarray) -> np.ndarray:
        self.sums = self.sums + values if self.sums.size else values
        return self.sums

    def selected(self, state: Any, examples: list[Example], *ranks: tuple[list[int], ...]) -> Any:
        """What the last rank selects, when the others have added their part."""
        self.sums = np.zeros(0)
        for parts in ranks:
            self.parts = parts
            found = policy_step._with_selected_tokens(state, examples)
        return [example.selected for example in found]


def example(loss_mask: list[int], advantage: float, behavior: float = -1.0) -> Example:
    count = len(loss_mask)
    return Example(
        tokens=np.arange(2 + count),
        prompt_length=2,
        loss_mask=np.array(loss_mask, dtype=bool),
        behavior_logprobs=np.full(count, behavior, dtype=np.float32),
        advantage=advantage,
        versions=np.zeros(count, dtype=np.int32),
    )


EXAMPLES = [
    example([1, 0, 1], 1.0),
    example([1, 1], -1.0),
    example([0, 1, 1, 1], 0.5),
    example([1], 2.0),
]
LOGPROBS = [
    torch.tensor([-0.9, -3.0]),
    torch.tensor([-0.1, -4.0]),
    torch.tensor([-2.0, -0.2, -1.1]),
    torch.tensor([-0.3]),
]


@pytest.mark.parametrize("loss", ["kl_cov", "clip_cov"])
def test_tokens_are_selected_by_covariances_over_all_ranks(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"name": loss, "cov_share": 0.4}
    if loss == "clip_cov":
        settings |= {"clip_cov_low": 0.2}
    algorithm = {"loss": settings}
    state = state_without_model(learner_config(Path("model"), algorithm=algorithm))
    logprobs = torch.cat(LOGPROBS).double().numpy()
    advantages = np.repeat([1.0, -1.0, 0.5, 2.0], [2, 2, 3, 1])
    values = covariances(logprobs, advantages)
    ratio = np.exp(logprobs + 1.0)
    clipped = ((advantages > 0) & (ratio > 1.28)) | ((advantages < 0) & (ratio < 0.8))
    assert clipped.any() and (values[clipped] > 0.2).any(), "a clipped token could be drawn"
    expected = (
        largest(values, 0.4)
        if loss == "kl_cov"
        else drawn_between(values, clipped, 0.4, (0.2, 5.0), (0, 0, 1))
    )
    assert 0 < expected.sum() < 8
    ranks = TwoRanks(monkeypatch, LOGPROBS)
    found = ranks.selected(state, EXAMPLES, PARTS[:1], PARTS[1:])
    at_loss_tokens = [mask[one.loss_mask] for mask, one in zip(found, EXAMPLES, strict=True)]
    assert np.concatenate(at_loss_tokens).tolist() == expected.tolist()
    assert not any(mask[~one.loss_mask].any() for mask, one in zip(found, EXAMPLES, strict=True))
    alone = ranks.selected(state, EXAMPLES, PARTS)
    assert all((a == b).all() for a, b in zip(found, alone, strict=True)), "any split of the step"


def test_ranks_that_share_rows_count_their_tokens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = {"name": "clip_cov", "cov_share": 1.0, "clip_cov_low": 0.2, "clip_cov_high": 1.0}
    algorithm = {"loss": loss}
    config = learner_config(Path("model"), 2, sequence_parallel_size=2, algorithm=algorithm)
    first, second = state_without_model(config), state_without_model(config)
    second.rank = 1
    assert (first.sequence_rank, second.sequence_rank) == (0, 1)
    ranks = TwoRanks(monkeypatch, LOGPROBS)
    wanted = ranks.selected(first, EXAMPLES, PARTS)
    assert np.concatenate(wanted).any(), "the bounds depend on the size of the covariances"
    ranks.sums, ranks.parts = np.zeros(0), PARTS
    policy_step._with_selected_tokens(first, EXAMPLES)
    found = policy_step._with_selected_tokens(second, EXAMPLES)
    assert [one.selected.tolist() for one in found] == [mask.tolist() for mask in wanted]


def test_selected_tokens_reach_the_loss() -> None:
    selected = replace(EXAMPLES[0], selected=np.array([True, False, False]))
    batch = micro_batch([selected], [0], "cpu")
    assert batch.policy_tokens(batch.ages).selected.tolist() == [True, False]
    plain = micro_batch(EXAMPLES, [0], "cpu")
    assert plain.policy_tokens(plain.ages).selected is None


def scored_tables(rewards: list[list[float]], advantages: list[list[float]]) -> list[Any]:
    """One table for each group. Completions have 1, 2, … tokens, and the last one is masked."""
    tables = []
    for ordinal, (of_group, given) in enumerate(zip(rewards, advantages, strict=True)):
        members = [
            Trajectory(
                Completion(
                    tuple(range(5, 5 + length)),
                    (-1.0,) * length,
                    (VersionSpan(0, 0, length),),
                    "length" if length == 2 else "stop",
                ),
                (1,) * length,
                reward,
                {},
                advantage,
            )
            for length, reward, advantage in zip(range(1, 9), of_group, given, strict=False)
        ]
        masked = Trajectory(
            Completion((5, 6), (-1.0, -1.0), (VersionSpan(0, 0, 2),), "stop"),
            (1, 1),
            50.0,
            {},
            None,
            "over_long",
        )
        group = Group(1, Prompt(ordinal, 0, "p", (1, 2)), (*members, masked), "r", 0.0, 1.0, 2.0)
        tables.append(groups_to_table([group]))
    return tables


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # Rewards 0, 1, 3, 3 have mean 1.75 and population std sqrt(6.75 / 4).
        ("grpo_batch_std", np.array([-0.5, 0.5, 0.0, 0.0]) / np.sqrt(6.75 / 4)),
        # Sums -1, 2, 0.5, 0.5 over trajectories have mean 0.5 and std sqrt(4.5 / 4).
        ("gdpo", np.array([-1.5, 1.5, 0.0, 0.0]) / np.sqrt(4.5 / 4)),
        ("opo", np.array([-1.0, 2.0, 0.5, 0.5])),
    ],
)
def test_step_advantages(advantage: str, expected: np.ndarray) -> None:
    of_group = [[-0.5, 0.5], [0.0, 0.0]] if "std" in advantage else [[-1.0, 2.0], [0.5, 0.5]]
    tables = scored_tables([[0.0, 1.0], [3.0, 3.0]], of_group)
    scored = [found for table in tables for found in examples_of(table)]
    state = state_without_model(learner_config(Path("model"), algorithm={"advantage": advantage}))
    found = policy_step._with_step_advantages(state, scored, tables)
    np.testing.assert_allclose([one.advantage for one in found], expected, rtol=1e-5)
    assert policy_step._with_step_advantages(state, [], tables) == []


def test_shuffled_rewards_meet_the_lengths_of_their_new_trajectories() -> None:
    [table] = scored_tables([[0.0, 1.0, 2.0]], [[9.0, 9.0, 9.0]])
    [shuffled] = shuffle_rewards([table], Opo(), (0, 3))
    rewards = shuffled["reward"][0].as_py()
    assert rewards[:3] != [0.0, 1.0, 2.0], "the test needs another order"
    baseline = (1 * rewards[0] + 2 * rewards[1] + 3 * rewards[2]) / 6
    assert shuffled["advantage"][0].as_py() == pytest.approx(
        [*(reward - baseline for reward in rewards[:3]), None]
    )


def test_shuffled_rewards_meet_the_baseline_of_their_new_group() -> None:
    tables = scored_tables([[0.0, 1.0], [2.0, 3.0]], [[9.0, 9.0]] * 2)
    tables = [
        table.append_column("baseline_reward", pa.array([baseline], pa.float32()))
        for table, baseline in zip(tables, (0.5, 2.0), strict=True)
    ]
    shuffled = shuffle_rewards(tables, ReMax(), (0, 1))
    rewards = [table["reward"][0].as_py()[:2] for table in shuffled]
    assert rewards != [[0.0, 1.0], [2.0, 3.0]], "the test needs another order"
    for table, of_group, baseline in zip(shuffled, rewards, (0.5, 2.0), strict=True):
        expected = [*(reward - baseline for reward in of_group), None]
        assert table["advantage"][0].as_py() == expected


@pytest.mark.parametrize("bootstrap", [False, True])
def test_a_cut_answer_counts_the_value_after_it(
    bootstrap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are 10 times the fake's log-probs: 1, 2 and 7 (after the cut answer), and -3. γ = 1
    and λ = 0 give r + V' - V."""
    tables = scored_tables([[0.0, 4.0]], [[0.0, 4.0]])
    examples = examples_of(tables[0])
    assert [one.truncated for one in examples] == [False, True]
    gae = Gae(gae_lambda=0.0, bootstrap_truncated=bootstrap)
    state = state_without_model(learner_config(Path("model"), algorithm={"advantage": gae}))
    cut = torch.tensor([0.1, 0.2, 0.7] if bootstrap else [0.1, 0.2])
    ranks = TwoRanks(monkeypatch, [torch.tensor([-0.3]), cut])
    ranks.parts = ([0, 1],)
    monkeypatch.setattr(policy_step, "standardized", lambda values, every: values)
    found = policy_step._with_value_advantages(state, examples, gae)
    np.testing.assert_allclose(found[0].advantage, [3.0], rtol=1e-5)
    last = 4.0 + 7.0 - 2.0 if bootstrap else 4.0 - 2.0
    np.testing.assert_allclose(found[1].advantage, [1.0, last], rtol=1e-5)
    assert found[1].returns is not None
    np.testing.assert_allclose(found[1].returns, [2.0, last + 2.0], rtol=1e-6)
    assert (found[1].tokens == examples[1].tokens).all(), "the trained trajectory is no longer"


@pytest.mark.parametrize("bootstrap", [False, True])
def test_every_rank_has_the_values_of_all_trajectories(
    bootstrap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may train other trajectories than it evaluated: a cut one has one more token in the
    evaluation, so that its micro-batches differ."""
    examples = examples_of(scored_tables([[0.0, 4.0]], [[0.0, 4.0]])[0])
    gae = Gae(gae_lambda=0.0, bootstrap_truncated=bootstrap)
    state = state_without_model(learner_config(Path("model"), algorithm={"advantage": gae}))
    cut = torch.tensor([0.1, 0.2, 0.7] if bootstrap else [0.1, 0.2])
    ranks = TwoRanks(monkeypatch, [torch.tensor([-0.3]), cut])
    for parts in (([0],), ([1],)):
        ranks.parts = parts
        found = policy_step._with_value_advantages(state, examples, gae)
    ranks.parts, ranks.sums = ([0, 1],), np.zeros(0)
    alone = policy_step._with_value_advantages(state, examples, gae)
    for together, one in zip(found, alone, strict=True):
        assert together.returns is not None and one.returns is not None
        np.testing.assert_allclose(together.returns, one.returns)
        np.testing.assert_allclose(together.advantage, one.advantage)


def test_the_value_after_a_trajectory_is_that_of_its_last_hidden_state(tmp_path: Path) -> None:
    path = family("llama").save(tmp_path)
    policy = load_policy(str(path), torch.float32, 1.0, values=True)
    torch.nn.init.normal_(policy.value_head.weight, generator=torch.Generator().manual_seed(0))
    other, plain = example([1, 0, 1], 1.0), example([1, 1, 0, 1], 1.0)
    longer = with_next_token(plain)
    with torch.no_grad():
        *_, before = policy(micro_batch([plain], [0], "cpu"))
        *_, packed = policy(micro_batch([other, longer], [0, 1], "cpu"))
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").model
        row = torch.from_numpy(plain.tokens)[None]
        hidden = model(input_ids=row, use_cache=False).last_hidden_state[0]
        after = policy.value_head(hidden[-1])
    assert packed[:3].tolist() == pytest.approx(before.tolist(), abs=1e-5)
    assert packed[3].item() == pytest.approx(after.item(), abs=1e-5) and abs(after.item()) > 1e-3


def test_completions_with_enough_reward_are_trained_as_text_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The third trajectory, with two loss tokens, is the only one with a reward of 4."""
    tables = scored_tables([[0.0, 1.0], [3.0, 4.0]], [[-1.0, 1.0], [-1.0, 1.0]])
    losses = []

    def train(state: Any, examples: list[Example], weights: Any, loss: Any, *_: Any, **named: Any):
        batch = micro_batch(examples, range(len(examples)), "cpu", weights)
        logprobs = torch.full((6,), -1.5, requires_grad=True)
        total, sums = loss(logprobs, torch.zeros(6), torch.zeros(0), batch)
        (gradient,) = torch.autograd.grad(total, logprobs)
        parts = [part.tolist() for part in gradient.split(list(batch.counts))]
        losses.append((total.item(), dict(zip(batch.order, parts, strict=True)), sums.parts))
        assert named == {"parts": tuple(sums.parts), "policy": True}
        return {"applied": 0.0}

    monkeypatch.setattr(policy_step, "train", train)
    monkeypatch.setattr(policy_step, "keep_if_bad", lambda *_: "")
    for algorithm in ({}, {"ce": {"coef": 0.5, "min_reward": 4.0}}):
        state = state_without_model(learner_config(Path("model"), algorithm=algorithm))
        policy_step.policy_step(state, tables)
    (plain, without, _), (total, gradients, parts) = losses
    assert parts["ce/loss"].item() == pytest.approx(1.5)
    assert total == pytest.approx(plain + 0.5 * 1.5)
    for index, gradient in gradients.items():
        added = -0.5 / 2 if index == 3 else 0.0
        assert gradient == pytest.approx([value + added for value in without[index]])
