"""`placement: share` and `colocate`: where Ray puts the processes of a run on a node with GPUs."""

import json
import subprocess
import sys

import pytest
from small_config import SMALL

SCRIPT = """
import asyncio, json, sys
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from asyncrl.config import Config
from asyncrl.learning.driver import _place_ranks
from asyncrl.preflight.specs import generator_app, learner_spec, reference_spec

@ray.remote(num_cpus=0)
class Process:
    def gpus(self):
        return [int(gpu) for gpu in ray.get_gpu_ids()]

config = Config.model_validate_json(sys.argv[1])
gpus = int(sys.argv[2])
ray.init(address="local", num_cpus=8, num_gpus=gpus, log_to_driver=False, include_dashboard=False)
group = asyncio.run(_place_ranks(learner_spec(config)))
ranks = [
    Process.options(
        num_gpus=config.rank_gpus,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
    ).remote()
    for bundle in range(config.learner.world_size)
]
reference = [Process.options(num_gpus=reference_spec(config).reference_gpus).remote()]
ray.get(reference[0].gpus.remote())
replicas = [
    Process.options(num_gpus=generator_app(config).num_gpus).remote()
    for _ in range(config.engines.num_replicas)
]
print(json.dumps([ray.get([each.gpus.remote() for each in part])
                  for part in (ranks, reference, replicas)]))
"""


SHARE = {
    "placement": "share",
    "learner": {"device": "cuda", "world_size": 2, "gpu_memory_utilization": 0.55},
    "generator": {"device": "cuda", "num_replicas": 2, "gpu_memory_utilization": 0.35},
    "algorithm": {"reference": {"kl_loss_coef": 0.1, "gpu_memory_utilization": 0.1}},
}
COLOCATE = {
    "placement": "colocate",
    "learner": {"device": "cuda", "world_size": 2},
    "generator": {"device": "cuda", "num_replicas": 2},
    "algorithm": {"reference": {"kl_loss_coef": 0.1}},
    "staleness": {"max_staleness": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "gpus", "scored_on"), [(SHARE, 2, ([0], [1])), (COLOCATE, 3, ([2],))]
)
def test_each_gpu_gets_one_rank_and_one_replica(placement, gpus, scored_on):
    config = SMALL | placement
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(config), str(gpus)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    ranks, reference, replicas = json.loads(done.stdout.splitlines()[-1])
    assert sorted(ranks) == sorted(replicas) == [[0], [1]]
    assert reference[0] in scored_on
