"""A driver with two learner ranks: `test_two_nodes.py` starts it in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys

import ray
from recorded import recorded_batch

from asyncrl.config import Config
from asyncrl.learning.driver import RayLearner
from asyncrl.preflight.specs import learner_spec

STEPS = 10


def say(**what: object) -> None:
    print("SAYS", json.dumps(what), flush=True)


async def losses(config: Config) -> None:
    """Say how many nodes the ranks have, and the loss and gradient norm of each step."""
    learner = await RayLearner.create(learner_spec(config), "run", 0)
    try:
        results = [await learner.step(recorded_batch(step)) for step in range(STEPS)]
        say(
            result={
                "nodes": len({node for node, _ in learner._processes}),
                "losses": [result.metrics["loss"] for result in results],
                "norms": [result.metrics["grad_norm"] for result in results],
            }
        )
    finally:
        await learner.close()


async def until_it_fails(config: Config) -> None:
    """Step without end beside the learner's watch, as a run does, and say the first error."""
    learner = await RayLearner.create(learner_spec(config), "run", 0)
    say(ranks=[process for _, process in learner._processes])

    async def steps() -> None:
        number = 0
        while True:
            await learner.step(recorded_batch(number % STEPS))
            number += 1
            say(steps=number)

    loops = [asyncio.create_task(steps()), asyncio.create_task(learner.watch())]
    done, running = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
    error = done.pop().exception()
    say(error={"kind": type(error).__name__, "message": str(error)})
    for loop in running:
        loop.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await learner.close()


if __name__ == "__main__":
    address, action, *configs = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    for config in configs:
        asyncio.run(globals()[action](Config.model_validate_json(config)))
