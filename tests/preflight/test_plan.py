"""`asyncrl plan`: what it shows, and what it refuses with exit code 2, before anything is
allocated."""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from asyncrl import cli
from asyncrl.config import ConfigError, load_config
from asyncrl.preflight.plan import make_plan, no_gpu_text
from asyncrl.testing.families import family


@pytest.fixture
def write(tmp_path, tiny_model):
    def write(changes=None, rows=("1 + 2 =", "30 - 4 =")):
        train = tmp_path / "train.parquet"
        pq.write_table(
            pa.table(
                {
                    "prompt": pa.array(rows, pa.string()),
                    "answer": pa.array(["3"] * len(rows), pa.string()),
                }
            ),
            train,
        )
        tree = {
            "name": "run",
            "runs_root": str(tmp_path / "runs"),
            "max_steps": 3,
            "model": {"path": str(tiny_model)},
            "data": {"train": str(train), "max_prompt_length": 20},
            "rollout": {"max_completion_length": 8},
            "reward": {"functions": {"exact": {"function": "asyncrl.rewards.builtin:exact_match"}}},
        }
        for name, value in (changes or {}).items():
            *parents, leaf = name.split(".")
            at = tree
            for parent in parents:
                at = at.setdefault(parent, {})
            at[leaf] = value.replace("HERE", str(tmp_path)) if isinstance(value, str) else value
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


def weight_bytes(model):
    return sum(
        tensor.nbytes for file in model.glob("*.safetensors") for tensor in load_file(file).values()
    )


def test_shows_arithmetic_cpus_memory_prompts_and_stops(write):
    text = make_plan(load_config(write())).text()
    for part in (
        "global_batch_size   = groups per step",
        "learner ranks",
        "free in /dev/shm",
        "# disk, for checkpoints and exported models\n",
        (
            "parameters, as float32 under the checkpoint's names\n  tensors as its files have them:"
            " none; left out, as nothing computes with them: none\n"
        ),
        "/ 1024 bytes a token = 262016 tokens a replica",
        "first prompt '1 + 2 ='",
        "stop token ids",
        "decoupled needs total >= 0 + 0 = 0\n",
    ):
        assert part in text


def test_shows_each_source_and_what_all_settings_that_name_data_hold(write, tmp_path):
    """Of a mixture: a glob, a folder with splits, and one file; the others take sources too."""
    for name, count in (("a", 2), ("b", 1), ("folder/test", 3), ("folder/train", 5)):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            "".join(
                json.dumps({"prompt": f"{row} + 1 =", "answer": "1", "level": row}) + "\n"
                for row in range(count)
            )
        )
    test = {"path": str(tmp_path / "folder"), "split": "test"}
    glob = {"path": str(tmp_path / "[ab].jsonl"), "weight": 1, "name": "sums"}
    train = [
        glob,
        {**test, "split": "train", "weight": 2},
        {"path": str(tmp_path / "train.parquet"), "weight": 1},
    ]
    changes = {
        "data.train": train,
        "eval.data": test,
        "eval.sets": {"two": {"data": [test, str(tmp_path / "a.jsonl")]}},
        "warm_start.data": [str(tmp_path / "b.jsonl"), test],
    }
    text = make_plan(load_config(write(changes))).prompts_text()
    for line in (
        "  source sums: 3 rows used, of 2 files; 25.0% of the prompts\n",
        "  source folder.train: 5 rows used, of 1 file; 50.0% of the prompts\n",
        "  source train: 2 rows used, of 1 file; 25.0% of the prompts\n",
        "  data.train: 10 of 10 rows used;",
        "  eval.data: 3 of 3 rows used;",
        "  eval.sets.two.data: 5 of 5 rows used;",
        "  supervised rows of warm_start.data: 4 of 4 rows used;",
        "columns for the reward: answer, level, source_name\n",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, ["# evaluation\n  none (eval.data)"]),
        (
            {"eval.data": "HERE/train.parquet", "eval.max_prompts": 1},
            [
                "greedy: 1 prompts x 1 at temperature 0, up to 8 tokens each",
                "before and after training; under a second",
                "with one replica updates wait meanwhile",
            ],
        ),
        (
            {
                "eval.sets": {
                    "long": {"data": "HERE/train.parquet", "n": 256, "max_completion_length": 300}
                },
                "eval.every_steps": 5,
            },
            [
                "long: 2 prompts x 256 at temperature 1, up to 300 tokens each",
                "before, every 5 steps and after; about 43 s on one replica",
                "num_replicas: 2",
            ],
        ),
        (
            {"eval.data": "HERE/train.parquet", "generator.num_replicas": 2},
            [
                "of generator.num_replicas = 2, one replica keeps its version meanwhile, and"
                " training goes on with the others"
            ],
        ),
        (
            {"eval.data": "HERE/train.parquet", "eval.in_flight": True},
            ["a completion may have tokens of several versions"],
        ),
        (
            {"eval.data": "HERE/train.parquet", "generator.attach": "app"},
            ["generator.attach: if the application has several replicas"],
        ),
    ],
)
def test_shows_what_an_evaluation_asks_for_and_what_it_does_to_training(
    write, tmp_path, changes, lines
):
    changes = json.loads(json.dumps(changes).replace("HERE", str(tmp_path)))
    text = make_plan(load_config(write(changes))).text()
    for line in lines:
        assert line in text


