"""Users of resources: merged by name from hand-made claims, and read from the state API of a real
two-node cluster."""

import json
import subprocess
import sys

import pytest
from ray.util.state.common import ActorState, PlacementGroupState, TaskState
from small_config import SMALL

from asyncrl.preflight.resources.needs import ResourceUser
from asyncrl.run.cluster.resource_usage import _claims, group_users


def actor(node, class_name, job="01000000", name=None, group=None, **resources):
    return ActorState(
        "id",
        class_name,
        "ALIVE",
        job,
        name,
        node,
        1,
        "",
        placement_group_id=group,
        required_resources=resources,
    )


def test_users_with_one_name_are_merged_and_the_largest_is_first():
    claims = [
        ("n", "a", {"CPU": 1.0}),
        ("n", "a", {"CPU": 0.5, "memory": 9.0}),
        ("n", "b", {"GPU": 1.0}),
        ("m", "a", {"CPU": 2.0}),
        ("m", "none", {}),
    ]
    assert group_users(claims) == {
        "n": (ResourceUser("b", {"GPU": 1.0}), ResourceUser("2 x a", {"CPU": 1.5})),
        "m": (ResourceUser("a", {"CPU": 2.0}),),
    }


def test_actors_in_a_placement_group_are_counted_once():
    bundles = [{"node_id": "n", "unit_resources": {"CPU": 4.0, "GPU": 1.0}}]
    group = PlacementGroupState("g", "", "02000000", "CREATED", bundles)
    living = [
        actor("n", "RankProcess", "02000000", group="g", CPU=4.0, GPU=1.0),
        actor("n", "Serve", name="SERVE_REPLICA::app#Generator#x1", CPU=0.4),
    ]
    task = TaskState(
        task_id="t",
        attempt_number=0,
        name="read",
        state="RUNNING",
        job_id="03000000",
        actor_id=None,
        type="NORMAL_TASK",
        func_or_class_name="read",
        parent_task_id="",
        node_id="n",
        worker_id=None,
        worker_pid=None,
        error_type=None,
        required_resources={"CPU": 1.0},
    )
    assert group_users(_claims([group], living, [task])) == {
        "n": (
            ResourceUser("placement group (RankProcess) of job 02000000", {"CPU": 4.0, "GPU": 1.0}),
            ResourceUser("task read of job 03000000", {"CPU": 1.0}),
            ResourceUser("Serve replica app#Generator of job 01000000", {"CPU": 0.4}),
        )
    }


SCRIPT = """
import asyncio, contextlib, json, os, sys, time
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group
from asyncrl.run.cluster import placement
from asyncrl.config import Config, ConfigError
from asyncrl.contracts.errors import PlacementError
from asyncrl.preflight.resources.needs import run_needs, shortages

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": True})
cluster.add_node(num_cpus=2)
ray.init(address=cluster.address, log_to_driver=False)
TREE = json.loads(sys.argv[1])

def config(cpus, **more):
    return Config.model_validate({**TREE, "learner": {"num_cpus": cpus}, **more})

def message_of(work):
    try:
        returned = asyncio.run(work)
        return {"returned": returned and returned[1]}
    except (PlacementError, ConfigError) as error:
        return {"error": str(error)}

with_model = Config.model_validate({**TREE, "model": {"path": sys.argv[3]}})
models = [message_of(placement.check_models(with_model))]
placement.look = lambda path: "cannot be read (Permission denied)"
models.append(message_of(placement.check_models(with_model)))
answers = {"models": models, "never": message_of(placement.wait_for_resources(config(3.0,
    placement_timeout_s=1), 1 << 20))}

class Holder:
    def here(self):
        return True

users = [ray.remote(Holder).options(num_cpus=1.5,
    scheduling_strategy="SPREAD").remote() for _ in range(2)]
ray.get([user.here.remote() for user in users])
# Half a CPU is free on each node: a rank of 0.55 does not fit, although the total is enough.
tight = dict(generator={"num_cpus": 0.0}, rollout={**TREE["rollout"]}, placement_timeout_s=1)
lines = []
waiting = placement.wait_for_resources(config(0.55, **tight), 1 << 20, lines.append)
answers["held"] = message_of(waiting)
answers["lines"] = lines
async def freed():
    waiting = asyncio.create_task(placement.wait_for_resources(config(0.55, **{**tight,
        "placement_timeout_s": 120}), 1 << 20, lines.append))
    while len(lines) < 2:
        await asyncio.sleep(0.05)
    ray.kill(users[0])
    return await waiting
answers["freed"] = message_of(freed())
ray.kill(users[1])
group = placement_group([{"CPU": 1}], lifetime="detached")
ray.get(group.ready())
os.environ["RAY_ADDRESS"] = cluster.address
ray.shutdown()
with open(sys.argv[2], "w") as file, contextlib.redirect_stdout(file):
    small, large = config(0.4), config(3.0)
    code = placement.plan_on_cluster(small, 1 << 20), placement.plan_on_cluster(large, 1 << 20)
answers["codes"] = code
print("ANSWERS " + json.dumps(answers), flush=True)
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_of_two_nodes(tmp_path, tiny_model):
    """The model check on each node; a run that never fits, that does not fit now, and that fits in
    time; and `plan --cluster`."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(SMALL), str(tmp_path / "plan"), str(tiny_model)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    answers = (
        json.loads(
            next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS "))[8:]
        )
        if done.returncode == 0
        else done.stderr[-3000:]
    )
    print(json.dumps(answers, indent=1), (tmp_path / "plan").read_text())
    readable, unreadable = answers["models"]
    assert readable == {"returned": None}
    assert "cannot be read (Permission denied) on node" in unreadable["error"]
    never, held = answers["never"]["error"], answers["held"]["error"]
    assert never.startswith(
        "the cluster is too small for this run after placement_timeout_s = 1 s (learner ranks: 1 x"
        " (CPU 3, memory 4.0 MiB), each on one node, but registered resources fit none"
    )
    assert "# cluster, 2 nodes" in never and "decoupled needs total >= 0 + 0 = 0" in never
    assert held.startswith(
        "no room on the cluster after placement_timeout_s = 1 s (learner ranks: 1 x (CPU 0.55"
    )
    assert held.count("used by Holder of job ") == 2 and "not known" not in held
    assert (
        answers["lines"][0].startswith(
            "waiting up to 1 s for room on the cluster: learner ranks: 1 x (CPU 0.55"
        )
        and "used by Holder" in answers["lines"][0]
    )
    assert "room for learner ranks 1 of 1" in answers["freed"]["returned"]
    assert answers["codes"] == [0, 1]
    text = (tmp_path / "plan").read_text()
    assert (
        "this run fits now" in text
        and "this run does not fit here: learner ranks: 1 x (CPU 3" in text
    )
    assert "used by placement group of job " in text
