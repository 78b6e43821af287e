"""Online DPO on scored groups, under real ZeRO-3: pairs, ages and weights. At staleness 0 it is the
synchronous algorithm, compared with a plain loop."""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from plain_ranks import on_ranks
from recorded import learner_config
from scored_groups import VERSION, scored_group
from test_synchronous import (
    EOS,
    GROUPS,
    LENGTH,
    InProcess,
    N,
    Prompts,
    difference,
    load,
    prompt_ids,
    reward,
)
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from asyncrl.algorithms.pairs import BestWorst, Margin
from asyncrl.algorithms.preference_losses import Sigmoid
from asyncrl.config import Config, RewardConfig, StalenessConfig
from asyncrl.contracts.messages import GenerateRequest, StepResult
from asyncrl.contracts.outcomes import NO_PAIR
from asyncrl.contracts.state import State
from asyncrl.control.coordinator import Coordinator, Parts, Schedule
from asyncrl.control.staleness import Staleness
from asyncrl.learning.driver import RayLearner
from asyncrl.learning.frozen.reference import Reference
from asyncrl.learning.spec import LearnerSpec
from asyncrl.learning.steps.online_preference import online_preference_step, pairs_table
from asyncrl.observe.metric_catalog import known_names
from asyncrl.preflight.specs import learner_spec, reference_spec
from asyncrl.rollout.worker import rollout_seed
from asyncrl.testing import FakeRecorder, SeededGenerator

STEPS, TEMPERATURE = 5, 0.8
BOUND = 3
Parameters = dict[str, torch.Tensor]

# Pairs, ages and weights on recorded groups


def batch() -> list[pa.Table]:
    """Four groups with a pair, of staleness 0, 2, 2 and 3, and two without."""
    return [
        scored_group(0, (1.0, 0.0, 0.5)),
        scored_group(1, (0.0, 0.3, 1.0), versions=[[5], [2], [3, 4]]),
        scored_group(2, (1.0, 1.0)),
        scored_group(3, (None, 0.0, 2.0), versions=[[0], [4, 5], [3]]),
        scored_group(4, (None, 0.5)),
        scored_group(5, (0.0, 3.0), versions=[[2, 3, 5], [5]]),
    ]


def preference_config(path: Path, world_size: int = 1, **preference: Any) -> Config:
    base = learner_config(
        path, world_size, 1024, {"preference": preference}, optimizer="sgd", max_grad_norm=1e6
    )
    tree = base.model_dump()
    tree["rollout"] |= {"temperature": TEMPERATURE, "n_samples_per_prompt": 3}
    tree["staleness"]["max_staleness"] = BOUND
    return Config.model_validate(tree)


def plain_sum(model: PreTrainedModel, prompt: list[int], ids: list[int], mask: list[int]) -> Any:
    """The summed log-prob of a completion's masked tokens, by transformers alone."""
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].double()
    logprobs = (logits / TEMPERATURE).log_softmax(-1)
    return (logprobs.gather(-1, torch.tensor(ids)[:, None])[:, 0] * torch.tensor(mask)).sum()


def plain_margins(model: PreTrainedModel, beta: float) -> dict[int, float]:
    """Group → margin of its best against its worst, without asyncrl's own code."""
    best_and_worst = {0: (0, 1), 1: (2, 0), 3: (2, 1), 5: (1, 0)}
    rows = {table["ordinal"][0].as_py(): table.to_pylist()[0] for table in batch()}
    found = {}
    for ordinal, places in best_and_worst.items():
        row, values = rows[ordinal], []
        for place in places:
            ids, mask = row["completion_ids"][place], row["loss_mask"][place]
            reference = row["reference_logprobs"][place]
            total = plain_sum(model, row["prompt_ids"], ids, mask)
            kept = [value for value, use in zip(reference, mask, strict=True) if use]
            values.append(beta * (float(total) - math.fsum(kept)))
        found[ordinal] = values[0] - values[1]
    return found


@dataclass(frozen=True)
class Observed:
    """What a rank computes."""

    results: list[StepResult]
    skipped: StepResult
    after_skip: tuple[int, int]
    """Steps and tokens."""


