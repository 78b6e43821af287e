"""The application's settings, and the YAML configs that ship with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from asyncrl.config import load_config
from asyncrl.generation.app import build_app
from asyncrl.generation.replica import Generator
from asyncrl.generation.settings import GeneratorApp
from asyncrl.preflight.specs import generator_app
from asyncrl.serving.standing import build_standing_app

CONFIGS = sorted((Path(__file__).parents[2] / "serve_configs").glob("generator_*.yaml"))

pytestmark = pytest.mark.usefixtures("own_serve")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_serve_configs_are_loopback_and_build(path: Path) -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    assert schema.http_options.host == "127.0.0.1"
    (application,) = schema.applications
    assert application.route_prefix == "/"
    assert application.import_path == "asyncrl.serving.standing:build_standing_app"
    args = GeneratorApp.model_validate(application.args)
    assert args.http
    assert build_standing_app(args)._bound_deployment.func_or_class.__name__ == "HttpGenerator"


def test_each_device_has_a_config() -> None:
    assert [path.stem for path in CONFIGS] == ["generator_cpu", "generator_gpu"]


def test_a_jobs_own_generators_are_the_same_without_http() -> None:
    config = load_config(Path(__file__).parents[2] / "jobs" / "quickstart" / "quickstart.yaml")
    deployment = build_app(generator_app(config))._bound_deployment
    assert deployment.func_or_class is Generator and not hasattr(
        Generator, "__serve_build_asgi_app__"
    )
    standing = build_standing_app(GeneratorApp(model="m", http=True))._bound_deployment
    assert issubclass(standing.func_or_class, Generator) and standing.name == deployment.name


def test_a_replica_declares_the_gpus_of_its_engine_or_a_fraction() -> None:
    def gpus(generator: dict[str, Any], **settings: Any) -> float | None:
        args = GeneratorApp.model_validate({"model": "m", "generator": generator, **settings})
        options = build_app(args)._bound_deployment.ray_actor_options
        declared: float | None = options.get("num_gpus")
        return declared

    cuda = {"device": "cuda", "gpu_memory_utilization": 0.35}
    assert gpus(cuda, num_gpus=0.4) == 0.4 and gpus(cuda) == 1
    assert gpus({**cuda, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}) == 4
    assert not gpus({})
    assert gpus({**cuda, "gpu_memory_utilization": 0.85}, num_gpus=0.4, sleeps=True) == 0.4


def test_an_engine_of_several_nodes_has_a_bundle_on_each() -> None:
    def config(**generator: Any) -> Any:
        args = GeneratorApp.model_validate({"model": "m", "generator": generator})
        return build_app(args)._bound_deployment._replica_config

    parts = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_cpus": 0.5}
    spread = config(**parts, nnodes=2, device="cuda")
    assert spread.placement_group_bundles == [{"CPU": 0.5, "GPU": 2.0}] * 2
    assert spread.placement_group_strategy == "STRICT_SPREAD"
    assert spread.ray_actor_options["num_gpus"] == 2
    environment = spread.ray_actor_options["runtime_env"]["env_vars"]
    assert environment.keys().isdisjoint({"VLLM_HOST_IP", "GLOO_SOCKET_IFNAME"})
    assert config(**parts, nnodes=4).placement_group_bundles == [{"CPU": 0.5}] * 4

    whole = config(**parts, device="cuda")
    assert whole.placement_group_bundles is None and whole.placement_group_strategy is None
    assert whole.ray_actor_options["runtime_env"]["env_vars"]["VLLM_HOST_IP"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"max_lora_rank": 8, "generator": {"tensor_parallel_size": 2, "nnodes": 2}},
            "max_lora_rank does not work with generator.nnodes = 2",
        ),
        ({"generator": {"nnodes": 2}}, "generator.nnodes = 2 does not divide tensor_parallel_size"),
        ({"num_gpus": 0.5}, "num_gpus = 0.5 needs generator.device: cuda"),
        (
            {"num_gpus": 0.5, "generator": {"device": "cuda"}},
            "num_gpus = 0.5 is below generator.gpu_memory_utilization = 0.9; raise it",
        ),
        (
            {"num_gpus": 1, "generator": {"device": "cuda", "tensor_parallel_size": 2}},
            "num_gpus = 1 is for engines on a fraction of one GPU",
        ),
        ({"sleeps": True}, "sleeps: true needs generator.device: cuda"),
        (
            {"sleeps": True, "generator": {"device": "cuda"}},
            "sleeps: true only has an effect in a job with placement: colocate",
        ),
        (
            {
                "sleeps": True,
                "num_gpus": 0.4,
                "generator": {"device": "cuda", "in_flight": "drain"},
            },
            "sleeps: true does not work with generator.in_flight = 'drain', since a rest frees",
        ),
        ({"served_name": "m"}, "needs http: true"),
        (
            {"generator": {"min_replicas": 1}, "http": True},
            "is a training job's setting; leave it out, and set num_replicas",
        ),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        GeneratorApp.model_validate({"model": "m", **settings})


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="gpu_memory"):
        GeneratorApp.model_validate({"model": "m", "generator": {"gpu_memory": 1}})