def test_shows_what_the_limits_do_to_every_file(write, tmp_path):
    # The supervised rows of the held-out file are the same ones, with their targets.
    changes = {
        "data.max_prompt_length": 7,
        "data.prompt_policy": "truncate",
        "data.max_length": 9,
        "data.length_policy": "drop",
    }
    changes |= {"eval.data": "HERE/train.parquet", "warm_start.data": "HERE/train.parquet"}
    plan = make_plan(load_config(write(changes, ["1 + 2 =", "10 + 20 =", "4 ="])))
    text = plan.text()
    for line in (
        "data.train: 3 of 3 rows used; max_prompt_length: 1 row cut by 2 tokens",
        "eval.data: 3 of 3 rows used; max_prompt_length: 1 row cut by 2 tokens",
        (
            "supervised rows of warm_start.data: 3 of 3 rows used; max_prompt_length: 1 row cut by"
            " 2 tokens"
        ),
        "longest prompt 7 tokens; columns for the reward: answer",
        "max_prompt_length 7 + max_completion_length 8, at most max_length 9, = 9 tokens",
    ):
        assert line in text
    metrics = plan.truncation_metrics()
    assert (
        metrics["truncation/data.train/prompt_rows"] == 1
        and metrics["truncation/data.train/prompt_tokens"] == 2
    )
    assert metrics["truncation/supervised_rows_of_warm_start.data/used"] == 3
    explained = set(
        re.findall(
            r"`([a-z_0-9./<>]+)`", (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
        )
    )
    assert {re.sub("/[^/]+/", "/<file>/", name) for name in metrics} <= explained and {
        name.split("/")[1] for name in metrics
    } <= explained
    plan = make_plan(
        load_config(write({**changes, "data.max_length": 8}, ["1 + 2 =", "10 + 20 =", "4 ="]))
    )
    assert (
        "supervised rows of eval.data: 1 of 3 rows used; max_length: 2 rows dropped\n"
        in plan.prompts_text()
    )
    assert "data.train: 3 of 3 rows used" in plan.prompts_text()


def test_shows_what_ranks_that_share_rows_take_together(write):
    text = make_plan(
        load_config(
            write(
                {
                    "learner.world_size": 4,
                    "learner.sequence_parallel_size": 2,
                    "learner.max_tokens_per_gpu": 14,
                }
            )
        )
    ).text()
    assert (
        "max_tokens_per_gpu 14 * sequence_parallel_size 2 = 28 tokens" in text
        and "world_size 4 / sequence_parallel_size 2 = 2" in text
    )


def test_shows_what_template_stops_and_bos_do(write, llama_model, tmp_path):
    changes = {"model.path": str(llama_model), "rollout.rollout_stop": [" plus", "<|user|>"]}
    text = make_plan(
        load_config(
            write(
                {**changes, "data.max_prompt_length": 40},
                ["<s><|user|>1 + 2 =<|end|><|assistant|>", "30 - 4 ="],
            )
        )
    ).prompts_text()
    assert (
        "1 of 2 prompts begin with BOS themselves: it is not added again" in text
        and "\n  its token ids 1, 3, " in text
    )
    assert "3 (rollout_stop '<|user|>')" in text and "; stop strings ' plus'" in text
    changes |= {
        "data.apply_chat_template": True,
        "data.system_prompt": "Be brief.",
        "data.max_prompt_length": 80,
    }
    text = make_plan(load_config(write(changes))).prompts_text()
    assert (
        "\n  system prompt of 9 characters\n  first prompt '<s><|system|>Be brief.<|end|><|user|>1"
        " + 2 =<|end|><|assistant|>'\n" in text
    )


def test_a_machine_without_a_gpu_is_named_where_something_asks_for_one(write):
    config = load_config(write({"generator.device": "cuda"}))
    assert (
        "this machine has no GPU, and generator.device is cuda: name a cluster that has some by"
        " RAY_ADDRESS, or set device: cpu" in no_gpu_text(config, 0)
    )
    assert no_gpu_text(config, 1) == "" and no_gpu_text(load_config(write()), 0) == ""


def test_ten_lines_and_the_config_are_there_on_request(write, capsys):
    path = str(write())
    assert cli.run("plan", path, [], {"brief"}) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == [
        *(
            "run",
            "model",
            "prompts",
            "batch",
            "length",
            "staleness",
            "algorithm",
            "learner",
            "generators",
            "rewards",
        )
    ]
    assert (
        "2 rows used, the longest of " in said and "first '1 + 2 ='" in said and "= 28 " not in said
    )
    plan = make_plan(load_config(path))
    assert "temperature: 1.0" in plan.config_text() and "temperature: 1.0" not in plan.text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data.chat_template_kwargs": {"enable_thinking": False}},
            "data.train = '.*': data.chat_template_kwargs: .* knows no enable_thinking",
        ),
        (
            {"data.tools": [{"type": "function", "function": {"name": "add"}}]},
            "data.train = '.*': data.tools or data.tools_column: .* leaves tools out",
        ),
        (
            {"data.tools_column": "tools"},
            r"data.tools_column = 'tools' is not a column of data.train = .*\['prompt', 'answer'\]",
        ),
        (
            {"data.system_prompt": "Be brief.", "data.apply_chat_template": False},
            "data.system_prompt acts on chats",
        ),
    ],
)
def test_what_the_template_ignores_is_refused(write, llama_model, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_plan(
            load_config(
                write({"model.path": str(llama_model), "data.apply_chat_template": True, **changes})
            )
        )
    assert "\n" not in str(error.value)


def test_tools_of_a_column_are_in_the_prompts_and_reach_the_reward(write, llama_model, tmp_path):
    model = shutil.copytree(llama_model, tmp_path / "tools")
    (model / "chat_template.jinja").write_text(
        "{{ tools | tojson }}" + (llama_model / "chat_template.jinja").read_text()
    )
    path = write(
        {
            "model.path": str(model),
            "data.apply_chat_template": True,
            "data.tools_column": "tools",
            "data.max_prompt_length": 80,
        }
    )
    table = pq.read_table(tmp_path / "train.parquet")
    pq.write_table(
        table.append_column("tools", pa.array(['[{"name": "add"}]', None])),
        tmp_path / "train.parquet",
    )
    text = make_plan(load_config(path)).prompts_text()
    assert (
        '\n  1 tool\n  first prompt \'[{"name": "add"}]<s>' in text
        and "columns for the reward: answer, tools" in text
    )


def test_a_tokenizer_that_does_not_give_text_back_is_refused(write, llama_model, tmp_path):
    model = shutil.copytree(llama_model, tmp_path / "no_decoder")
    tree = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(tree | {"decoder": None}))
    with pytest.raises(
        ConfigError,
        match=(
            r"model.path = '.*no_decoder': its tokenizer does not decode what it encodes: .*; check"
            r" pre_tokenizer"
        ),
    ) as error:
        make_plan(load_config(write({"model.path": str(model)})))
    assert "\n" not in str(error.value)


