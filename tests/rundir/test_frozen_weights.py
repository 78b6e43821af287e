"""A resumed run keeps the weights of its frozen models."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config, ConfigError, OfflineConfig
from asyncrl.rundir.directory import RunDirectory
from asyncrl.runtime.files.shared import size_and_checksum


class Learner:
    async def save(self, directory: Path) -> dict[str, tuple[int, int]]:
        (directory / "weights").write_text("1")
        return {"weights": size_and_checksum(directory / "weights")}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Two models that differ only in their weights."""
    for name, weights in (("one", b"1" * 9000), ("other", b"2" * 9000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    return tmp_path


def config(models: Path, path: str, kind: dict[str, Any], **changes: Any) -> Config | OfflineConfig:
    tree = {
        "name": "run",
        "runs_root": str(models / "runs"),
        "model": {"path": str(models / path)},
        "data": {"train": "rows.parquet"},
        **kind,
        **changes,
    }
    if "objective" in tree:
        return OfflineConfig.model_validate(tree)
    tree["data"]["max_prompt_length"] = 20
    tree |= {"max_steps": 3, "rollout": {"max_completion_length": 8}}
    tree["reward"] = {"functions": {"exact": {"function": "package.module:function"}}}
    return Config.model_validate(tree)


def begin(used: Config | OfflineConfig) -> None:
    """An attempt that writes a checkpoint."""
    learner: Any = Learner()
    with RunDirectory(used) as directory:
        asyncio.run(directory.checkpoints.write(directory.state, (), learner, None))


KINDS = {
    "objective.ref_load": {"objective": "dpo"},
    "algorithm.reference.ref_load": {"algorithm": {"reference": {"kl_loss_coef": 0.1}}},
    "algorithm.reference.ref_load ": {"algorithm": {"preference": {}}},
    "model.path": {"objective": "sft", "lora": {}},
}


@pytest.mark.parametrize("setting", KINDS)
def test_another_model_in_place_of_a_frozen_one_is_refused(models: Path, setting: str) -> None:
    kind = KINDS[setting]
    begin(config(models, "one", kind))
    begin(config(models, "one", kind, resume="must"))
    shutil.copytree(models / "one", models / "moved")
    begin(config(models, "moved", kind, resume="must"))
    with pytest.raises(ConfigError, match=f"^{setting.strip()} .* has other weights than when"):
        RunDirectory(config(models, "other", kind, resume="must"))


@pytest.mark.parametrize(
    "kind", [{"objective": "sft"}, {"objective": {"name": "dpo", "loss": "simpo"}}]
)
def test_without_a_frozen_model_only_config_and_tokenizer_count(
    models: Path, kind: dict[str, Any]
) -> None:
    """The weights come from the checkpoint."""
    begin(config(models, "one", kind))
    begin(config(models, "other", kind, resume="must"))


def test_another_run_may_have_another_reference_policy(models: Path) -> None:
    load = {"name": "next", "checkpoint": {"load": str(models / "runs" / "run")}}
    kind = KINDS["algorithm.reference.ref_load"]
    begin(config(models, "one", kind))
    begin(config(models, "other", kind, **load))
    pairs = KINDS["objective.ref_load"]
    begin(config(models, "one", pairs, name="pairs"))
    load["checkpoint"] = {"load": str(models / "runs" / "pairs")}
    with pytest.raises(ConfigError, match=r"^objective\.ref_load "):
        RunDirectory(config(models, "other", pairs, **{**load, "name": "third"}))


def test_where_a_teacher_answers_may_change_within_a_run() -> None:
    from asyncrl.rundir.resume import FIXED_IN_RUN, MAY_CHANGE

    assert "algorithm.distillation" in FIXED_IN_RUN
    kept = {"use", "reward_weight"}
    from asyncrl.config import DistillationConfig

    names = {f"algorithm.distillation.{name}" for name in DistillationConfig.model_fields}
    assert names - set(MAY_CHANGE) == {f"algorithm.distillation.{name}" for name in kept}


def test_kto_and_pairs_do_not_continue_one_another(models: Path) -> None:
    """An ordinal counts single completions with KTO, and pairs with the other losses."""
    begin(config(models, "one", {"objective": "dpo"}))
    begin(config(models, "one", {"objective": {"name": "dpo", "loss": "ipo"}}, resume="must"))
    with pytest.raises(ConfigError, match=r"^objective\.loss = kto, but .* was made with ipo"):
        kto = {"objective": {"name": "dpo", "loss": "kto"}}
        RunDirectory(config(models, "one", kto, resume="must"))
    with pytest.raises(ConfigError, match=r"^objective = sft, but .* was made with dpo"):
        RunDirectory(config(models, "one", {"objective": "sft"}, resume="must"))
