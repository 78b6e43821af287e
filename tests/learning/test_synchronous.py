"""`max_staleness: 0` is the synchronous algorithm: asyncrl's coordinator, worker, scoring and
ZeRO-3 learner are compared with a plain loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import EngineActor
from recorded import learner_config
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.algorithms.advantages.grpo import Grpo
from asyncrl.algorithms.objective import policy_loss, token_weights
from asyncrl.algorithms.optimizers import AdamW
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.config import Config
from asyncrl.contracts.group_table import table_from_ipc
from asyncrl.contracts.messages import (
    Finished,
    Generated,
    GenerateRequest,
    Manifest,
    PushReport,
    Scored,
    WeightsId,
)
from asyncrl.contracts.protocols import Generate, WeightSync
from asyncrl.contracts.rows import Completion, Prompt
from asyncrl.contracts.state import State
from asyncrl.control.coordinator import Coordinator, Parts, Schedule
from asyncrl.control.staleness import Staleness
from asyncrl.generation.app import ServeGenerate
from asyncrl.generation.engine.arguments import engine_environment
from asyncrl.learning.driver import RayLearner
from asyncrl.learning.frozen.reference import Reference
from asyncrl.preflight.specs import learner_spec, scoring_spec, worker_spec
from asyncrl.rewards.pool import GroupRewards
from asyncrl.rewards.reference_rows import reference_rows
from asyncrl.rewards.score import (
    attach_reference,
    attach_rewards,
    group_call,
    score_table,
)
from asyncrl.rewards.summary import summaries
from asyncrl.rollout.worker import RolloutWorker, rollout_seed
from asyncrl.testing import FakeRecorder, SeededGenerator
from asyncrl.weights.manifest import expected_tensors
from asyncrl.weights.push import ServeWeightSync
from asyncrl.weights.staging import fetch_version

STEPS, GROUPS, N, LENGTH = 20, 4, 4, 8
EOS = 2
Sample = Callable[[GenerateRequest, int], tuple[Completion, ...]]
"""(request, step) → completions sampled with the plain model's weights."""


def reward(ids: tuple[int, ...]) -> float:
    return sum(token % 2 == 0 for token in ids) / len(ids)


def prompt_ids(ordinal: int) -> tuple[int, ...]:
    return (3 + ordinal * 7 % 40, 3 + ordinal % 30)


class Prompts:
    def __init__(self) -> None:
        self.ordinal = -1

    async def next(self) -> Prompt:
        self.ordinal += 1
        return Prompt(self.ordinal, 0, "p", prompt_ids(self.ordinal))


class InProcess:
    """`Rollouts` and `Scores`: asyncrl's worker and scoring functions, in this process."""

    def __init__(
        self,
        config: Config,
        generator: Generate,
        run_id: str,
        reference: Reference | None = None,
    ) -> None:
        self.config, self.reference, self.worker = (
            config,
            reference,
            RolloutWorker(worker_spec(config, run_id, 0, lambda: generator)),
        )
        self.tokens: dict[int, list[tuple[int, ...]]] = {}
        self.rewards: dict[int, list[float]] = {}

    async def rollout(self, prompt: Prompt, committed: int) -> Finished:
        return await self.worker.rollout(prompt, committed)

    def committed(self, version: int) -> None:
        pass

    def ended_below(self, ordinal: int) -> None:
        """Every group is scored only once, so no copies need to be dropped."""

    async def ack(self, ordinals: list[int]) -> None:
        await self.worker.ack(ordinals)

    async def next(self) -> list[Scored]:
        stream = None
        while stream is None:
            stream = await self.worker.take("test", 1, 60.0)
        table = table_from_ipc(stream)
        ids = [tuple(row) for row in table["completion_ids"][0].as_py()]
        self.tokens[table["ordinal"][0].as_py()] = ids
        call = group_call(table)
        assert [tuple(row) for row in call.completion_ids][: len(ids)] == ids
        rewards = [reward(tuple(row)) for row in call.completion_ids]
        rewarded = attach_rewards(table, GroupRewards({"even": rewards}, None))
        if self.reference is not None:
            logprobs = self.reference.logprobs(reference_rows(rewarded).rows)
            rewarded = attach_reference(rewarded, logprobs)
        scored = score_table(rewarded, scoring_spec(self.config))
        self.rewards[scored["ordinal"][0].as_py()] = scored["reward"][0].as_py()
        return [replace(summaries(scored)[0], ref=scored)]


class OneVersionOff(SeededGenerator):
    """A generator that applies every version one push too late."""

    waiting: Any = None

    async def push(self, manifest: Manifest) -> PushReport:
        await super().push(self.waiting or manifest)
        self.waiting, self.version = manifest, manifest.version
        return PushReport(manifest.version, {"seeded": {}})


