"""Settings of a run on a dataset."""

import re
from pathlib import Path

import pytest
import yaml

from asyncrl.config import (
    Config,
    ConfigError,
    OfflineConfig,
    field_names,
    load_any,
    load_config,
    load_offline,
)
from asyncrl.config.aliases import explain_unknown, other_names
from asyncrl.config.run_settings import Limits
from asyncrl.contracts.section import kinds_of

SFT = {
    "name": "sft",
    "objective": "sft",
    "model": {"path": "model"},
    "data": {"train": "rows.parquet"},
}
DPO = {**SFT, "objective": "dpo"}
NAMED = {"name": "dpo"}
KTO, SIMPO = ({**NAMED, "loss": loss} for loss in ("kto", "simpo"))
REWARD_MODEL = {**SFT, "objective": "reward_model"}


@pytest.fixture
def write(tmp_path):
    def write(tree, **changes):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({**tree, **changes}))
        return path

    return write


def test_the_objective_tells_the_kinds_of_run_apart(write):
    assert isinstance(load_any(write(SFT)), OfflineConfig)
    assert load_any("jobs/quickstart/quickstart.yaml") == load_config(
        "jobs/quickstart/quickstart.yaml"
    )
    assert isinstance(load_any("jobs/quickstart/quickstart.yaml"), Config)


def test_the_command_may_name_the_objective(write):
    without = {name: value for name, value in SFT.items() if name != "objective"}
    assert load_offline(write(without), objective="sft").objective.name == "sft"
    with pytest.raises(ConfigError, match="has objective = 'dpo'; run `asyncrl dpo`, or set"):
        load_offline(write(DPO), objective="sft")
    with pytest.raises(ConfigError, match=r"has objective = 'x\\ny'; set objective: sft"):
        load_offline(write({**SFT, "objective": "x\ny"}), objective="sft")


@pytest.mark.parametrize("given", [SFT, {name: SFT[name] for name in SFT if name != "objective"}])
def test_an_override_may_not_name_another_objective_than_the_command(write, given):
    with pytest.raises(ConfigError, match="--objective dpo is not what `asyncrl sft` trains; run"):
        load_offline(write(given), ["--objective", "dpo"], objective="sft")
    assert load_any(write(given), ["--objective", "dpo"]).objective.name == "dpo"


def test_a_mapping_of_the_objective_is_that_of_the_command(write):
    tree = {**SFT, "objective": {"loss": "ipo"}}
    assert load_offline(write(tree), objective="dpo").objective.loss.name == "ipo"
    with pytest.raises(ConfigError, match=r"objective\.name = None: use one of sft, dpo, rew"):
        load_any(write(tree))
    named = load_any(write({**tree, "objective": {"name": "dpo", "ce_coef": 0.5}}))
    assert (named.objective.name, named.objective.ce_coef) == ("dpo", 0.5)


def test_a_file_without_an_objective_is_told_of_it(write):
    without = {name: value for name, value in SFT.items() if name != "objective"}
    with pytest.raises(ConfigError, match="rollout is missing; set it, or set objective: sft or d"):
        load_any(write(without))


def test_null_unsets_a_setting_that_may_be_a_list(write):
    tree = {**SFT, "data": {"train": "x", "tools": [{}]}, "eval": {"data": "x"}, "max_steps": 2}
    config = load_offline(
        write(tree), ["--eval.data", "null", "--data.tools=null", "--max_steps", "null"]
    )
    assert (config.eval.data, config.data.tools, config.max_steps) == (None, None, None)
    with pytest.raises(ConfigError, match="batch_size = None: input should be a valid integer"):
        load_offline(write(tree), ["--batch_size", "null"])
    with pytest.raises(ConfigError, match="batch_sizes is unknown"):
        load_offline(write(tree), ["--batch_sizes", "null"])


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"objective": {"name": "dpo", "ref_load": ""}}, "objective.ref_load = ''"),
        ({"data": {"train": [{"path": " "}]}}, "data.train.0.path = ' '"),
        ({"eval": {"data": ""}}, "eval.data = ''"),
        ({"checkpoint": {"save": ""}}, "checkpoint.save = ''"),
    ],
)
def test_an_empty_path_does_not_become_the_current_directory(write, changes, setting):
    with pytest.raises(ConfigError, match=f"^{setting} is an empty path; give one, or leave it"):
        load_offline(write(DPO, **changes))


