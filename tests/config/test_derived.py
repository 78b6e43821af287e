"""Unset settings are derived from lengths, concurrency, device and model size. Explicit values take
precedence."""

import pytest
import yaml
from small_config import SMALL, small_config as config

from asyncrl.config import load_config
from asyncrl.config.config import derived_settings
from asyncrl.generation.settings import GeneratorApp
from asyncrl.preflight.specs import generator_app
from asyncrl.run.evaluation import Evaluator


def sized(folder, size):
    """A model folder with a sparse file of this many bytes."""
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)
    return {"path": str(folder)}


LONG = {"rollout": {"max_completion_length": 16_384}, "learner": {"max_tokens_per_gpu": 1 << 15}}


def test_a_short_run_gets_the_minimum_timeouts():
    one = config()
    assert (
        one.deadline_s,
        one.placement_wait_s,
        one.start_timeout_s,
        one.stall_timeout_s,
        one.push_timeout_s,
    ) == (300, 30, 600, 120, 300)
    assert one.learner.logprob_bytes == 224 << 20


def test_long_completions_get_a_longer_deadline():
    """A group of 16,384 tokens at 10 tokens/s takes 1,638 s. A deadline of 300 s would fail it."""
    assert config(**LONG, generator={"device": "cuda"}).deadline_s == 3277, "16,384 / 5"
    assert config(**LONG, generator={"max_num_seqs": 64}).deadline_s == 19_661, (
        "384 completions, 64 at once"
    )


def test_an_evaluation_sets_deadline_follows_its_longest_completion():
    one = config(
        eval={
            "sets": {"long": {"data": "e", "max_completion_length": 32_768}, "short": {"data": "e"}}
        },
        learner={"max_tokens_per_gpu": 1 << 16},
    )
    evaluator = Evaluator(one, None, None, {}, "run", 1, None)
    target = type("Target", (), {"version": 0, "replica": None})()
    prompt = type("Prompt", (), {"token_ids": (1, 2)})()
    times = {
        name: evaluator._request(settings, target, prompt, 0).deadline_s
        for name, settings in one.evaluation_sets.items()
    }
    assert times == {"long": 19_661, "short": 300}, "384 completions, 128 at once"
    assert one.deadline_s == 300


def test_max_num_seqs_follows_concurrency_up_to_the_devices_limit():
    gpus = {"device": "cuda"}
    assert config(generator=gpus).max_num_seqs == 384 == 3 * 16 * 8
    assert config(generator={**gpus, "num_replicas": 2}).max_num_seqs == 192
    assert config(generator={**gpus, "num_replicas": 64}).max_num_seqs == 64
    assert (
        config(
            generator=gpus, rollout={"max_completion_length": 8, "rollout_batch_size": 512}
        ).max_num_seqs
        == 512
    )
    assert config().max_num_seqs == 128
    assert generator_app(config(generator=gpus)).max_num_seqs == 384
    assert GeneratorApp(model="m", generator=gpus).max_num_seqs == 512, (
        "standing generators have no run"
    )


def test_a_large_model_gets_longer_start_and_push_timeouts(tmp_path):
    model = sized(tmp_path / "m", 140 << 30)
    one = config(model=model, generator={"device": "cuda"})
    assert one.start_timeout_s == 600 + 1434 and one.stall_timeout_s == 260
    assert one.push_timeout_s == 300 + 574 > one.stall_timeout_s
    app = GeneratorApp(model=model["path"])
    assert app.fetch_within_s == 874 and (app.start_timeout_s, app.stall_timeout_s) == (
        one.start_timeout_s,
        one.stall_timeout_s,
    )
    assert GeneratorApp(model=model["path"], fetch_timeout_s=7).fetch_within_s == 7


def test_push_timeout_includes_the_longest_completion_under_drain():
    one = config(**LONG, generator={"in_flight": "drain"})
    assert one.push_timeout_s == 300 + one.deadline_s


