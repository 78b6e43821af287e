"""The application's settings and its YAML forms."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from asyncrl.generation.app import build_app
from asyncrl.generation.settings import GeneratorApp

CONFIGS = sorted((Path(__file__).parents[2] / "serve_configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_serve_configs_are_loopback_without_routes_and_build(path: Path) -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    assert schema.http_options.host == "127.0.0.1"
    (application,) = schema.applications
    assert application.route_prefix is None
    assert application.import_path == "asyncrl.generation.app:build_app"
    args = GeneratorApp.model_validate(application.args)
    assert args.board is None
    assert build_app(args) is not None


def test_both_devices_have_a_config() -> None:
    assert [path.stem for path in CONFIGS] == ["generator_cpu", "generator_gpu"]


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="gpu_memory"):
        GeneratorApp.model_validate({"model": "m", "generator": {"gpu_memory": 1}})