def test_a_config_on_a_dataset_is_refused_where_generators_are_needed(write):
    with pytest.raises(ConfigError, match="has objective = 'sft', which trains on a dataset"):
        load_config(write(SFT))
    with pytest.raises(ConfigError, match="has objective = 'dpo', which trains on a dataset"):
        load_config(write({**DPO, "objective": {"name": "dpo"}}))
    for given, name in (("rlhf", "objective"), ({"name": "rlhf"}, r"objective\.name")):
        with pytest.raises(ConfigError, match=f"^{name} = 'rlhf': use one .* or leave objective"):
            load_any(write({**SFT, "objective": given}))


def test_objectives_have_their_default_learning_rates(write):
    assert load_offline(write(SFT)).learning_rate == 2e-5
    assert load_offline(write(REWARD_MODEL)).learning_rate == 1e-5
    assert load_offline(write(DPO)).learning_rate == 1e-6
    given = load_offline(write(SFT, learner={"learning_rate": 0.0, "bf16": True}))
    assert given.learning_rate == 0.0 and given.learner.bf16


def test_overrides_and_paths(write, monkeypatch, tmp_path):
    monkeypatch.setenv("ASYNCRL_RUNS", str(tmp_path / "runs"))
    config = load_offline(
        write(SFT, model={"path": "{runs_root}/model"}),
        ["--data.max_length", "77", "--batch_size", "5", "--data.chat_template_kwargs.x", "1"],
    )
    assert (config.data.max_length, config.batch_size) == (77, 5)
    assert config.data.chat_template_kwargs == {"x": 1}
    assert config.model.path == str(tmp_path / "runs" / "model")