def config_for(
    model_path: Any, optimizer: str, steps: int = STEPS, advantage: str = "grpo"
) -> Config:
    rates = {"sgd": 0.5, "adamw": 1e-3}
    only_adam = {"eps": 1e-6} if optimizer == "adamw" else {}
    base = learner_config(
        model_path,
        optimizer={"name": optimizer, **only_adam},
        learning_rate=rates[optimizer],
        max_grad_norm=1e6,
    )
    tree = base.model_dump()
    tree["max_steps"] = steps
    tree["algorithm"]["advantage"] = advantage
    tree["rollout"] |= {
        "rollout_batch_size": GROUPS,
        "n_samples_per_prompt": N,
        "max_completion_length": LENGTH,
    }
    tree["staleness"] |= {"max_staleness": 0}
    tree["reward"]["functions"] = {"even": {"function": "nowhere:even"}}
    return Config.model_validate(tree)


def load(path: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def greedy(model: Any, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The most probable token after each, until the end."""
    ids: list[int] = []
    while len(ids) < LENGTH and EOS not in ids:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([[*prompt, *ids]])).logits[0, -1].argmax()))
    return tuple(ids)


def plain_loop(
    config: Config, model: Any, sample: Sample
) -> tuple[dict[str, torch.Tensor], dict[int, list[tuple[int, ...]]]]:
    """The synchronous algorithm with only transformers, torch and the pure functions. Returns the
    weights after the last step, and all tokens."""
    learner = config.learner
    if isinstance(learner.optimizer, AdamW):
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(),
            config.learning_rate,
            learner.optimizer.betas,
            learner.optimizer.eps,
            learner.weight_decay,
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    tokens: dict[int, list[tuple[int, ...]]] = {}
    for step in range(config.max_steps):
        trajectories = []
        for ordinal in range(step * GROUPS, (step + 1) * GROUPS):
            request = GenerateRequest(
                prompt_ids(ordinal),
                N,
                LENGTH,
                config.rollout.temperature,
                seed=rollout_seed(config.seed, ordinal),
            )
            completions = sample(request, step)
            tokens[ordinal] = [completion.token_ids for completion in completions]
            rewards = [reward(ids) for ids in tokens[ordinal]]
            if config.algorithm.advantage.name == "remax":
                baseline = reward(greedy(model, prompt_ids(ordinal)))
                advantages: list[float | None] = [given - baseline for given in rewards]
            else:
                advantages = group_advantages(rewards, [True] * N, Grpo())
            trajectories += [
                (prompt_ids(ordinal), completion, advantage)
                for completion, advantage in zip(completions, advantages, strict=True)
            ]
        weights = token_weights(
            [len(completion.token_ids) for _, completion, _ in trajectories], "token_mean", LENGTH
        )
        for (prompt, completion, advantage), weight in zip(trajectories, weights, strict=True):
            ids = torch.tensor(completion.token_ids)
            logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[
                0, len(prompt) - 1 : -1
            ]
            logprobs = (
                (logits / config.rollout.temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
            )
            one = torch.ones(len(ids))
            taken = PolicyTokens(
                logprobs,
                torch.tensor(completion.logprobs),
                one * advantage,
                one * weight,
                ids * 0,
                1,
                one * 0,
            )
            policy_loss(taken, config.algorithm)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, tokens


async def with_asyncrl(
    config: Config, run_id: str, generate: Generate, weights: WeightSync
) -> tuple[dict[str, torch.Tensor], dict[int, list[tuple[int, ...]]]]:
    """The same with asyncrl's coordinator."""
    in_process = InProcess(config, generate, run_id)
    learner = await RayLearner.create(learner_spec(config), run_id, 0)
    try:
        parts = Parts(Prompts(), in_process, in_process, learner, weights, FakeRecorder())
        await Coordinator(
            parts, Schedule(config.max_steps, Staleness(0, GROUPS)), State(run_id, 0, 0, 0, 0, ())
        ).run()
        taken = load(config.model.path)
        await SeededGenerator(taken, EOS).push(await learner.gather(config.max_steps + 1))
    finally:
        await learner.close()
    for ordinal, group in in_process.tokens.items():
        assert in_process.rewards[ordinal] == pytest.approx([reward(ids) for ids in group]), (
            "float32 in Arrow"
        )
    return {
        name: parameter.detach() for name, parameter in taken.named_parameters()
    }, in_process.tokens


def difference(
    config: Config, left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]
) -> float:
    """Relative L2 difference between the changes of all weights."""
    start = dict(load(config.model.path).named_parameters())
    apart = sum((left[name] - right[name]).double().square().sum() for name in start)
    change = sum((right[name] - start[name]).double().square().sum() for name in start)
    return float((apart / change).sqrt())


def seeded(config: Config) -> tuple[Any, Sample]:
    """A plain model, and a function that samples from it."""
    model = load(config.model.path)
    generator = SeededGenerator(model, EOS)
    return model, lambda request, step: asyncio.run(generator.generate(request)).completions


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("optimizer", "bound", "steps", "advantage"),
    [
        pytest.param("sgd", 1e-4, STEPS, "grpo", marks=pytest.mark.slow),
        pytest.param("adamw", 1e-3, STEPS, "grpo", marks=pytest.mark.slow),
        ("adamw", 1e-3, 8, "grpo"),
        pytest.param("sgd", 1e-4, 6, "remax", marks=pytest.mark.slow),
    ],
)
def test_steps_equal_a_plain_synchronous_loop(
    ray_cluster: Any,
    run: Any,
    model_path: Any,
    optimizer: str,
    bound: float,
    steps: int,
    advantage: str,
) -> None:
    """Remax has greedy completions, which are made by a loop of their own."""
    config = config_for(model_path, optimizer, steps, advantage)
    generator = SeededGenerator(load(model_path), EOS)
    ours, our_tokens = run(with_asyncrl(config, "run", generator, generator))
    theirs, their_tokens = plain_loop(config, *seeded(config))
    assert our_tokens == their_tokens, "token ids, at every step"
    found = difference(config, ours, theirs)
    print(f"{optimizer}: change of the weights differs by {found:.2e} relative")
    assert found <= bound


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_generator_one_version_off_is_detected(
    ray_cluster: Any, run: Any, model_path: Any
) -> None:
    config = config_for(model_path, "sgd")
    generator = OneVersionOff(load(model_path), EOS)
    ours, our_tokens = run(with_asyncrl(config, "run", generator, generator))
    theirs, their_tokens = plain_loop(config, *seeded(config))
    assert our_tokens != their_tokens and difference(config, ours, theirs) > 1e-2