def test_shows_what_ends_a_loop(write):
    assert "n-gram" not in make_plan(load_config(write())).prompts_text()
    assert (
        "; so does an n-gram of up to 16 tokens 20 times in a row"
        in make_plan(load_config(write({"rollout.repetition_stop": 20}))).prompts_text()
    )


def test_a_long_rope_model_is_held_to_its_short_frequencies(write, tiny_model, tmp_path):
    """Past them, one long trajectory of a packed row would change all the others."""
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
                "the generators' engines are told as well: vLLM chooses by its longest sequence"
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


def test_pieces_of_supervised_rows_are_held_to_the_short_frequencies_too(write, tmp_path):
    """A piece may fill a micro-batch, and reach further than any trajectory."""
    split = {"warm_start.completion_policy": "split", "warm_start.packing_strategy": "bfd_split"}
    files = {
        "warm_start.data": "HERE/train.parquet",
        "eval.data": "HERE/train.parquet",
        "model.path": str(family("phi3_longrope").save(tmp_path / "phi3")),
    }
    with pytest.raises(
        ConfigError,
        match=(
            r"makes pieces of up to .* = 65 tokens, above the model's context of 64; lower"
            r" learner\.max_tokens_per_gpu"
        ),
    ):
        make_plan(load_config(write({**split, **files, "learner.max_tokens_per_gpu": 65})))


