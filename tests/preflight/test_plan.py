"""What `asyncrl plan` refuses with exit code 2, before anything is allocated."""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_config import small_config

from asyncrl import cli
from asyncrl.config import ConfigError, load_config
from asyncrl.preflight.plan import plan as plan_module
from asyncrl.preflight.plan.plan import check_heads, make_plan
from asyncrl.preflight.resources.memory_estimate import memory_text
from benchmarks.families import family


def weight_bytes(model):
    return sum(
        tensor.nbytes for file in model.glob("*.safetensors") for tensor in load_file(file).values()
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data.chat_template_kwargs": {"enable_thinking": False}},
            "data.train = '.*': data.chat_template_kwargs: .* does not use enable_thinking",
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
            "data.system_prompt applies to chats",
        ),
    ],
)
def test_settings_that_the_template_ignores_are_refused(write, llama_model, changes, message):
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


def test_a_tokenizer_that_does_not_preserve_text_is_refused(write, llama_model, tmp_path):
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


def test_this_machines_memory_does_not_decide_about_a_cluster(write, monkeypatch):
    """A login node, or the head of a cluster, has no part of the run."""
    monkeypatch.setattr(plan_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    monkeypatch.setattr(plan_module, "refuse_full", lambda config, found: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load_config(write({}))
    with pytest.raises(ConfigError, match="/dev/shm has 0 MiB free"):
        make_plan(config)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    plan = make_plan(config)
    assert plan.shared_memory_free is None
    assert "the nodes are asked when the run starts" in plan.text()
    assert "this machine" not in memory_text(config)


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
        ({"rollout.rollout_stop": ["Ä"]}, None, "rollout.rollout_stop 'Ä' never occurs in text"),
        ({"name": "../up"}, None, "name = '../up'"),
        ({"rollout.num_steps_per_rollout": 3}, None, "does not divide"),
        (
            {"learner.world_size": 3, "learner.sequence_parallel_size": 3},
            None,
            "size = 3 does not fit the 4 attention heads of .*; use one of 1, 2, 4",
        ),
        (
            {"generator.tensor_parallel_size": 3},
            None,
            "tensor_parallel_size = 3 does not fit the 4 attention heads, 2 key-value heads and",
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
                "eval.sets.long.max_completion_length = 600 and the longest prompt of 20 tokens"
                " exceed the model's context of 512; lower it"
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
                "warm_start.packing_strategy": {"name": "wrapped", "completion_policy": "split"},
                "eval.data": "HERE/train.parquet",
                "learner.max_tokens_per_gpu": 600,
            },
            None,
            (
                "completion_policy = 'split' creates pieces of up to .* = 600 tokens, above the"
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
                "generator.kv_cache_memory_bytes = 261120 has room for 0 tokens of 1024 bytes, and"
                " the longest request has .*; raise it to 262144 or more"
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


@pytest.mark.slow
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


def test_version_size_uses_the_published_type(write, tiny_model):
    stored = weight_bytes(tiny_model)
    assert json.loads((tiny_model / "config.json").read_text()).get("dtype") == "float32"
    assert make_plan(load_config(write({"model.dtype": "bfloat16"}))).weights_bytes == stored // 2


@pytest.mark.parametrize("part", ["model.path", "algorithm.reference.ref_load"])
def test_packing_a_model_that_cannot_be_packed_is_refused(write, hybrid, part):
    changes = {
        part: hybrid,
        "learner.packing": "rows",
        **({"algorithm.reference.kl_loss_coef": 0.1} if part != "model.path" else {}),
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


@pytest.mark.parametrize("packing", [None, "none"])
def test_unpacked_rows_cannot_be_shared_by_ranks(write, hybrid, tiny_model, packing):
    changes = {"model.path": str(tiny_model) if packing else hybrid, "learner.packing": packing}
    changes |= {"learner.world_size": 2, "learner.sequence_parallel_size": 2}
    with pytest.raises(
        ConfigError,
        match=(
            r"learner\.sequence_parallel_size = 2 splits packed rows, and this model .*; set"
            r" sequence_parallel_size: 1"
        ),
    ):
        make_plan(load_config(write(changes)))


def test_a_mixture_of_experts_counts_its_buffers_and_needs_every_expert(write, tmp_path):
    model = family("glm4_moe").save(tmp_path / "model")
    plan = make_plan(load_config(write({"model.path": str(model), "data.max_prompt_length": 40})))
    assert plan.weights_bytes == weight_bytes(model)
    assert (
        "unchanged: 1 (first model.layers.1.mlp.gate.e_score_correction_bias); left out"
        in plan.text()
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


def test_a_model_that_cannot_be_trained_is_refused(write, tmp_path, tiny_model):
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


def test_a_bpe_tokenizer_with_a_chat_template_and_two_stop_tokens(write, llama_model):
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
                r"reward\.sandbox\.level = 'landlock': sandbox level 'landlock' is not available"
                r" here \("
            ),
        ):
            make_plan(load_config(write({**CODE, "reward.sandbox.level": "landlock"})))
        return
    text = make_plan(load_config(write({**CODE, "reward.sandbox.level": "landlock"}))).text()
    assert (
        f"# sandbox\n  code that the model wrote runs at level {best} here, and on every"
        " machine that runs rewards; requested: landlock" in text
    )
    assert "# sandbox" not in make_plan(load_config(write())).text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "runs code that the model wrote: set reward.sandbox to namespaces or landlock"),
        ({"reward.sandbox.level": "none"}, "reward.sandbox.level"),
        (
            {"reward.sandbox.level": "container"},
            "reward.sandbox.level = 'container': needs a service; set reward.sandbox.service",
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
            "sandbox path '/' would expose far more",
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
            "reward.sandbox.level is missing; set it",
        ),
        (
            {
                "reward.sandbox.level": "landlock",
                "reward.sandbox.service": "http://127.0.0.1:1",
                "reward.sandbox.python": "/usr/bin/python3",
            },
            "reward.sandbox.python has no effect with reward.sandbox.service; leave one of them",
        ),
    ],
)
def test_an_unavailable_sandbox_is_refused(write, changes, message, monkeypatch):
    monkeypatch.delenv("ASYNCRL_SANDBOX_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_plan(load_config(write({**CODE, **changes})))


@pytest.fixture
def checkpoint(tmp_path):
    """`checkpoint(family, change)`: a tiny checkpoint whose tensors `change` has modified, by
    name."""
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


def test_plan_options_and_overrides_may_have_any_order(write, capsys):
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


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"asyncrl {version('asyncrl')}\n"


@pytest.mark.parametrize("nested", [False, True])
def test_tensor_parallelism_must_fit_all_sizes_that_vllm_splits(tmp_path, nested):
    """The sizes of Qwen2.5-0.5B. A size that only divides the heads would fail in the engine."""
    sizes = {"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864}
    tree = {"text_config": sizes} if nested else sizes
    (tmp_path / "config.json").write_text(json.dumps(tree))

    def check(**generator):
        check_heads(small_config(model={"path": str(tmp_path)}, generator=generator))

    for fits in (1, 2):
        check(tensor_parallel_size=fits)
    for refused in (3, 4, 7, 14):
        message = (
            f"generator.tensor_parallel_size = {refused} does not fit the 14 attention heads, 2"
            r" key-value heads and intermediate size 4864 of .*; use one of 1, 2$"
        )
        with pytest.raises(ConfigError, match=message):
            check(tensor_parallel_size=refused)


def test_sizes_of_each_layer_are_left_to_the_engine(tmp_path):
    sizes = {"num_attention_heads": 4, "intermediate_size": [100, 200]}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    check_heads(small_config(model={"path": str(tmp_path)}, generator={"tensor_parallel_size": 4}))


def test_parts_of_an_engine_must_fit_the_model(tmp_path):
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 2}

    def check(**generator):
        (tmp_path / "config.json").write_text(json.dumps(sizes))
        check_heads(small_config(model={"path": str(tmp_path)}, generator=generator))

    check(pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="pipeline_parallel_size = 3 is above the 2 layers of"):
        check(pipeline_parallel_size=3)
    experts = {"device": "cuda", "tensor_parallel_size": 2, "expert_parallel": True}
    with pytest.raises(ConfigError, match="expert_parallel: true needs a model with experts"):
        check(**experts)
    sizes["num_local_experts"] = 4
    check(**experts)


def test_the_prompts_decide_what_a_tokenizer_must_cover(write, tiny_model, tmp_path):
    """Its characters are those of sums, and its settings do not name the unknown token."""
    model = shutil.copytree(tiny_model, tmp_path / "domain")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"unk_token": None}))
    plan = make_plan(load_config(write({"model.path": str(model)}, rows=("1 + 2 =", "1 ÷ 2 ="))))
    note = "no token for parts of 1 of 2 texts, which the model does not see: '÷'"
    assert any(note in line for line in plan.prompts.notes) and note in plan.text()
    broken = shutil.copytree(model, tmp_path / "broken")
    tree = json.loads((model / "tokenizer.json").read_text())
    (broken / "tokenizer.json").write_text(json.dumps(tree | {"decoder": None}))
    with pytest.raises(ConfigError, match=r"data\.train.*'1 \+ 2 =' comes back as '1   \+   2"):
        make_plan(load_config(write({"model.path": str(broken)})))