class OneAtATime(ServeGenerate):
    """vLLM replicas that get one request at a time."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self.turn = asyncio.Lock()

    async def generate(self, request: GenerateRequest) -> Generated:
        async with self.turn:
            return await super().generate(request)


@pytest.fixture
def engine_alone(ray_cluster: Any, generators: Any, engine_starts: list[str]) -> Iterator[Any]:
    """The same engine configuration without Serve: vLLM called directly, in its own process."""

    engine_starts.append("engine alone")
    actor = (
        ray_cluster.remote(EngineActor)
        .options(num_cpus=0, runtime_env={"env_vars": engine_environment("cpu")})
        .remote(generators.app)
    )
    try:
        ray_cluster.get(actor.start.remote(), timeout=500)
        yield actor
        ray_cluster.get(actor.stop.remote(), timeout=60)
    finally:
        ray_cluster.kill(actor)


@pytest.mark.parametrize("through", ["serve", pytest.param("engine", marks=pytest.mark.faults)])
@pytest.mark.timeout(900)
def test_three_steps_on_vllm_equal_a_plain_loop_with_vllm(
    ray_cluster: Any,
    run: Any,
    generators: Any,
    publish: Any,
    request: Any,
    tmp_path: Path,
    through: str,
) -> None:
    """The plain loop samples from the same replica, or (slow: it starts another engine) from an
    engine with the same configuration without Serve."""
    config = config_for(generators.app.model, "sgd", steps=3)
    weights = ServeWeightSync(generators.handle, generators.registry, push_timeout_s=60)
    _, our_tokens = run(with_asyncrl(config, "shipped", OneAtATime(generators.handle), weights))

    model = load(config.model.path)
    alone = request.getfixturevalue("engine_alone") if through == "engine" else None
    published = []

    def update(step: int) -> None:
        manifest = publish(dict(model.named_parameters()), version=step, run_id="plain")
        if alone is None:
            run(weights.push(manifest))
            return
        staged = fetch_version(
            manifest, expected_tensors(Path(config.model.path), "float32"), 60, tmp_path
        )
        ray_cluster.get(alone.apply.remote(staged.update_info(), step), timeout=120)
        staged.remove()

    def sample(generation: GenerateRequest, step: int) -> tuple[Completion, ...]:
        if step not in published:
            published.append(step)
            update(step)
        completions: tuple[Completion, ...]
        if alone is None:
            generation = replace(generation, min_weights=WeightsId("plain", 1, step))
            completions = run(ServeGenerate(generators.handle).generate(generation)).completions
        else:
            completions = ray_cluster.get(
                alone.generate.remote(replace(generation, min_weights=None)), timeout=120
            )
        return completions

    _, their_tokens = plain_loop(config, model, sample)
    assert our_tokens == their_tokens and len(our_tokens) == 3 * GROUPS
    assert len({ids for group in our_tokens.values() for ids in group}) > GROUPS * N, (
        "completions differ from each other: seeds and weights matter"
    )