def test_the_context_of_a_text_config_is_seen(write, tmp_path, tiny_model):
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


def test_two_ranks_and_two_replicas_fit_two_cpus(write):
    plan = make_plan(load_config(write({"learner.world_size": 2, "generator.num_replicas": 2})))
    assert sum(part.count * part.cpus for part in plan.parts) <= 2.0 + 1e-9


@pytest.mark.parametrize(
    ("changes", "rows", "message"),
    [
        (
            {"data.train": "nowhere.parquet"},
            None,
            "data.train = '/.*nowhere.parquet': no such file",
        ),
        ({}, [], "has no rows"),
        ({"data.prompt_column": "question"}, None, "is not a column of"),
        ({}, ["1 + 2 =", "1" * 30], r"row 1 has 30 tokens, above data.max_prompt_length = 20"),
        ({"model.path": "nowhere"}, None, "model.path = '/.*nowhere'"),
        ({"rollout.max_completion_length": 4000}, None, "above the model's context"),
        (
            {"rollout.max_completion_length": 4000, "data.max_length": 600},
            None,
            "data.max_length = 600 tokens is above the model's context of 512",
        ),
        (
            {
                "rollout.max_completion_length": 1,
                "warm_start.data": "HERE/train.parquet",
                "eval.data": "HERE/train.parquet",
            },
            None,
            (
                "warm_start.data = .*: the completion of row 0 has 2 tokens, above"
                " rollout.max_completion_length = 1"
            ),
        ),
        ({"rollout.rollout_stop": ["Ä"]}, None, "rollout.rollout_stop 'Ä' never shows in a text"),
        ({"name": "../up"}, None, "name = '../up'"),
        ({"rollout.num_steps_per_rollout": 3}, None, "does not divide"),
        (
            {"learner.world_size": 3, "learner.sequence_parallel_size": 3},
            None,
            "size = 3 does not divide the 4 attention heads of .*; use one of 1, 2, 4",
        ),
        (
            {
                "learner.world_size": 2,
                "learner.sequence_parallel_size": 2,
                "learner.max_tokens_per_gpu": 13,
            },
            None,
            "= 28 is above .* = 26",
        ),
        (
            {
                "eval.data": "HERE/train.parquet",
                "eval.sets": {"long": {"max_completion_length": 600}},
            },
            None,
            (
                "eval.sets.long.max_completion_length = 600 and the longest prompt of 20 tokens are"
                " above the model's context of 512; lower it"
            ),
        ),
        (
            {"eval.sets": {"far": {"data": "/nowhere.parquet"}}},
            None,
            "eval.sets.far.data = '/nowhere.parquet': no such file",
        ),
        ({"warm_start.data": "nowhere.parquet"}, None, "needs eval.data"),
        (
            {
                "warm_start.data": "HERE/train.parquet",
                "warm_start.completion_policy": "split",
                "warm_start.packing_strategy": "wrapped",
                "eval.data": "HERE/train.parquet",
                "learner.max_tokens_per_gpu": 600,
            },
            None,
            (
                "completion_policy = 'split' makes pieces of up to .* = 600 tokens, above the"
                " model's context of 512"
            ),
        ),
        (
            {"warm_start.data": "nowhere.parquet", "eval.data": "HERE/train.parquet"},
            None,
            "warm_start.data = '/.*nowhere.parquet': no such file",
        ),
        (
            {
                "warm_start.data": "HERE/train.parquet",
                "eval.data": "HERE/train.parquet",
                "warm_start.target_column": "reply",
            },
            None,
            "warm_start.target_column = 'reply' is not a column of warm_start.data",
        ),
        (
            {"generator.kv_cache_memory_bytes": 255 << 10},
            None,
            (
                "generator.kv_cache_memory_bytes = 261120 holds 0 tokens of 1024 bytes, and the"
                " longest request has .*; raise it to 262144 or more"
            ),
        ),
        (
            {"reward.functions": {"mine": {"function": "nowhere_to_be_found:score"}}},
            None,
            "reward.functions.mine.function: .*'nowhere_to_be_found'",
        ),
        (
            {
                "reward.functions": {
                    "mine": {
                        "function": "asyncrl.rewards.builtin:llm_judge",
                        "arguments": {"judge": {"url": "http://127.0.0.1:1/v1"}},
                    }
                }
            },
            None,
            "reward.functions.mine.arguments: model is missing; set it",
        ),
        (
            {"reward.functions": {"mine": {"function": "asyncrl.rewards.builtin:exact"}}},
            None,
            "reward.functions.mine: there is no 'exact' in asyncrl",
        ),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(write, tmp_path, changes, rows, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_plan(load_config(write(changes) if rows is None else write(changes, rows)))
    assert "\n" not in str(error.value) and not (tmp_path / "runs").exists()


def test_a_loss_that_no_run_has_shown_is_called_experimental(write):
    assert "experimental" not in make_plan(load_config(write({}))).text()
    text = make_plan(
        load_config(write({"algorithm": {"loss": "sapo", "correction": {"reject_above": 0.5}}}))
    ).text()
    assert (
        "loss sapo against old policy behavior, token_mean; corrected; correction: reject_above 0.5"
        in text
        and "experimental: no whole run" in text
    )


def test_the_command_exits_with_2_and_one_line(write):
    command = [
        sys.executable,
        "-m",
        "asyncrl.cli",
        "plan",
        str(write({"rollout.num_steps_per_rollout": 3})),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (
        result.returncode == 2
        and result.stdout == ""
        and len(result.stderr.strip().splitlines()) == 1
    )


def test_the_command_finds_rewards_in_the_current_directory(write, tmp_path):
    (tmp_path / "my_rewards.py").write_text(
        "def score(prompts, **columns):\n    return [1.0] * len(prompts)\n"
    )
    config = write({"reward.functions": {"mine": {"function": "my_rewards:score"}}})
    command = [Path(sys.executable).with_name("asyncrl"), "plan", config]
    planned = subprocess.run(command, capture_output=True, cwd=tmp_path, text=True)
    assert planned.returncode == 0 and planned.stderr == ""
    assert re.search(
        r"\n  stop token ids .*\n\n# rewards\n(  .*\n)+\n# learner memory, per rank\n(  .*\n)+ "
        r" this machine: .* GiB of memory, .* free; .*\n$",
        planned.stdout,
    )
    assert (
        b"'my_rewards'" in subprocess.run(command, capture_output=True, cwd=tmp_path.parent).stderr
    )


def test_weights_of_a_version_are_counted_in_the_published_type(write, tiny_model):
    stored = weight_bytes(tiny_model)
    assert json.loads((tiny_model / "config.json").read_text()).get("dtype") == "float32"
    assert make_plan(load_config(write({"model.dtype": "bfloat16"}))).weights_bytes == stored // 2


@pytest.fixture
def hybrid(tmp_path, tiny_model):
    shutil.copytree(tiny_model, tmp_path / "hybrid")
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "hybrid" / "config.json").write_text(
        json.dumps(config | {"layer_types": ["linear_attention", "full_attention"]})
    )
    return str(tmp_path / "hybrid")


@pytest.mark.parametrize("part", ["model.path", "algorithm.ref_load"])
def test_packed_rows_of_a_model_that_cannot_be_packed_are_refused_by_its_config(
    write, hybrid, part
):
    changes = {
        part: hybrid,
        "learner.packing": "rows",
        **({"algorithm.kl_loss_coef": 0.1} if part != "model.path" else {}),
    }
    with pytest.raises(
        ConfigError,
        match=(
            rf"{part} = '.*hybrid': model_type 'qwen3' has layers of type linear_attention.*; set"
            r" learner.packing: none"
        ),
    ) as error:
        make_plan(load_config(write(changes)))
    assert "\n" not in str(error.value)


def test_the_plan_says_how_the_learner_takes_trajectories_and_why(write, hybrid):
    text = make_plan(load_config(write({"model.path": hybrid}))).text()
    assert (
        "unpacked: one trajectory a forward, with the model's own attention, because this model"
        " (model_type 'qwen3') has layers of type linear" in text
    )
    assert (
        "learner.packing: none asks for it, and this model could be packed"
        in make_plan(load_config(write({"learner.packing": "none"}))).text()
    )
    assert "packed: many trajectories in one row" in make_plan(load_config(write({}))).text()


@pytest.mark.parametrize("packing", [None, "none"])
def test_ranks_cannot_share_a_row_of_one_trajectory(write, hybrid, tiny_model, packing):
    changes = {"model.path": str(tiny_model) if packing else hybrid, "learner.packing": packing}
    changes |= {"learner.world_size": 2, "learner.sequence_parallel_size": 2}
    with pytest.raises(
        ConfigError,
        match=(
            r"learner\.sequence_parallel_size = 2 shares packed rows, and this model .*; set"
            r" sequence_parallel_size: 1"
        ),
    ):
        make_plan(load_config(write(changes)))


def test_a_mixture_is_planned_with_its_buffers_and_refused_when_it_lacks_an_expert(write, tmp_path):
    model = family("glm4_moe").save(tmp_path / "model")
    plan = make_plan(load_config(write({"model.path": str(model), "data.max_prompt_length": 40})))
    assert plan.weights_bytes == weight_bytes(model)
    assert (
        "as its files have them: 1 (first model.layers.1.mlp.gate.e_score_correction_bias);"
        " left out" in plan.text()
    )
    tensors = load_file(model / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if ".experts.3." not in name},
        model / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"of 3 experts for 'model.layers.1.mlp.experts.*, and Glm4MoeForCausalLM has 4;"
            r" complete it"
        ),
    ) as error:
        make_plan(load_config(write({"model.path": str(model), "data.max_prompt_length": 40})))
    assert "\n" not in str(error.value)


def test_a_model_that_nothing_can_train_is_refused_by_its_config(write, tmp_path, tiny_model):
    shutil.copytree(tiny_model, tmp_path / "encoder")
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "encoder" / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    with pytest.raises(
        ConfigError,
        match=(
            r"model_type 'bert' is not a causal language model .*; use a decoder that"
            r" predicts the next token"
        ),
    ):
        make_plan(load_config(write({"model.path": str(tmp_path / "encoder")})))


def test_a_bpe_tokenizer_with_a_chat_template_and_two_ends(write, llama_model):
    plan = make_plan(
        load_config(write({"model.path": str(llama_model), "data.apply_chat_template": True}))
    )
    assert (
        plan.prompts.first_text == "<s><|user|>1 + 2 =<|end|><|assistant|>"
        and plan.prompts.first_ids.count(1) == 1
    )
    assert plan.stops.tokens == {
        2: ("generation config", "tokenizer EOS"),
        5: ("chat end token", "generation config"),
    }
    assert plan.weights_bytes == weight_bytes(llama_model)


CODE = {"reward.functions": {"code": {"function": "asyncrl.rewards.builtin:code_tests"}}}


def test_shows_the_level_at_which_code_runs(write):
    from asyncrl.sandbox import probe

    best = probe().best
    if best is None:
        with pytest.raises(
            ConfigError,
            match=(
                r"reward\.sandbox\.level = 'landlock': sandbox level 'landlock' is not reached"
                r" here \("
            ),
        ):
            make_plan(load_config(write({**CODE, "reward.sandbox.level": "landlock"})))
        return
    text = make_plan(load_config(write({**CODE, "reward.sandbox.level": "landlock"}))).text()
    assert (
        f"# sandbox\n  code that the model wrote runs at level {best} here, as on every machine"
        " that scores; asked for: landlock" in text
    )
    assert "# sandbox" not in make_plan(load_config(write())).text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "runs code that the model wrote: set reward.sandbox.level"),
        ({"reward.sandbox.level": "none"}, "reward.sandbox.level"),
        (
            {"reward.sandbox.level": "container"},
            "'container' is what an outside service gives; set reward.sandbox.service",
        ),
        (
            {"reward.sandbox.level": "landlock", "reward.sandbox.wall_s": 30.0},
            "reward.sandbox.wall_s = 30 is not below reward.deadline_s = 30",
        ),
        (
            {"reward.sandbox.level": "landlock", "reward.sandbox.service": "http://127.0.0.1:1"},
            "ASYNCRL_SANDBOX_TOKEN has 0 characters",
        ),
        (
            {"reward.sandbox.level": "landlock", "reward.sandbox.paths": ["/"]},
            "sandbox path '/' would show programs far more",
        ),
        (
            {"reward.sandbox.level": "landlock", "reward.sandbox.paths": ["here"]},
            "reward.sandbox.paths",
        ),
        (
            {"reward.sandbox.level": "landlock", "reward.sandbox.python": "/no/python"},
            "cannot start '/no/python'",
        ),
        (
            {
                "reward.functions": {"f": {"function": "asyncrl.rewards.builtin:exact_match"}},
                "reward.sandbox.cpu_s": 1.0,
            },
            "acts only with reward.sandbox.level",
        ),
        (
            {
                "reward.sandbox.level": "landlock",
                "reward.sandbox.service": "http://127.0.0.1:1",
                "reward.sandbox.python": "/usr/bin/python3",
            },
            "acts only with reward.sandbox.level and without a service",
        ),
    ],
)
def test_refuses_a_sandbox_that_there_is_not(write, changes, message, monkeypatch):
    monkeypatch.delenv("ASYNCRL_SANDBOX_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_plan(load_config(write({**CODE, **changes})))


@pytest.fixture
def checkpoint(tmp_path):
    """`checkpoint(family, change)`: a tiny one whose tensors `change` has changed, by name."""
    from safetensors.torch import load_file, save_file

    def made(name, change):
        path = family(name).save(tmp_path / "made")
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return made


def quantized(tensors):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)