@dataclass(frozen=True)
class Untouched:
    """A learner at VERSION that has no model, so it cannot train."""

    spec: LearnerSpec
    applied: int = VERSION


def observed(rank: int, world_size: int, path: Path) -> Observed:
    """Steps of one learner, whose learning rate is 0, at VERSION. The second has a cap that no pair
    fits into."""
    from asyncrl.learning.engine.state import load_state

    spec = learner_spec(preference_config(path, world_size, loss=Sigmoid(beta=0.2), weight_cap=1.5))
    spec = replace(spec, learning_rate=0.0)
    state = load_state(rank, spec)
    results = []
    for cap in (1024, 25):
        state.applied = VERSION
        learner = spec.learner.model_copy(update={"max_tokens_per_gpu": cap})
        state.spec = replace(spec, learner=learner)
        results.append(online_preference_step(state, batch()))
    state.applied, state.trained_tokens = VERSION, 0
    skipped = online_preference_step(state, [batch()[2], batch()[4]])
    after_skip = state.applied, state.trained_tokens
    state.engine.destroy()
    return Observed(results, skipped, after_skip)


@pytest.fixture(scope="module")
def two_ranks(model_path: Path) -> list[Observed]:
    return on_ranks(2, observed, model_path)


@pytest.mark.slow
def test_margins_are_reported_by_the_staleness_of_the_older_side(
    two_ranks: list[Observed], model_path: Path
) -> None:
    with torch.no_grad():
        margins = plain_margins(load(model_path), beta=0.2)
    expected = {
        "pref/margin_at_staleness_0": margins[0],
        "pref/margin_at_staleness_2": (margins[1] + margins[3]) / 2,
        "pref/margin_at_staleness_3": margins[5],
        "pref/margin": sum(margins.values()) / 4,
    }
    assert len({round(value, 3) for value in expected.values()}) == 4
    for found in two_ranks:
        for result in found.results:
            assert result.applied and result.reason == ""
            for name, value in expected.items():
                assert result.metrics[name] == pytest.approx(value, abs=1e-5), name
            assert not [name for name in result.metrics if name.endswith("staleness_1")]
            assert result.metrics["pairs"] == 4 and result.metrics["pref/groups_without_pair"] == 2
            assert {"ess", "kl_reference", "clip_fraction"}.isdisjoint(result.metrics)
            names = {name.replace("staleness_0", "staleness_<k>") for name in result.metrics}
            assert {name for name in names if not name[-1].isdigit()} <= known_names()
    together, apart = two_ranks[0].results
    assert together.metrics["long_pairs"] == 0 and apart.metrics["long_pairs"] == 4
    assert 0 < together.metrics["pref/weight_mean"] < 1.5


@pytest.mark.slow
def test_a_step_without_any_pair_is_skipped_and_named(two_ranks: list[Observed]) -> None:
    for found in two_ranks:
        assert not found.skipped.applied and found.skipped.reason == NO_PAIR
        assert found.skipped.metrics["pref/groups_without_pair"] == 2
        assert found.after_skip == (VERSION, 0)


def test_a_pair_beyond_the_staleness_bound_is_never_trained(model_path: Path) -> None:
    spec = learner_spec(preference_config(model_path))
    online = replace(spec.online, staleness=StalenessConfig(max_staleness=2))
    learner: Any = Untouched(replace(spec, objective=online))
    refused = (
        "a pair has a staleness of 0 to 3 at version 5, outside 0 to staleness.max_staleness = 2"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(refused)}$"):
        online_preference_step(learner, batch())


def test_the_table_of_pairs_has_what_was_recorded(model_path: Path) -> None:
    spec = learner_spec(preference_config(model_path))
    table, without = pairs_table(batch(), spec, VERSION)
    assert table.num_rows == 4 and without == 2
    assert table["oldest_version"].to_pylist() == [5, 3, 3, 2]
    row = batch()[3].to_pylist()[0]
    pair = table.to_pylist()[2]
    for side, place in (("chosen", 2), ("rejected", 1)):
        prompt, mask = row["prompt_ids"], row["loss_mask"][place]
        assert pair[f"{side}_ids"] == [*prompt, *row["completion_ids"][place]]
        assert pair[f"{side}_mask"] == [*[False] * len(prompt), *map(bool, mask)]
        for name, column in (("behavior", "logprobs"), ("reference", "reference_logprobs")):
            kept = [value for value, use in zip(row[column][place], mask, strict=True) if use]
            assert pair[f"{side}_{name}"] == kept
    again, _ = pairs_table(batch(), spec, VERSION)
    assert again.equals(table)


