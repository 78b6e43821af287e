"""What `asyncrl plan` prints."""

import json
import re
import shutil

import pytest

from asyncrl import commands
from asyncrl.config import load_config
from asyncrl.observe.metric_catalog import known_names
from asyncrl.preflight.plan.notes import plan_notes
from asyncrl.preflight.plan.plan import make_plan
from asyncrl.preflight.plan.sections import algorithm_text
from asyncrl.weights.outline import Outline


def test_shows_arithmetic_cpus_memory_prompts_and_stops(write):
    text = make_plan(load_config(write())).text()
    for part in (
        "global_batch_size   = groups per step",
        "learner ranks",
        "free in /dev/shm",
        "# disk, for checkpoints and exported models\n",
        (
            "parameters, as float32 under the checkpoint's names\n  tensors copied from its files"
            " unchanged: none; left out because the model does not use them: none\n"
        ),
        "/ 1024 bytes per token = 262016 tokens per replica",
        "first prompt '1 + 2 ='",
        "stop token ids",
        "decoupled needs total >= 0 + 0 = 0\n",
    ):
        assert part in text


def test_shows_each_source_of_every_data_setting(write, tmp_path):
    """A mixture of a glob, a folder with splits and one file. The other settings accept sources,
    too."""
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
        "  source sums: 3 rows used from 2 files; 25.0% of the prompts\n",
        "  source folder.train: 5 rows used from 1 file; 50.0% of the prompts\n",
        "  source train: 2 rows used from 1 file; 25.0% of the prompts\n",
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
                "with one replica, updates wait for the evaluation",
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
                "before, every 5 steps and after; about 32 s on one replica",
                "num_replicas: 2",
            ],
        ),
        (
            {"eval.data": "HERE/train.parquet", "generator.num_replicas": 2},
            [
                "generator.num_replicas = 2: an evaluation reserves one replica, and training"
                " continues with the others"
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
def test_shows_the_cost_of_an_evaluation_and_its_effect_on_training(
    write, tmp_path, changes, lines
):
    changes = json.loads(json.dumps(changes).replace("HERE", str(tmp_path)))
    text = make_plan(load_config(write(changes))).text()
    for line in lines:
        assert line in text


def test_shows_what_the_limits_do_to_every_file(write, tmp_path):
    # The held-out file's supervised rows are the same rows with targets.
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
    assert {re.sub("/[^/]+/", "/<file>/", name) for name in metrics} <= known_names()
    plan = make_plan(
        load_config(write({**changes, "data.max_length": 8}, ["1 + 2 =", "10 + 20 =", "4 ="]))
    )
    assert (
        "supervised rows of eval.data: 1 of 3 rows used; max_length: 2 rows dropped\n"
        in plan.prompts_text()
    )
    assert "data.train: 3 of 3 rows used" in plan.prompts_text()


def test_shows_the_token_cap_of_ranks_that_share_rows(write):
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
        "1 of 2 prompts already begin with BOS: it is not added again" in text
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


def test_a_missing_gpu_is_noted_if_a_device_is_cuda(write, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    plan = make_plan(load_config(write()))
    assert plan_notes(plan.config, plan.version, 0) == [] and "# notes" not in plan.text()
    config = load_config(write({"generator.device": "cuda"}))
    assert plan_notes(config, plan.version, 1) == []
    assert plan_notes(config, plan.version, 0) == [
        "this machine has no GPU for generator.device: cuda; set RAY_ADDRESS to a cluster with"
        " GPUs, or set device: cpu"
    ]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert plan_notes(config, plan.version, 0) == []


def test_a_chat_template_without_an_end_of_turn_is_noted(write, llama_model, tmp_path):
    model = shutil.copytree(llama_model, tmp_path / "open")
    template = "{% for m in messages %}{{ m.content }}{{ end }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    config = load_config(write({"model.path": str(model)}))
    outline = Outline(1, 1, {}, (), {})
    (note,) = plan_notes(config, outline, 0)
    assert "shows no token that ends a turn, so only EOS, generation_config.json" in note
    config = load_config(
        write({"model.path": str(model), "data.chat_template_kwargs": {"end": "<|end|>"}})
    )
    assert plan_notes(config, outline, 0) == []


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"learner.learning_rate": 1e-2}, ""),
        ({"learner.learning_rate": 0.5}, "moves each weight by about 0.5 in a step; usual for a"),
        ({"learner.learning_rate": 0.5, "learner.optimizer": "sgd"}, ""),
        ({"learner.learning_rate": 1e-11}, "hardly changes a weight; usual is 1e-7 or more"),
        ({"learner.learning_rate": 1e-11, "lora": {}}, "hardly changes a weight"),
        ({"learner.learning_rate": 0.1, "lora": {}}, "usual for an adapter is at most 0.01"),
    ],
)
def test_a_learning_rate_beyond_reason_is_noted(write, changes, note):
    plan = make_plan(load_config(write(changes)))
    assert ("\nnote       learner.learning_rate = " in plan.brief()) == bool(note)
    assert note in plan.brief() and note in plan.text()