def test_what_an_update_does_to_completions_depends_on_the_device():
    """A GPU's full cache takes long to recompute. A rest on a GPU frees it in any case."""
    on_gpu = {"device": "cuda"}
    assert config().in_flight == "recompute"
    assert config(generator=on_gpu).in_flight == "keep"
    assert generator_app(config(generator=on_gpu)).in_flight == "keep"
    assert config(generator=on_gpu, staleness={"max_staleness": 0}).in_flight == "recompute"
    assert config(generator=on_gpu, lora={"r": 8}).in_flight == "recompute"
    turns = config(generator=on_gpu, learner=on_gpu, placement="colocate")
    assert turns.in_flight == generator_app(turns).in_flight == "recompute"
    assert config(generator={**on_gpu, "in_flight": "drain"}).in_flight == "drain"
    assert GeneratorApp(model="m", generator=on_gpu).in_flight == "recompute"


def test_placement_timeout_grows_with_the_number_of_processes():
    many = config(learner={"world_size": 512}, generator={"num_replicas": 256})
    assert many.placement_wait_s == 512 + 256 + 2


def test_an_explicit_value_overrides_the_derived_one():
    one = config(
        rollout={"max_completion_length": 16_384, "deadline_s": 7},
        learner={"max_tokens_per_gpu": 1 << 15, "logprob_memory_bytes": 1000, "device": "cuda"},
        generator={"max_num_seqs": 3, "start_timeout_s": 8, "stall_timeout_s": 9},
        weights={"push_timeout_s": 10, "commit_grace_s": 0},
        placement_timeout_s=11,
    )
    assert (
        one.deadline_s,
        one.evaluation_deadline_s(1 << 15),
        one.max_num_seqs,
        one.start_timeout_s,
        one.stall_timeout_s,
    ) == (7, 7, 3, 8, 9)
    assert (
        one.push_timeout_s,
        one.commit_grace_s,
        one.placement_wait_s,
        one.learner.logprob_bytes,
    ) == (10, 0, 11, 1000)
    assert derived_settings(one) == []


def test_a_standing_endpoint_derives_nothing_of_its_generators():
    names = [one.name for one in derived_settings(config(generator={"attach": "standing"}))]
    assert "generator.start_timeout_s" in names
    assert not {"generator.max_num_seqs", "generator.stall_timeout_s"} & {*names}
    given = config(generator={"attach": "standing", "start_timeout_s": 8})
    assert given.start_timeout_s == 8
    assert [one.name for one in derived_settings(given)] == [
        name for name in names if name != "generator.start_timeout_s"
    ]


@pytest.mark.parametrize("unset", ["auto", None])
def test_auto_and_null_mean_the_derived_value(unset):
    one = config(
        rollout={"max_completion_length": 8, "deadline_s": unset},
        generator={"max_num_seqs": unset},
        placement_timeout_s=unset,
    )
    assert one == config()


def test_auto_on_the_command_line_overrides_the_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        yaml.safe_dump(
            config(rollout={"max_completion_length": 8, "deadline_s": 5}).model_dump(
                include={*SMALL}, exclude_defaults=True
            )
        )
    )
    assert load_config(path).deadline_s == 5
    assert load_config(path, ["--rollout.deadline_s", "auto"]).deadline_s == 300
    assert load_config(path, ["--rollout.deadline_s", "6"]).deadline_s == 6


def test_the_plan_shows_derived_values_and_their_reasons(tmp_path):
    lines = [
        one.text() for one in derived_settings(config(**LONG, model=sized(tmp_path / "m", 1 << 30)))
    ]
    assert (
        "rollout.deadline_s = 9831 s: 16384 tokens at 5 tokens/s, in 3 waves, as not all"
        " completions run at once, at least 300 s" in lines
    )
    assert (
        "generator.start_timeout_s = 611 s: 600 s, and 1.0 GiB of model files at 100 MiB/s" in lines
    )
    assert "learner.logprob_memory_bytes = 224 MiB: chunks of logits that suit cpu" in lines
    assert "weights.commit_grace_s = 61 s: a fifth of weights.push_timeout_s = 305 s" in lines
    assert len(lines) == 8


def test_an_environment_on_cpu_gets_small_cache_blocks():
    """A turn reuses whole blocks of the turns before it."""
    data = {**SMALL["data"], "max_length": 256}
    agent = {"environment": {"function": "jobs.guess.game:play"}, "data": data}
    assert generator_app(config(**agent)).cache_block == 32
    assert generator_app(config(**agent, generator={"device": "cuda"})).cache_block is None
    assert generator_app(config()).cache_block is None