@pytest.mark.parametrize(
    ("rows", "changes", "steps"),
    [
        (64, {}, 2),
        (65, {}, 3),
        (10, {}, 1),
        (64, {"num_epochs": 2.5}, 5),
        (64, {"max_steps": 7, "num_epochs": 9}, 7),
    ],
)
def test_steps_follow_the_epochs(write, rows, changes, steps):
    assert load_offline(write(SFT, **changes)).steps(rows) == steps


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {**SFT, "objective": {"name": "sft", "loss": "ipo"}},
            "^objective.loss has no effect with objective: sft; leave it out, or use it .*: dpo$",
        ),
        (
            {**SFT, "objective": {"name": "dpo", "packing_strategy": "wrapped"}},
            "^objective.packing_strategy has no effect with objective: dpo; .* objective: sft$",
        ),
        (
            {**SFT, "sft": {"packing_strategy": "wrapped"}},
            "^sft.packing_strategy has moved; write objective: {name: sft, packing_strategy: …};",
        ),
        (
            {**DPO, "dpo": {"loss": "ipo"}},
            "^dpo.loss has moved; write objective: {name: dpo, loss: …}; leave",
        ),
        (
            {**SFT, "data": {"train": "x", "length_policy": "split"}},
            "length_policy: split needs objective: sft with packing_strategy: bfd_split",
        ),
        (
            {**SFT, "data": {"train": "x", "max_length": 5000}},
            "data.max_length = 5000 is above learner.max_tokens_per_gpu = 4096",
        ),
        (
            {**SFT, "objective": {**NAMED, "loss": {"name": "ipo", "label_smoothing": 0.1}}},
            "objective.loss.label_smoothing has no effect with loss: ipo; .* with loss: sigmoid$",
        ),
        (
            {
                **DPO,
                "objective": {**NAMED, "loss": {"name": "simpo", "length_normalized": True}},
            },
            "objective.loss.length_normalized has no effect with loss: simpo; .* sigmoid or hinge$",
        ),
        (
            {**SFT, "objective": {"name": "dpo", "loss": "simpo", "ref_load": "x"}},
            "objective.ref_load = .* only has an effect with a loss with a reference",
        ),
        (
            {**SFT, "objective": {**NAMED, "loss": {"beta": 0.0}}},
            r"objective.loss.beta = 0.0: input should be greater than 0",
        ),
        (
            {**SFT, "objective": {**NAMED, "loss": {"beta": 1e308}}},
            r"objective.loss.beta = 1e\+308: input should be less than",
        ),
        ({**SFT, "num_epochs": 1e300}, r"num_epochs = 1e\+300: input should be less than"),
        ({**DPO, "data": {"train": []}}, "data.train is an empty list"),
        ({**SFT, "rollout": {}}, "rollout is unknown"),
        (
            {**SFT, "objective": {**NAMED, "loss": {"simpo_margin": 0.7}}},
            "simpo_margin has no effect with loss: sigmoid; .* with loss: simpo$",
        ),
        (
            {**DPO, "dpo": {"beta": 0.1}},
            "dpo.beta has moved; write objective: {name: dpo, loss: {name: …, beta: …}}; leave",
        ),
        (
            {**SFT, "objective": {"name": "dpo", "loss": "simpo", "reference_batch": 8}},
            "objective.reference_batch = 8 only has an effect with a loss with a reference",
        ),
        (
            {**SFT, "learner": {"gpu_memory_utilization": 0.5}},
            "learner.gpu_memory_utilization = 0.5 only has an effect with learner.device: cuda",
        ),
        ({**SFT, "eval": {"every_steps": 5}}, "only has an effect with eval.data"),
        ({**SFT, "eval": {"max_rows": 5}}, "eval.max_rows = 5 only has an effect with eval.data"),
        (
            {**SFT, "objective": {"name": "dpo", "loss": "simpo", "ref_num_cpus": 1}},
            "objective.ref_num_cpus = 1.0 only has an effect with a loss with a reference",
        ),
        (
            {
                **DPO,
                "objective": {**NAMED, "loss": {"name": "ipo", "length_normalized": True}},
            },
            "objective.loss.length_normalized has no effect with loss: ipo; .* sigmoid or hinge$",
        ),
        (
            {**SFT, "data": {"train": "x", "length_side": "keep_end"}},
            "data.length_side has moved; write data: {length_policy: {name: truncate, side: …}}$",
        ),
        *(
            (
                {
                    **SFT,
                    "data": {"train": "x", "length_policy": {"name": name, "side": "keep_end"}},
                },
                f"length_policy.side has no effect with length_policy: {name}; .* truncate$",
            )
            for name in ("error", "drop", "split")
        ),
        (
            {**SFT, "learner": {"value_learning_rate": 1e-4}},
            "^learner.value_learning_rate has moved; write"
            " objective: {name: reward_model, value_learning_rate: …}; leave it out",
        ),
        (
            {**SFT, "objective": {"name": "sft", "value_learning_rate": 1e-4}},
            "objective.value_learning_rate has no effect with objective: sft; .* reward_model$",
        ),
        (
            {**SFT, "observe": {"completions_every": 3}},
            "observe.completions_every = 3 has no effect",
        ),
        ({**SFT, "name": "../x"}, "name = '../x'"),
        (
            {**SFT, "objective": {**NAMED, "loss": {"desirable_weight": 2.0}}},
            "desirable_weight has no effect with loss: sigmoid; .* with loss: kto$",
        ),
        (
            {**SFT, "objective": KTO, "batch_size": 1},
            "batch_size = 1 gives KTO's baseline",
        ),
        (
            {**SFT, "objective": {**NAMED, "loss": {"name": "kto", "label_smoothing": 0.1}}},
            "label_smoothing has no effect with loss: kto; .* with loss: sigmoid$",
        ),
        (
            {**SFT, "reward_model": {"center_coef": 0.1}},
            "^reward_model.center_coef has moved; write objective: {name: reward_model, cen",
        ),
        (
            {**REWARD_MODEL, "data": {"train": "x", "max_length": 4096}},
            "a reward model needs one token more",
        ),
        (
            {**REWARD_MODEL, "data": {"train": "x", "length_policy": "split"}},
            "length_policy: split needs objective: sft",
        ),
    ],
)
def test_contradictions_are_refused(write, tree, message):
    with pytest.raises(ConfigError, match=message):
        load_offline(write(tree))


def test_a_splitting_strategy_takes_rows_above_the_cap(write):
    data = {"train": "x", "max_length": 5000, "length_policy": "split"}
    config = load_offline(
        write(SFT, data=data, objective={"name": "sft", "packing_strategy": "bfd_split"})
    )
    assert config.longest_trajectory == 4096


def test_what_the_run_reads_from_the_settings(write):
    learner = {"world_size": 100, "num_cpus": 0.5}
    loss = {"name": "hinge", "length_normalized": True}
    dpo = {"name": "dpo", "ref_load": "other", "ref_num_cpus": 3, "loss": loss}
    config = load_offline(write(DPO, learner=learner, objective=dpo, batch_size=200, max_steps=9))
    assert [Path(path).name for path in config.models.values()] == ["model", "other"]
    assert (config.num_cpus, config.placement_wait_s) == (53.0, 100.0)
    assert (config.limits, config.last_step) == (Limits(0, 1, 200), 9)
    config = load_offline(write(SFT, learner={"num_cpus": 0.5}))
    assert (config.num_cpus, config.placement_wait_s, config.last_step) == (0.5, 60.0, 1)


