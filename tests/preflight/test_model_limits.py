"""The longest sequence of a model, by its config.json."""

import json
import shutil

import pytest
from unprivileged import without_permission

from asyncrl.config import ConfigError, load_config
from asyncrl.preflight.plan.plan import make_plan
from asyncrl.weights.stored import CheckpointFilesError, stored_tensors
from benchmarks.families import family


def test_long_rope_limits_trajectories_to_the_short_frequencies(write, tiny_model, tmp_path):
    """Beyond them, one long trajectory would change all others in its packed row."""
    from transformers import Phi3Config, Phi3ForCausalLM

    model = shutil.copytree(tiny_model, tmp_path / "phi3")
    factors = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
    }
    for original in (28, 27):
        shape = {
            "vocab_size": 64,
            "hidden_size": 128,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "pad_token_id": 0,
        }
        shape |= {"bos_token_id": 1, "eos_token_id": 2}
        made = Phi3Config(
            max_position_embeddings=512,
            original_max_position_embeddings=original,
            rope_parameters=factors,
            **shape,
        )
        Phi3ForCausalLM(made).save_pretrained(model)
        config = load_config(write({"model.path": str(model)}))
        assert config.longest_trajectory == 28
        if original == 28:
            assert make_plan(config).context == 28, (
                "the generators' engines get it too: vLLM chooses by its longest sequence"
            )
            continue
        with pytest.raises(
            ConfigError,
            match=(
                r"= 28 tokens is above original_max_position_embeddings = 27 of model.path ="
                r" .*LongRoPE"
            ),
        ) as error:
            make_plan(config)
        assert "\n" not in str(error.value)


def test_long_rope_limits_pieces_of_supervised_rows_too(write, tmp_path):
    """A piece may fill a micro-batch, and be longer than any trajectory."""
    files = {
        "warm_start.packing_strategy": "bfd_split",
        "warm_start.data": "HERE/train.parquet",
        "eval.data": "HERE/train.parquet",
        "model.path": str(family("phi3_longrope").save(tmp_path / "phi3")),
    }
    with pytest.raises(
        ConfigError,
        match=(
            r"creates pieces of up to .* = 65 tokens, above the model's context of 64; lower"
            r" learner\.max_tokens_per_gpu"
        ),
    ):
        make_plan(load_config(write({**files, "learner.max_tokens_per_gpu": 65})))


def test_the_context_of_a_nested_text_config_is_used(write, tmp_path, tiny_model):
    shutil.copytree(tiny_model, tmp_path / "nested")
    tree = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "nested" / "config.json").write_text(
        json.dumps(
            {**{name: tree[name] for name in ("model_type", "architectures")}, "text_config": tree}
        )
    )
    with pytest.raises(ConfigError, match=r"above the model's context of 512"):
        make_plan(
            load_config(
                write(
                    {"model.path": str(tmp_path / "nested"), "rollout.max_completion_length": 4000}
                )
            )
        )


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "."]
)
def test_a_file_without_permission_is_not_called_missing(write, tiny_model, tmp_path, name):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = load_config(write({"model.path": str(model)}))
    message = rf"^model\.path = '.*': .*{name} cannot be read \(Permission denied\); give this user"
    with without_permission(model / name), pytest.raises(ConfigError, match=message):
        make_plan(config)


def test_a_node_without_permission_to_read_the_weights_says_so(tiny_model, tmp_path):
    """safetensors says `No such file or directory`."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    with (
        without_permission(model / "model.safetensors"),
        pytest.raises(CheckpointFilesError, match=r"cannot be read \(Permission denied\); give"),
    ):
        stored_tensors(model)
