"""What a run needs compared with what nodes have: totals, places per node, slime's arithmetic and
users. No cluster."""

import pytest
from small_config import small_config as config

from asyncrl.preflight.resources.needs import (
    ClusterNode,
    ResourceUser,
    cluster_text,
    placement_text,
    run_needs,
    shortages,
)
from asyncrl.preflight.specs import generator_app, learner_spec, reference_spec

GIB = 1 << 30


def node(name, cpus, gpus=0.0, free=None, **more):
    have = {"CPU": cpus, "GPU": gpus, **more.pop("memory", {})}
    return ClusterNode(name, have, {**have, **(free or {})}, **more)


GPUS = {
    "learner": {"device": "cuda", "world_size": 3, "num_cpus": 4},
    "generator": {"device": "cuda", "num_replicas": 1, "num_cpus": 4},
}


def test_needs_hand_computed():
    by_part = {need.part: need for need in run_needs(config(learner={"world_size": 2}), 100 << 20)}
    ranks, replicas = by_part["learner ranks"], by_part["generator replicas"]
    assert (ranks.count, ranks.amounts) == (2, {"CPU": 0.4, "memory": (25 << 20) * 16 / 2})
    assert replicas.amounts == {
        "CPU": 0.4,
        "memory": (100 << 20) + (256 << 20),
        "shared memory": 100 << 20,
    }
    assert by_part["two published versions"].amounts == {
        "shared memory": 200 << 20,
        "object store": 200 << 20,
    }
    assert all(set(need.amounts) == {"CPU"} for need in run_needs(config()))
    on_gpu = {need.part: need.amounts for need in run_needs(config(**GPUS), 100 << 20)}
    assert on_gpu["learner ranks"] == {"CPU": 4, "GPU": 1} and on_gpu["generator replicas"] == {
        "CPU": 4,
        "GPU": 1,
        "shared memory": 100 << 20,
    }
    offloaded = {
        need.part: need.amounts
        for need in run_needs(
            config(**{**GPUS, "learner": {**GPUS["learner"], "offload_optimizer": "cpu"}}),
            120 << 20,
        )
    }
    assert offloaded["learner ranks"]["memory"] == (30 << 20) * 16 / 3


def test_shared_gpus_are_declared_as_fractions():
    cuda = {"device": "cuda"}
    shared = config(placement="share", learner=cuda, generator=cuda)
    assert {need.part: need.amounts.get("GPU", 0) for need in run_needs(shared)} == {
        "learner ranks": 0.5,
        "generator replicas": 0.35,
        "rollout workers": 0,
        "prompt stream": 0,
        "scoring stream": 0,
    }
    assert shortages(run_needs(shared), [node("a", 8, 1)], "registered") == []
    assert (
        "share     needs total >= 1: learner.gpu_memory_utilization 0.5 +"
        " generator.gpu_memory_utilization 0.35 = 0.85 of a GPU's memory, at most 1"
        "\n  this run: placement: share, which has not run on a GPU"
    ) in placement_text(shared)
    two = config(
        placement="share",
        learner={**cuda, "world_size": 2, "gpu_memory_utilization": 0.55},
        generator={**cuda, "num_replicas": 2, "gpu_memory_utilization": 0.4},
        algorithm={"reference": {"kl_loss_coef": 0.1, "gpu_memory_utilization": 0.05}},
    )
    needs = {need.part: (need.count, need.amounts.get("GPU")) for need in run_needs(two)}
    assert needs["learner ranks"] == (2, 0.55) and needs["generator replicas"] == (2, 0.4)
    assert needs["reference policy"] == (1, 0.05)
    assert shortages(run_needs(two), [node("a", 8, 2)], "registered") == []
    share = "+ algorithm.reference.gpu_memory_utilization 0.05 = 1 of a GPU's memory"
    assert share in placement_text(two)
    judge = {"functions": {"judge": {"function": "m:f"}}, "num_gpus": 1}
    apart = config(placement="share", learner=cuda, generator=cuda, reward=judge)
    assert "0.35 = 0.85 of a GPU's memory" in placement_text(apart), "the judge has its own GPU"
    assert not config(placement="share").shares_gpus and config(placement="share").rank_gpus == 0