def test_a_reward_model_adds_a_token_to_the_longest_sequence(write):
    """A model with learned positions has none for it at the end of its context."""
    data = {"train": "x", "max_length": 512}
    config = load_offline(write(REWARD_MODEL, data=data))
    assert config.longest_trajectory == 513 and "adds" in config.longest_text
    assert load_offline(write(DPO, data=data)).longest_trajectory == 512


def test_a_reference_is_read_only_by_losses_that_have_one(write):
    assert list(load_offline(write(SFT)).models) == ["model.path"]
    assert list(load_offline(write(DPO)).models) == ["model.path", "objective.ref_load"]
    assert list(load_offline(write(DPO, objective=SIMPO)).models) == ["model.path"]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("loss_type", "asyncrl calls it objective.loss"),
        ("beta", "asyncrl calls it objective.loss.beta"),
        ("num_train_epochs", "asyncrl calls it num_epochs"),
        ("gradient_accumulation_steps", "asyncrl calls it batch_size, over all ranks"),
        ("packing", "not needed: rows are always packed"),
        ("assistant_only_loss", "asyncrl calls it data.loss_on: assistant"),
        ("lr", "asyncrl calls it learner.learning_rate"),
        ("num_generations", "see asyncrl sft --help"),
        ("max_prompt_length", "asyncrl calls it data.max_length"),
        ("f_divergence_type", "not implemented: the losses use the reverse KL"),
        ("pipeline_model_parallel_size", "not implemented: a learner rank computes whole layers"),
        ("expert_parallel_size", "not implemented: a learner rank computes whole layers"),
        ("remove_unused_columns", "not needed: other columns of a row are not used"),
        ("center_rewards_coefficient", "asyncrl calls it objective.center_coef"),
        ("batchsize", "did you mean batch_size?"),
        ("lora_r", "asyncrl calls it lora.r"),
        ("trainer.nnodes", "asyncrl calls it learner.world_size, over all nodes"),
        ("offload_train", "not implemented: a run on a dataset has no generators; remove it"),
        ("offload", "asyncrl calls it learner.offload_optimizer"),
        ("vllm_sleep_level", "a run on a dataset has no generators; remove it"),
        ("rollout.nnodes", "asyncrl calls it learner.world_size, over all nodes"),
        ("rollout.free_cache_engine", "a run on a dataset has no generators; remove it"),
    ],
)
def test_names_of_other_systems_are_answered_with_settings_of_this_kind(name, answer):
    text = explain_unknown(name, field_names(OfflineConfig))
    assert answer in text and "generator." not in text and "placement" not in text


def test_the_table_of_foreign_names_points_at_settings_that_exist():
    known = set(field_names(OfflineConfig))
    for foreign, here in other_names().offline_renamed.items():
        first = re.split("[:, ]", here.removeprefix("nothing: "))[0]
        assert here.startswith("nothing: ") or first in known, foreign


def test_every_setting_may_change_on_a_resume_or_is_fixed() -> None:
    """A new setting must be sorted into one of the two: does it change which rows exist, their
    order, or what the checkpoint's weights mean?"""
    from asyncrl.config import OfflineConfig
    from asyncrl.rundir.resume import FIXED

    may_change = {
        *("name", "runs_root", "resume", "max_restarts", "ray_without_token"),
        *("placement_timeout_s", "max_steps", "num_epochs", "batch_size"),
        # The content of these is compared by its hash.
        *("model.path", "model.revision", "data.train", "data.prompt_column"),
        *("model.dtype", "eval", "checkpoint", "observe", "learner"),
        *(f"objective.{name}" for name in ("loss", "ce_coef", "ref_num_cpus", "reference_batch")),
        *("objective.packing_strategy", "objective.center_coef", "objective.value_learning_rate"),
    }
    names = [
        f"{section}.{name}"
        for section in ("data", "objective", "model")
        for one in kinds_of(OfflineConfig.model_fields[section].annotation)
        for name in one.model_fields
    ]
    names += [
        name for name in OfflineConfig.model_fields if name not in ("data", "objective", "model")
    ]
    assert set(names) <= {*FIXED, *may_change}
