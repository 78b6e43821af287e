"""Measures the CPU time of a group outside engine and learner, by process. Coordinator, rollout
workers, Serve and scoring are real. A fake engine in the replica makes the completions at once, and
a fake learner trains nothing. The figures do not contain the prompt stream, the records of the run,
the router, and vLLM's own front end in the replica: `benchmarks.against_trl` shows those.

    python -m benchmarks.group_cost [--groups 2000]

Prints the milliseconds of each process per group, once for short completions (8 of 6 tokens) and
once for longer ones (8 of 64 tokens), without the time that the fake engine itself takes. The exit
code is 0 if every bar is met.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from ray import serve
from ray.serve.config import ProxyLocation

from asyncrl.config import Config
from asyncrl.contracts import GenerateRequest, Prompt, State
from asyncrl.control import Concurrency, Coordinator, Parts, Schedule, Staleness
from asyncrl.generation import Generator, ServeGenerate
from asyncrl.observe import cpu_seconds, cpu_seconds_between
from asyncrl.preflight import scoring_spec, worker_spec
from asyncrl.rewards import RayScores
from asyncrl.rollout import start_rollouts
from asyncrl.run import shut_down_ray, start_local_ray
from asyncrl.testing import FakeGenerate, FakeLearner, FakePrompts, FakeRecorder, FakeWeightSync

APPLICATION = "fake-engine"
SAMPLES, GROUPS_PER_STEP, MAX_STALENESS = 8, 64, 2
WARM_UP_STEPS = 4
CASES = ((6, 3.0), (64, 5.0))
"""(tokens of a completion, most milliseconds of a group)"""


class Replica:
    """A Serve replica whose completions are random, and always of the version that is asked for."""

    generate_many = Generator.generate_many

    def __init__(self) -> None:
        self._calls = set()

    async def _generate(self, request: GenerateRequest):
        return await FakeGenerate(version=request.min_weights.version).generate(request)


class AddsPrompts(FakePrompts):
    """Prompts with the dataset columns of the quickstart."""

    async def next(self) -> Prompt:
        prompt = await super().next()
        return replace(
            prompt, text="12+34=", token_ids=(5, 6, 14, 7, 8, 16), columns={"answer": "46"}
        )


class NoRecorder(FakeRecorder):
    """Records nothing."""

    def record(self, *event: object) -> None: ...

    def outcomes(self, *outcomes: object) -> None: ...


@dataclass(frozen=True)
class Cost:
    """CPU seconds of a group, by process, and groups per second."""

    by_process: dict[str, float]
    groups_per_s: float


def fake_engine_seconds(length: int, repeats: int = 200) -> float:
    """CPU seconds that the fake engine takes for one group."""
    fake = FakeGenerate()
    request = GenerateRequest((5, 6), SAMPLES, length, 1.0, seed=1, deadline_s=60, ignore_eos=True)

    async def generate() -> None:
        for seed in range(repeats):
            await fake.generate(replace(request, seed=seed))

    began = time.process_time()
    asyncio.run(generate())
    return (time.process_time() - began) / repeats


async def measured(length: int, groups: int, directory: Path) -> Cost:
    """The cost of a group whose completions have this many tokens."""
    config = Config.model_validate(
        {
            "name": "group_cost",
            "max_steps": 1,
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "rollout": {
                "n_samples_per_prompt": SAMPLES,
                "max_completion_length": length,
                "ignore_eos": True,
            },
            "reward": {
                "processes": 1,
                "functions": {"exact": {"function": "asyncrl.rewards.builtin:exact_match"}},
            },
        }
    )
    steps = WARM_UP_STEPS + max(1, groups // GROUPS_PER_STEP)
    marks: list[tuple[float, dict[str, float]]] = []

    class Learner(FakeLearner):
        async def step(self, batch):
            if self.version in (WARM_UP_STEPS, steps - 1):
                marks.append((time.monotonic(), cpu_seconds(psutil.Process())))
            return await super().step(batch)

    handle = serve.get_app_handle(APPLICATION)
    rollouts = start_rollouts(worker_spec(config, "run", 1, lambda: ServeGenerate(handle)))
    scores = RayScores(scoring_spec(config), 1, rollouts.workers, rollouts, directory)
    rollouts.when_lost = scores.lost
    try:
        await rollouts.ready()
        outstanding = GROUPS_PER_STEP * (MAX_STALENESS + 1)
        parts = Parts(
            AddsPrompts(),
            rollouts,
            scores,
            Learner(GROUPS_PER_STEP, latency=0.0),
            FakeWeightSync(),
            NoRecorder(),
            concurrency=Concurrency(outstanding, outstanding, 8),
        )
        schedule = Schedule(
            steps + MAX_STALENESS + 1, Staleness(MAX_STALENESS, GROUPS_PER_STEP), least_usable=1
        )
        await Coordinator(parts, schedule, State("run", 1, 0, 0, 0, ())).run()
    finally:
        await scores.close()
        await rollouts.close()
    (began, before), (ended, after) = marks
    made = (steps - 1 - WARM_UP_STEPS) * GROUPS_PER_STEP
    used = cpu_seconds_between(before, after)
    return Cost({name: of / made for name, of in used.items()}, made / (ended - began))


def main() -> int:
    """Measure and print. The exit code is 0 if every bar is met."""
    parser = argparse.ArgumentParser(description="Measure the CPU time of a group.")
    parser.add_argument("--groups", type=int, default=2000)
    arguments = parser.parse_args()
    start_local_ray(4, configure_logging=False)
    serve.start(proxy_location=ProxyLocation.Disabled)
    deployment = serve.deployment(
        name="Generator", ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=100_000
    )(Replica)
    serve.run(deployment.bind(), name=APPLICATION, route_prefix=None)
    met = True
    try:
        for length, most_ms in CASES:
            with tempfile.TemporaryDirectory() as directory:
                cost = asyncio.run(measured(length, arguments.groups, Path(directory) / "groups"))
            fake_s = fake_engine_seconds(length)
            total_ms = 1e3 * (sum(cost.by_process.values()) - fake_s)
            print(
                f"{SAMPLES} x {length} tokens: {total_ms:.2f} ms of CPU a group (at most"
                f" {most_ms:g}), {cost.groups_per_s:.0f} groups/s"
            )
            for name, seconds in sorted(cost.by_process.items(), key=lambda item: -item[1]):
                if seconds > 2e-5:
                    print(f"  {1e3 * seconds:7.2f} ms  {name}")
            print(f"  {-1e3 * fake_s:7.2f} ms  the fake engine itself", flush=True)
            met = met and total_ms <= most_ms
    finally:
        serve.shutdown()
        shut_down_ray()
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