def test_turns_on_gpus_need_a_gpu_for_each_rank_and_for_models_that_only_score():
    cuda = {"device": "cuda"}
    shifts = config(
        placement="colocate",
        learner={**cuda, "world_size": 2},
        generator={**cuda, "num_replicas": 2},
        algorithm={"reference": {"kl_loss_coef": 0.1}},
        staleness={"max_staleness": 0},
    )
    assert (
        "  colocate  needs total >= 2 + reference 1 = 3: ranks and replicas on the same GPUs, in"
        " shifts. No more rollout devices than ranks\n"
    ) in placement_text(shifts)
    assert placement_text(shifts).endswith("placement: colocate, which has not run on a GPU")
    needs = {need.part: (need.count, need.amounts.get("GPU")) for need in run_needs(shifts)}
    assert needs["learner ranks"] == (2, 0.6) and needs["generator replicas"] == (2, 0.4)
    assert needs["reference policy"] == (1, 1)
    assert shortages(run_needs(shifts), [node("a", 8, 3)], "registered") == []
    assert shortages(run_needs(shifts), [node("a", 8, 2)], "registered") == [
        "GPU: 3 needed, 2 registered"
    ]
    held = {need.part: need.amounts.get("memory") for need in run_needs(shifts, 30 << 20)}
    assert held["learner ranks"] == (30 << 20) * 16 / 4 / 2, "states wait in host memory"
    assert held["generator replicas"] == 30 << 20, "weights wait in host memory"
    bf16 = shifts.model_copy(update={"learner": shifts.learner.model_copy(update={"bf16": True})})
    held = {need.part: need.amounts.get("memory") for need in run_needs(bf16, 30 << 20)}
    assert held["learner ranks"] == (30 << 20) * 18 / 4 / 2, "and their copy in bfloat16"
    spec, app = learner_spec(shifts), generator_app(shifts)
    assert (spec.rank_gpus, spec.engine_share) == (0.6, 0.85)
    assert (app.num_gpus, app.sleeps, app.generator.gpu_memory_utilization) == (0.4, True, 0.85)


def test_a_rank_in_shifts_leaves_no_whole_gpu_for_a_reference():
    """4 * 0.6 + 0.4 + 1 is below 4, but every GPU has a rank."""
    cuda = {"device": "cuda"}
    shifts = config(
        placement="colocate",
        learner={**cuda, "world_size": 4},
        generator=cuda,
        algorithm={"reference": {"kl_loss_coef": 0.1}},
        staleness={"max_staleness": 0},
    )
    assert shortages(run_needs(shifts), [node("a", 16, 4)], "registered") == [
        "GPU: 5 needed, 4 registered"
    ]
    assert shortages(run_needs(shifts), [node("a", 16, 5)], "registered") == []


def test_a_fraction_of_a_gpu_is_on_one_gpu():
    """Ten ranks of 0.6 would fit into the sum of six GPUs, which have room for six."""
    cuda = {"device": "cuda"}
    shifts = config(
        placement="colocate",
        learner={**cuda, "world_size": 8},
        generator=cuda,
        staleness={"max_staleness": 0},
    )
    assert shortages(run_needs(shifts), [node("a", 16, 8)], "registered") == []
    total, line = shortages(run_needs(shifts), [node("a", 16, 6)], "registered")
    assert total == "GPU: 8 needed, 6 registered"
    assert line.startswith("learner ranks: 8 x (CPU 0.4, GPU 0.6), each on one node"), line
    assert line.endswith("resources fit 6 on a")


def test_the_specs_carry_the_fractions():
    cuda = {"device": "cuda"}
    algorithm = {"reference": {"kl_loss_coef": 0.1}}
    shared = config(placement="share", learner=cuda, generator=cuda, algorithm=algorithm)
    assert learner_spec(shared).rank_gpus == learner_spec(shared).rank_share == 0.5
    reference, app = reference_spec(shared), generator_app(shared)
    assert reference.reference_gpus == 0.1
    assert (app.num_gpus, app.generator.gpu_memory_utilization) == (0.35, 0.35)
    apart = config(learner=cuda, generator=cuda, algorithm=algorithm)
    assert learner_spec(apart).rank_gpus == learner_spec(apart).rank_share == 1
    reference, app = reference_spec(apart), generator_app(apart)
    assert reference.reference_gpus == 1
    assert (app.num_gpus, app.generator.gpu_memory_utilization) == (None, 0.9)


def test_rewards_on_gpus_are_placed_with_their_gpus():
    """Two tasks with half a GPU each, and the same for evaluation if there is one."""
    reward = {"functions": {"r": {"function": "m:r"}}, "tasks": 2, "num_cpus": 3, "num_gpus": 0.5}
    [scoring] = [need for need in run_needs(config(reward=reward)) if need.part == "scoring stream"]
    assert (scoring.count, scoring.amounts) == (2, {"CPU": 3, "GPU": 0.5})
    evaluated = config(reward=reward, eval={"data": "held_out.parquet"})
    [apart] = [need for need in run_needs(evaluated) if need.part == "evaluation's rewards"]
    assert (apart.count, apart.amounts) == (1, {"CPU": 3, "GPU": 0.5})
    assert (
        shortages(run_needs(evaluated), [node("a", 16, 1), node("b", 16, 0.5)], "registered") == []
    )
    assert (
        shortages(run_needs(evaluated), [node("a", 16, 1)], "registered")[0]
        == "GPU: 1.5 needed, 1 registered"
    )
    assert "decoupled needs total >= 0 + 0 + rewards 1.5 = 1.5" in placement_text(evaluated)
    assert "rewards" not in placement_text(config()) and "evaluation's rewards" not in [
        need.part for need in run_needs(config(eval={"data": "h.parquet"}))
    ]