def test_cut_off_completions_and_margins_change_the_pairs(model_path: Path) -> None:
    group = scored_group(0, (1.0, 0.9, 0.0), reasons=["length", "stop", "stop"])

    def lengths(**preference: Any) -> list[int]:
        spec = learner_spec(preference_config(model_path, **preference))
        return [
            len(ids) for ids in pairs_table([group], spec, VERSION)[0]["chosen_ids"].to_pylist()
        ]

    first, second, _ = (2 + len(ids) for ids in group["completion_ids"][0].as_py())
    assert first != second
    assert lengths() == [first]
    assert lengths(pairs=BestWorst(missing_eos_penalty=0.5)) == [second]
    assert lengths(pairs=BestWorst(min_margin=2.0)) == []
    assert lengths(pairs=Margin(max_pairs=2)) == [first, second]


def test_shuffled_rewards_come_before_the_pairs(model_path: Path) -> None:
    spec = learner_spec(preference_config(model_path))
    groups = [scored_group(ordinal, (1.0, 0.0)) for ordinal in range(8)]
    plain, _ = pairs_table(groups, spec, VERSION)
    spec = replace(spec, objective=replace(spec.online, reward=RewardConfig(shuffle=True)))
    shuffled = [pairs_table(groups, spec, version) for version in (5, 5, 6)]
    assert shuffled[0][0].equals(shuffled[1][0]) and not shuffled[0][0].equals(shuffled[2][0])
    assert not shuffled[0][0].equals(plain) and shuffled[0][1] > 0, "some groups have equal rewards"


def test_groups_without_the_reference_are_refused(model_path: Path) -> None:
    group = scored_group(0, (1.0, 0.0)).drop_columns(["reference_logprobs"])
    spec = learner_spec(preference_config(model_path))
    with pytest.raises(ValueError, match=r"columns \['reference_logprobs'\] are missing"):
        pairs_table([group], spec, VERSION)


# The synchronous algorithm


def synchronous_config(model_path: Path) -> Config:
    preference = {
        "loss": Sigmoid(beta=0.3),
        "pairs": Margin(max_pairs=2, min_margin=0.3, missing_eos_penalty=0.2),
        "weight_cap": 1.01,
        "ce_coef": 0.1,
    }
    tree = preference_config(model_path, **preference).model_dump()
    tree["max_steps"] = STEPS
    tree["rollout"] |= {
        "rollout_batch_size": GROUPS,
        "n_samples_per_prompt": N,
        "max_completion_length": LENGTH,
    }
    tree["learner"]["learning_rate"] = 0.01
    tree["staleness"]["max_staleness"] = 0
    tree["reward"]["functions"] = {"even": {"function": "nowhere:even"}}
    return Config.model_validate(tree)


async def with_asyncrl(
    config: Config, reference: Reference
) -> tuple[Parameters, InProcess, list[dict[str, Any]]]:
    """Online DPO with asyncrl's coordinator, worker, scoring, reference and ZeRO-3 learner."""
    generator = SeededGenerator(load(config.model.path), EOS)
    in_process, recorder = InProcess(config, generator, "run", reference), FakeRecorder()
    learner = await RayLearner.create(learner_spec(config), "run", 0)
    try:
        parts = Parts(Prompts(), in_process, in_process, learner, generator, recorder)
        schedule = Schedule(config.max_steps, Staleness(0, GROUPS))
        await Coordinator(parts, schedule, State("run", 0, 0, 0, 0, ())).run()
        taken = load(config.model.path)
        await SeededGenerator(taken, EOS).push(await learner.gather(config.max_steps + 1))
    finally:
        await learner.close()
    steps = [metrics for event, _, _, metrics in recorder.records if event == "step"]
    parameters = {name: parameter.detach() for name, parameter in taken.named_parameters()}
    return parameters, in_process, steps