def without_an_expert(tensors):
    del tensors["model.layers.0.block_sparse_moe.experts.2.w2.weight"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "llama",
            quantized,
            "'model.layers.0.mlp.up_proj.weight' of the checkpoint has type int8: it is quantized",
        ),
        (
            "mixtral",
            without_an_expert,
            (
                "tensors of 3 experts for 'model.layers.0.mlp.experts.down_proj', and"
                " MixtralForCausalLM has 4; complete it"
            ),
        ),
    ],
)
def test_tensors_that_cannot_be_trained_are_refused(write, checkpoint, name, change, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(load_config(write({"model.path": str(checkpoint(name, change))})))


def test_a_checkpoint_without_a_tokenizer_or_of_an_unknown_type_is_refused_in_one_line(
    write, checkpoint
):
    path = checkpoint("llama", lambda tensors: None)
    tree = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**tree, "model_type": "zork"}))
    with pytest.raises(
        ConfigError, match=r"made': transformers cannot read its config.json \(.*zork"
    ) as error:
        make_plan(load_config(write({"model.path": str(path)})))
    assert "\n" not in str(error.value)
    (path / "config.json").write_text(json.dumps(tree))
    path = path.rename(path.with_name("bare"))
    for file in path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(
        ConfigError,
        match=r"bare': its tokenizer cannot be loaded .*; put the files of its tokenizer there",
    ) as error:
        make_plan(load_config(write({"model.path": str(path)})))
    assert "\n" not in str(error.value)


def test_plan_options_and_overrides_may_stand_in_any_order(write, capsys):
    path = str(write())
    for arguments in (
        ["plan", "--brief", path, "--rollout.temperature", "0.5"],
        ["plan", path, "--rollout.temperature", "0.5", "--brief"],
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0 and len(capsys.readouterr().out.splitlines()) == 10
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", path, "--config", "--rollout.temperature", "0.5"])
    assert ended.value.code == 0 and "temperature: 0.5" in capsys.readouterr().out


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"asyncrl {version('asyncrl')}\n"