def test_a_run_that_fits_has_no_shortages():
    assert shortages(run_needs(config(), 1 << 20), [node("a", 2.0)], "free") == []
    assert (
        shortages(run_needs(config(**GPUS)), [node("a", 16, 3), node("b", 8, 1)], "registered")
        == []
    )


def test_two_nodes_with_the_same_name_both_count():
    """A node's name is its address and the start of its id. Two nodes on one machine may
    share it."""
    wanted = run_needs(config())
    for order in ([node("a", 8), node("a", 0)], [node("a", 0), node("a", 8)]):
        assert shortages(wanted, order, "registered") == []


def test_a_short_total_is_named_with_both_numbers():
    assert (
        shortages(run_needs(config(**GPUS)), [node("a", 16, 2), node("b", 16, 1)], "registered")[0]
        == "GPU: 4 needed, 3 registered"
    )
    assert (
        shortages(
            run_needs(config(), GIB), [node("a", 2, memory={"shared memory": 2.5 * GIB})], "free"
        )[0]
        == "shared memory: 3.00 GiB needed, 2.50 GiB free"
    )


def test_two_versions_must_fit_into_one_nodes_object_store():
    """Enough /dev/shm is not sufficient: Ray uses a share of it, and would spill everything else to
    disk."""
    small = {"memory": {"shared memory": 64 * GIB, "object store": 1.5 * GIB}}
    short = shortages(
        run_needs(config(), GIB), [node("a", 2, **small), node("b", 2, **small)], "registered"
    )
    assert short == [
        "two published versions: 1 x (shared memory 2.00 GiB, object store 2.00 GiB), each on one"
        " node, but registered resources fit none on any node"
    ]
    assert (
        shortages(
            run_needs(config(), GIB), [node("a", 2, memory={"object store": 2 * GIB})], "registered"
        )
        == []
    )


def test_each_process_needs_a_single_node_with_enough():
    """There are twelve CPUs and four GPUs in total, but no node has both four CPUs and a free GPU
    for every rank."""
    nodes = [node("a", 8, 1), node("b", 3, 3), node("c", 8)]
    assert shortages(run_needs(config(**GPUS)), nodes, "registered") == [
        "learner ranks: 3 x (CPU 4, GPU 1), each on one node, but registered resources fit 1 on a"
    ]
    nodes = [node("a", 64, 4, free={"CPU": 3, "GPU": 4}), node("b", 64, 0)]
    assert shortages(run_needs(config(**GPUS)), nodes, "registered") == []
    assert [line.split(":")[0] for line in shortages(run_needs(config(**GPUS)), nodes, "free")] == [
        "learner ranks",
        "generator replicas",
    ]
    assert shortages(run_needs(config(**GPUS)), nodes, "free")[0].endswith(
        "resources fit none on any node"
    )


