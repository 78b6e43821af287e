"""Training that begins with an adapter's folder: what the plan takes from it, and refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from asyncrl.config import ConfigError, OfflineConfig, load_config
from asyncrl.preflight.model_snapshot import resolve_models
from asyncrl.preflight.plan.offline import OfflinePlan, make_offline_plan
from asyncrl.preflight.plan.plan import make_plan
from asyncrl.preflight.resources.adapter import with_loaded_adapter

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that PEFT itself has saved."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    settings = LoraConfig(r=4, lora_alpha=12, use_rslora=True, target_modules=["q_proj", "o_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), settings)
    model.save_pretrained(path := tmp_path_factory.mktemp("adapters") / "own")
    return path


@pytest.fixture
def changed(folder: Path, tmp_path: Path) -> Any:
    """`changed(settings, tensors)`: the folder with these changes."""

    def make(settings: Mapping[str, object] = {}, tensors: Mapping[str, torch.Tensor] = {}) -> str:
        path = tmp_path / "changed"
        path.mkdir(exist_ok=True)
        tree = json.loads((folder / SETTINGS).read_text())
        (path / SETTINGS).write_text(json.dumps(tree | dict(settings)))
        save_file(load_file(folder / WEIGHTS) | dict(tensors), path / WEIGHTS)
        return str(path)

    return make


@pytest.fixture
def plan(tiny_model: Path, tmp_path: Path) -> Any:
    """`plan(lora, **changes)`: the plan of an SFT run."""

    def make(lora: Mapping[str, object], **changes: Any) -> OfflinePlan:
        data = tmp_path / "sums.jsonl"
        data.write_text('{"prompt": "1+1=", "completion": "2"}\n' * 4)
        tree = {
            "name": "loaded",
            "runs_root": str(tmp_path / "runs"),
            "objective": "sft",
            "batch_size": 2,
            "model": {"path": str(tiny_model)},
            "data": {"train": str(data), "max_length": 12},
            "lora": lora,
        }
        return make_offline_plan(resolve_models(OfflineConfig.model_validate(tree | changes)))

    return make


def test_the_settings_are_those_of_the_adapter(folder: Path, plan: Any) -> None:
    made = plan({"load": str(folder)})
    lora = made.config.lora
    assert (lora.r, lora.alpha, lora.use_rslora, lora.use_dora) == (4, 12, True, False)
    assert set(lora.target_modules) == {"q_proj", "o_proj"} and len(made.version.adapter) == 8
    assert f"begins with the adapter of {folder}" in made.text()
    again = plan({"load": str(folder), "r": 4, "target_modules": ["self_attn.q_proj", "o_proj"]})
    assert again.version.adapter == made.version.adapter


def test_a_setting_that_the_file_leaves_out_has_pefts_value(changed: Any, plan: Any) -> None:
    path = Path(changed())
    tree = json.loads((path / SETTINGS).read_text())
    del tree["lora_alpha"]
    (path / SETTINGS).write_text(json.dumps(tree))
    assert plan({"load": str(path)}).config.lora.alpha == LoraConfig(r=4).lora_alpha == 8


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"r": 8}, r"lora\.r = 8, but the adapter of lora\.load = .* has 4; leave it out"),
        ({"use_rslora": False}, r"lora\.use_rslora = False, but the adapter"),
        ({"target_modules": ["q_proj"]}, r"other matrices .* first '.*o_proj.lora_A.weight': \(4,"),
        ({"target_modules": "all-linear"}, r"first '.*: none there, \(\d+, \d+\) here"),
    ],
)
def test_settings_that_contradict_the_adapter_are_refused(
    folder: Path, plan: Any, lora: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan({"load": str(folder), **lora})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "is an adapter of type 'PROMPT_TUNING'"),
        ({"modules_to_save": ["lm_head"]}, r"has modules_to_save = \['lm_head'\]"),
        ({"rank_pattern": {"q_proj": 8}}, "has rank_pattern = .* merge the adapter into its model"),
        ({"bias": "all"}, "has bias = 'all'"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights = 'pissa'"),
        ({"alpha_pattern": {"q_proj": 8}}, "has alpha_pattern = "),
        ({"lora_bias": True}, "has lora_bias = True"),
        ({"target_parameters": ["experts.down_proj"]}, "has target_parameters = "),
        ({"trainable_token_indices": [3]}, r"has trainable_token_indices = \[3\]"),
        ({"a_later_setting": 3}, "has a_later_setting = 3"),
    ],
)
def test_an_adapter_that_would_be_another_one_here_is_refused(
    changed: Any, plan: Any, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^lora\.load: .*{message}"):
        plan({"load": changed(settings)})


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"target_modules": r".*layers\.\d+\.self_attn\.(q|o)_proj"}, 4),
        ({"layers_to_transform": [1]}, 2),
        ({"layers_to_transform": 0, "layers_pattern": "layers"}, 2),
        ({"exclude_modules": ["layers.0.self_attn.o_proj"]}, 3),
        ({"fan_in_fan_out": True, "init_lora_weights": "gaussian"}, 4),
    ],
)
def test_pefts_other_ways_to_name_the_layers_have_their_effect(
    tiny_model: Path, plan: Any, tmp_path: Path, settings: dict[str, Any], layers: int
) -> None:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    chosen = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "o_proj"], **settings})
    path = tmp_path / "own"
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), chosen).save_pretrained(path)
    assert len(plan({"load": str(path)}).version.adapter) == 2 * layers


def test_a_scale_may_be_a_fraction_and_dropout_is_noted(changed: Any, plan: Any) -> None:
    made = plan({"load": changed({"lora_alpha": 12.5, "lora_dropout": 0.1})})
    assert made.config.lora.alpha == 12.5 and "scale 6.25" in made.text()
    assert [note for note in made.notes if "lora" in note] == [
        "the adapter of lora.load was trained with lora_dropout = 0.1; the learner uses no dropout"
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda value: value.fill_(float("nan")), "has NaN or infinite values"),
        (lambda value: value.bfloat16().fill_(-float("inf")), "has NaN or infinite values"),
        (lambda value: value.to(torch.int8), "has type torch.int8; give an adapter that is not q"),
    ],
)
def test_values_that_cannot_be_trained_are_refused(
    changed: Any, plan: Any, folder: Path, make: Any, message: str
) -> None:
    name, value = max(load_file(folder / WEIGHTS).items())
    load = changed(tensors={name: make(value)})
    with pytest.raises(ConfigError, match=rf"{name}' in .*{WEIGHTS} {message}"):
        plan({"load": load})
    assert plan({"load": str(folder)}).version.adapter, "the other folder is not refused"


def test_other_tensors_and_missing_files_are_refused(
    changed: Any, plan: Any, folder: Path, tmp_path: Path
) -> None:
    head = {"base_model.model.lm_head.weight": torch.ones(2)}
    with pytest.raises(ConfigError, match=r"has 'base_model\.model\.lm_head\.weight', which"):
        plan({"load": changed(tensors=head)})
    name = next(iter(load_file(folder / WEIGHTS)))
    short = name.removeprefix("base_model.model.")
    with pytest.raises(ConfigError, match=rf"has '{name}' under two names; keep one"):
        plan({"load": changed(tensors={short: torch.ones(2)})})
    with pytest.raises(ConfigError, match=r"first '.*': \(3, 3\) there, .*Set model\.path to its"):
        plan({"load": changed(tensors={name: torch.ones(3, 3)})})
    with pytest.raises(ConfigError, match=rf"^lora.load: .*{SETTINGS} cannot be read \(No such"):
        plan({"load": str(tmp_path / "nothing")})
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / SETTINGS).write_text((folder / SETTINGS).read_text())
    with pytest.raises(ConfigError, match=rf"{WEIGHTS} cannot be read .*with safetensors"):
        plan({"load": str(tmp_path / "pickled")})


def test_an_adapter_as_a_model_is_named_for_what_it_is(
    folder: Path, plan: Any, tiny_model: Path
) -> None:
    message = rf"^model\.path = .* is an adapter of '{tiny_model}' and no whole model; set model\.p"
    with pytest.raises(ConfigError, match=message):
        plan(None, model={"path": str(folder)})


def test_the_reference_of_a_loaded_adapter_must_be_named(
    folder: Path, plan: Any, write: Any
) -> None:
    load = {"load": str(folder)}
    with pytest.raises(
        ValueError, match=r"dpo with lora\.load .*name the .* policy in objective\.ref_load"
    ):
        plan(load, objective="dpo")
    changes = {"lora": load, "algorithm.reference.kl_loss_coef": 0.1}
    with pytest.raises(
        ConfigError, match=r"would be model\.path, as it was without the adapter of lora\.load"
    ):
        load_config(write(changes))


def test_generators_take_the_adapter_unless_it_is_dora(
    folder: Path, changed: Any, write: Any
) -> None:
    made = make_plan(resolve_models(load_config(write({"lora": {"load": str(folder)}}))))
    assert made.config.lora is not None and made.config.lora.r == 4
    config = load_config(write({"lora": {"load": changed({"use_dora": True})}}))
    with pytest.raises(
        ConfigError, match=r"lora\.load = .*use_dora: true does not work with gener"
    ):
        with_loaded_adapter(config)