def plain_loop(
    config: Config, model: PreTrainedModel, reference: PreTrainedModel
) -> tuple[Parameters, dict[int, list[tuple[int, ...]]], list[tuple[float, int]]]:
    """The synchronous algorithm with only transformers and torch: the weights after the last step,
    all tokens, and (loss, number of pairs) of each step."""
    preference = config.algorithm.preference
    assert preference is not None and preference.weight_cap is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    generator, tokens, steps = SeededGenerator(model, EOS), {}, []
    for step in range(config.max_steps):
        losses, chosen_sums, chosen_tokens = [], [], 0
        for ordinal in range(step * GROUPS, (step + 1) * GROUPS):
            prompt, seed = list(prompt_ids(ordinal)), rollout_seed(config.seed, ordinal)
            request = GenerateRequest(tuple(prompt), N, LENGTH, TEMPERATURE, seed=seed)
            completions = asyncio.run(generator.generate(request)).completions
            tokens[ordinal] = [completion.token_ids for completion in completions]
            score = [
                reward(one.token_ids) - 0.2 * (one.finish_reason == "length") for one in completions
            ]
            ranked = sorted(
                (score[lose] - score[win], win, lose)
                for win in range(N)
                for lose in range(N)
                if score[win] - score[lose] > 0.2999
            )
            for _, win, lose in ranked[:2]:
                sums = []
                for place in (win, lose):
                    ids = list(completions[place].token_ids)
                    ours = plain_sum(model, prompt, ids, [1] * len(ids))
                    with torch.no_grad():
                        theirs = plain_sum(reference, prompt, ids, [1] * len(ids))
                    sums.append((ours, ours - theirs, math.fsum(completions[place].logprobs)))
                ratio = sum(float(ours.detach()) - sampled for ours, _, sampled in sums)
                weight = min(preference.weight_cap, math.exp(ratio))
                losses.append(
                    -weight * logsigmoid(preference.loss.beta * (sums[0][1] - sums[1][1]))
                )
                chosen_sums.append(sums[0][0])
                chosen_tokens += len(completions[win].token_ids)
        loss = torch.stack(losses).mean() - 0.1 * torch.stack(chosen_sums).sum() / chosen_tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), len(losses)))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return parameters, tokens, steps


def rounding_of_weights(config: Config, after: Parameters) -> float:
    """Relative difference between the changes of two sets of float32 weights that differ only in
    the rounding of each weight after each step. A rounding error is uniform in an interval of at
    most 2^-23 of the weight, so its variance is at most 2^-46 / 12. Both sets have one per step."""
    start = dict(load(config.model.path).named_parameters())
    size = sum(float(after[name].double().square().sum()) for name in start)
    change = sum(
        float((after[name] - start[name].detach()).double().square().sum()) for name in start
    )
    return 2.0**-23 * math.sqrt(config.max_steps / 6 * size / change)


@pytest.mark.timeout(400)
def test_staleness_0_equals_a_plain_synchronous_loop(
    ray_cluster: Any, run: Any, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.learning.frozen.reference.claim_caches", lambda name: None)
    config = synchronous_config(model_path)
    ours, in_process, our_steps = run(with_asyncrl(config, Reference(reference_spec(config))))
    theirs, their_tokens, their_steps = plain_loop(config, load(model_path), load(model_path))
    assert in_process.tokens == their_tokens, "token ids, at every step"
    assert [step["pairs"] for step in our_steps] == [pairs for _, pairs in their_steps]
    assert 0 < their_steps[0][1] < 2 * GROUPS, "some groups give fewer pairs than others"
    apart = [
        abs(step["loss"] - loss) for step, (loss, _) in zip(our_steps, their_steps, strict=True)
    ]
    found = difference(config, ours, theirs)
    rounding = rounding_of_weights(config, theirs)
    print(
        f"losses differ by {max(apart):.1e}, the change of the weights by {found:.1e} relative,"
        f" and rounding gives up to {rounding:.1e}"
    )
    assert found <= rounding and max(apart) <= 1e-5
    assert our_steps[-1]["pref/margin"] > our_steps[0]["pref/margin"]