def test_memory_must_fit_one_node_and_a_silent_node_may_have_any():
    small = [node(name, 1.5, memory={"memory": 0.3 * GIB}) for name in "ab"]
    assert shortages(run_needs(config(), 1 << 20), small, "free") == []
    wanted = run_needs(config(generator={"kv_cache_memory_bytes": GIB // 2}), 1 << 20)
    assert shortages(wanted, small, "free") == [
        "generator replicas: 1 x (CPU 0.4, memory 513.0 MiB, shared memory 1.0 MiB), each on one"
        " node, but free resources fit none on any node"
    ]
    assert shortages(wanted, [*small, node("c", 1)], "free") == []


@pytest.mark.parametrize(("rank", "replica", "free"), [(0.1, 0.2, 0.6), (0.1, 0.1, 0.5)])
def test_fractional_cpus_tolerate_rounding(rank, replica, free):
    """0.1 + 0.2 is not 0.3 in binary. A need slightly above the free amount still fits."""
    needs = run_needs(config(learner={"num_cpus": rank}, generator={"num_cpus": replica}))
    assert sum(need.count * need.amounts["CPU"] for need in needs) == pytest.approx(free)
    assert shortages(needs, [node("a", 2, free={"CPU": free})], "free") == []


def test_slimes_arithmetic_for_both_placements():
    text = placement_text(config(**GPUS), [node("a", 8, 4, free={"GPU": 1}), node("b", 8, 4)])
    assert "decoupled needs total >= 3 + 1 = 4: 8 registered, 5 free" in text
    assert text.endswith(
        "  colocate  needs total >= 3 = 3: ranks and replicas on the same GPUs, in shifts. No more"
        " rollout devices than ranks\n  share     needs total >= 3: ranks and replicas on the"
        " same GPUs, each with a fraction of the memory\n  this run: placement: decoupled"
    )
    reference = placement_text(config(**GPUS, algorithm={"reference": {"kl_loss_coef": 0.1}}))
    assert (
        "decoupled needs total >= 3 + 1 + reference 1 = 5\n" in reference
        and "colocate  needs total >= 3 + reference 1 = 4:" in reference
    )
    split = config(**{**GPUS, "generator": {**GPUS["generator"], "tensor_parallel_size": 2}})
    text = placement_text(split)
    assert "= 2 GPUs (generator.num_replicas 1 * tensor_parallel_size 2 on cuda)" in text
    assert "decoupled needs total >= 3 + 2 = 5" in text
    (engine,) = [need for need in run_needs(split) if need.part == "generator replicas"]
    assert (engine.count, engine.amounts["GPU"], engine.amounts["CPU"]) == (1, 2, 4)
    parts = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    split = config(**{**GPUS, "generator": {**GPUS["generator"], **parts}})
    (engine,) = [need for need in run_needs(split) if need.part == "generator replicas"]
    assert engine.amounts["GPU"] == 6
    assert (
        "= 6 GPUs (generator.num_replicas 1 * tensor_parallel_size 2 * pipeline_parallel_size 3 on"
    ) in placement_text(split)
    split = config(**{**GPUS, "generator": {**GPUS["generator"], **parts, "nnodes": 3}})
    (engine,) = [need for need in run_needs(split) if need.part == "generator nodes"]
    assert (engine.count, engine.amounts["GPU"], engine.apart) == (3, 2, 3)
    assert "pipeline_parallel_size 3, each on 3 nodes, on cuda)" in placement_text(split)
    assert "= 0 GPUs (learner.world_size 1 on cpu)" in placement_text(
        config()
    ) and "= 0 GPUs (generator.num_replicas 1 on cpu)" in placement_text(config())


def test_the_nodes_of_an_engine_are_different_nodes():
    engines = {"num_replicas": 2, "tensor_parallel_size": 4, "nnodes": 2, "num_cpus": 1}
    wanted = [
        need
        for need in run_needs(config(generator=engines), 100 << 20)
        if need.part == "generator nodes"
    ]
    assert wanted[0].count == 4 and wanted[0].amounts["memory"] == (356 << 20) / 2
    assert wanted[0].amounts["shared memory"] == 100 << 20, "each node has a whole version"
    (line,) = shortages(wanted, [node("a", 8), node("b", 1)], "free")
    assert line.startswith("generator nodes: 4 x (CPU 1, memory 178.0 MiB,"), line
    assert "each on one node and each 2 of an engine on different ones, but free" in line
    assert line.endswith("resources fit 2 on a, 1 on b"), line
    assert not shortages(wanted, [node("a", 2), node("b", 2)], "free")
    assert not shortages(wanted, [node("a", 2), node("b", 1), node("c", 1)], "free")


def test_the_table_shows_each_node_and_its_users():
    users = (
        ResourceUser("Serve replica other#Generator of job 02000000", {"CPU": 4.0, "GPU": 1.0}),
        ResourceUser("2 x Trainer of job 03000000", {"CPU": 2.0}),
    )
    text = cluster_text(
        run_needs(config(**GPUS), GIB),
        [
            node("10.0.0.1", 8, 2, free={"CPU": 2.0, "GPU": 1.0}, users=users),
            node("10.0.0.2", 8, 1),
        ],
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "# cluster, 2 nodes",
        "needed registered free",
        "CPU 16.3 16 10",
        "GPU 4 3 2",
        "shared memory 3.00 GiB not known not known",
        "node 10.0.0.1",
        "CPU 8 2",
        "used by Serve replica other#Generator of job 02000000: CPU 4, GPU 1",
        "used by 2 x Trainer of job 03000000: CPU 2",
    ):
        assert line in lines, text
    assert any(
        line.startswith(
            "room for learner ranks 0 of 3, generator replicas 0 of 1, rollout workers 1 of 1"
        )
        for line in lines
    )
    assert any(
        line.startswith("room for learner ranks 1 of 3, generator replicas 1 of 1")
        for line in lines
    )
    held = node("a", 2, free={"CPU": 1})
    assert cluster_text(run_needs(config()), [held], "no dashboard").endswith(
        "the users of the rest are not known: no dashboard"
    )
    assert "not known" not in cluster_text(run_needs(config()), [node("a", 2)], "no dashboard"), (
        "all resources are free"
    )


@pytest.mark.parametrize("gpus", [0, 1, 3])
def test_a_run_on_cpu_needs_no_gpu(gpus):
    assert "GPU" not in cluster_text(run_needs(config()), [node("a", 2, gpus)])