def test_what_is_usual_depends_on_the_models_size(write):
    plan = make_plan(load_config(write({"learner.learning_rate": 5e-3})))
    assert plan_notes(plan.config, plan.version, 0) == []
    large = Outline(4096 * 4096, 4096 * 4096, {}, (), {"w": (4096, 4096)})
    (note,) = plan_notes(plan.config, large, 0)
    assert note.endswith("usual for a model of 16,777,216 elements is at most 0.001")


def test_brief_and_config_are_printed_on_request(write, capsys):
    path = str(write())
    assert commands.run("plan", path, [], {"brief"}) == 0
    output = capsys.readouterr().out
    assert [line.split()[0] for line in output.splitlines()] == [
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
        "2 rows used, the longest of " in output
        and "first '1 + 2 ='" in output
        and "= 28 " not in output
    )
    plan = make_plan(load_config(path))
    assert "temperature: 1.0" in plan.config_text() and "temperature: 1.0" not in plan.text()


def test_shows_when_a_repetition_ends_a_completion(write):
    assert "n-gram" not in make_plan(load_config(write())).prompts_text()
    assert (
        "; so does an n-gram of up to 16 tokens 20 times in a row"
        in make_plan(load_config(write({"rollout.repetition_stop": 20}))).prompts_text()
    )


def test_a_loss_without_a_run_in_the_evidence_is_experimental(write):
    assert "experimental" not in make_plan(load_config(write({}))).text()
    text = make_plan(
        load_config(
            write({"algorithm": {"loss": "sapo", "correction": {"rejection": {"above": 0.5}}}})
        )
    ).text()
    assert (
        "loss sapo against old policy behavior, token_mean; corrected; correction:"
        " rejection above 0.5"
        in text
        and "experimental: no complete run" in text
    )


@pytest.mark.parametrize(
    ("algorithm", "shown"),
    [
        *(({"loss": loss}, f"loss {loss} against") for loss in ("gmpo", "vespo", "kl_cov")),
        ({"loss": "clip_cov"}, "loss clip_cov against old policy behavior"),
        *(
            ({"advantage": advantage}, f"advantage {advantage}, loss ppo")
            for advantage in ("opo", "pass_at_k", "grpo_batch_std", "gdpo")
        ),
        (
            {"advantage": {"name": "gae", "bootstrap_truncated": True}},
            "advantage gae (bootstrap_truncated True), loss ppo",
        ),
        (
            {"advantage": "remax"},
            "advantage remax against one greedy completion per group, which is generated and"
            " scored too, and not trained, loss ppo",
        ),
        (
            {"ce": {"coef": 0.1, "min_reward": 0.5}},
            "; 0.1 x next-token loss on completions with a reward of at least 0.5",
        ),
        (
            {"loss": {"old_policy": "learner"}, "correction": {"truncation": "geometric"}},
            "correction: truncation geometric, cap 2.0",
        ),
        (
            {
                "loss": {"old_policy": "learner"},
                "correction": {"truncation": {"level": "token", "floor": 0.5}},
            },
            "correction: truncation token, cap 2.0, floor 0.5",
        ),
    ],
)
def test_formulas_without_a_run_are_experimental(write, algorithm, shown):
    text = algorithm_text(load_config(write({"algorithm": algorithm})))
    assert shown in text and "experimental: no complete run" in text


def test_online_dpo_is_named_with_its_pairs_and_reference(write, tiny_model):
    assert algorithm_text(load_config(write({"algorithm.preference.loss.beta": 0.3}))) == (
        f"# algorithm\n  online DPO: loss sigmoid, beta 0.3 against {tiny_model}; of each group's 8"
        " completions the best against the worst, with rewards at least 1e-06 apart; off-policy"
        " weight of a pair: <= 2"
    )
    preference = {
        "loss": "ipo",
        "pairs": {"name": "margin", "max_pairs": 3, "min_margin": 0.5, "missing_eos_penalty": 0.2},
        "weight_cap": None,
        "ce_coef": 0.1,
    }
    changes = {"algorithm.preference": preference, "staleness.max_staleness": 1}
    text = make_plan(load_config(write(changes | {"reward.shuffle": True}))).text()
    for part in (
        "online DPO: loss ipo + 0.1 x next-token loss, beta 0.1 against",
        "at most 3 pairs, with rewards at least 0.5 apart; a completion that was cut off loses 0.2"
        " reward; off-policy weight of a pair: none (uncorrected)",
        "a control run that must not learn",
        "reference policy",
    ):
        assert part in text


def test_shows_whether_rows_are_packed_and_why(write, hybrid):
    text = make_plan(load_config(write({"model.path": hybrid}))).text()
    assert (
        "unpacked: one trajectory per forward pass, with the model's own attention, because this"
        " model (model_type 'qwen3') has layers of type linear" in text
    )
    assert (
        "learner.packing: none is set, although this model allows packing"
        in make_plan(load_config(write({"learner.packing": "none"}))).text()
    )
    assert "packed: many trajectories share a row" in make_plan(load_config(write({}))).text()
