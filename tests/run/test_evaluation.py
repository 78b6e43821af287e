"""Evaluation: its requests, its metrics, and the completions that it keeps."""

import asyncio
import math

import pyarrow.parquet as pq
import pytest
from small_config import SMALL

from asyncrl.config import Config
from asyncrl.contracts.errors import EvaluationLostError, GenerationTimeoutError, StaleReplicaError
from asyncrl.contracts.rows import Completion, Prompt, VersionSpan
from asyncrl.rewards.contract import ScoredSession
from asyncrl.run.evaluation import Answer, Evaluator, lost_text, measure
from asyncrl.testing import FakeGenerate

REWARD = {"functions": {"exact": {"function": "asyncrl.rewards.builtin:exact_match"}}}
PROMPTS = [Prompt(0, 0, "p", (1,) * 2), Prompt(1, 0, "p", (1,) * 6)]


class Recording(FakeGenerate):
    """Records the requests. `fails(request)` returns the exception to raise, or None."""

    def __init__(self, fails=lambda request: None, **settings):
        super().__init__(**settings)
        self.requests, self.fails, self.running, self.most = [], fails, 0, 0

    async def generate(self, request):
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if error := self.fails(request):
                raise error
            return await super().generate(request)
        finally:
            self.running -= 1


async def all_right(prompt, completions):
    return {"exact": [1.0] * len(completions)}


def config_of(evaluation, **changes):
    return Config.model_validate({**SMALL, "reward": REWARD, "eval": evaluation, **changes})


def evaluate(tmp_path, config, generate, score=all_right, prompts=PROMPTS, version=0, replica=None):
    sets = config.evaluation_sets.values()
    evaluator = Evaluator(
        config,
        generate,
        score,
        {one.data: prompts for one in sets},
        "run",
        1,
        tmp_path / "evaluations",
    )
    return asyncio.run(evaluator(version, replica))


def rows(tmp_path, name):
    [path] = (tmp_path / "evaluations").glob(f"*-{name}.parquet")
    return pq.read_table(path).to_pylist()


def test_a_completion_ends_at_max_length_with_its_prompt(tmp_path):
    changes = {
        "data": {"train": "unused", "max_prompt_length": 6, "max_length": 9},
        "rollout": {"max_completion_length": 5},
    }
    generate = Recording()
    metrics = evaluate(tmp_path, config_of({"data": "unused"}, **changes), generate)
    assert sorted(
        (len(request.prompt_ids), request.max_tokens, request.temperature)
        for request in generate.requests
    ) == [
        (2, 5, 0.0),
        (2, 5, 1.0),
        (6, 3, 0.0),
        (6, 3, 1.0),
    ]
    assert (
        metrics["eval/prompts"],
        metrics["eval/greedy_accuracy"],
        metrics["eval/sampled_accuracy"],
    ) == (2.0, 1.0, 1.0)


def test_completions_end_as_in_rollouts(tmp_path):
    rollout = {"max_completion_length": 8, "repetition_stop": {"times": 5, "ngram": 3}}
    generate = Recording()
    evaluate(tmp_path, config_of({"data": "d"}, rollout=rollout), generate)
    assert {request.repetition for request in generate.requests} == {(3, 5)}


def test_a_set_may_restrict_sampling_with_any_objective(tmp_path):
    """Nothing is trained on an evaluation's log-probs. A set without a value uses the rollouts'."""
    sets = {"cut": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1}}
    generate = Recording()
    evaluate(tmp_path, config_of({"data": "d", "sets": sets}), generate)
    found = {(one.temperature, one.top_p, one.top_k, one.min_p) for one in generate.requests}
    assert found == {(0.0, 1.0, 0, 0.0), (1.0, 1.0, 0, 0.0), (0.6, 0.95, 20, 0.1)}
    changes = {
        "algorithm": {"loss": "reinforce"},
        "staleness": {"max_staleness": 0},
    }
    changes["rollout"] = {"max_completion_length": 8, "top_p": 0.9}
    generate = Recording()
    (tmp_path / "as_rollouts").mkdir()
    evaluate(tmp_path / "as_rollouts", config_of({"data": "d"}, **changes), generate)
    assert {one.top_p for one in generate.requests} == {0.9}


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (GenerationTimeoutError("no answer within 3 s"), "late", "no answer within 3 s"),
        (RuntimeError("Traceback\n  CUDA error\n"), "failed", "RuntimeError: CUDA error"),
        (RuntimeError("half \ud800"), "failed", "RuntimeError: half \\ud800"),
    ],
)
def test_a_lost_completion_counts_as_wrong_and_is_reported(tmp_path, error, status, reason):
    prompts = [Prompt(ordinal, 0, "p", (ordinal + 1,)) for ordinal in range(8)]
    generate = Recording(
        fails=lambda request: (
            error if request.prompt_ids == (4,) and request.temperature == 0 else None
        )
    )
    metrics = evaluate(tmp_path, config_of({"data": "d"}), generate, prompts=prompts)
    assert (
        metrics["eval/greedy_accuracy"] == 7 / 8
        and metrics["eval/greedy_exact"] == 1.0
        and metrics["eval/sampled_accuracy"] == 1.0
    )
    assert metrics[f"eval/greedy_{status}_ratio"] == 1 / 8 and metrics["eval/greedy_scored"] == 7
    assert metrics["eval/failed_ratio"] == 1 / 16 and metrics["eval/errors"] == (status == "failed")
    lost = rows(tmp_path, "greedy")[3]
    assert (
        lost["status"],
        lost["reason"],
        lost["completion"],
        lost["completion_ids"],
        lost["accuracy"],
    ) == (status, reason, None, None, None)


def test_an_error_outside_the_reward_leaves_one_prompt_unscored(tmp_path, caplog):
    async def score(prompt, completions):
        if prompt.ordinal == PROMPTS[0].ordinal:
            raise KeyError("nobody's column")
        return {"exact": [1.0] * len(completions)}

    metrics = evaluate(tmp_path, config_of({"data": "d"}), Recording(), score=score)
    assert metrics["eval/greedy_unscored_ratio"] == 1 / len(PROMPTS) and metrics["eval/errors"] == 2
    assert metrics["eval/greedy_accuracy"] == 1.0 and "nobody's column" in caplog.text


def test_a_completion_of_another_version_counts_as_failed(tmp_path):
    metrics = evaluate(tmp_path, config_of({"data": "d"}), Recording(version=4), version=3)
    assert metrics["eval/greedy_failed_ratio"] == 1.0 and metrics["eval/greedy_accuracy"] == 0.0
    assert rows(tmp_path, "greedy")[0]["reason"] == "made by versions [4], not only by 3"


def test_the_log_has_the_most_frequent_reason_of_lost_completions(tmp_path, caplog):
    evaluate(tmp_path, config_of({"data": "d"}), Recording(version=4), version=3)
    count = len(PROMPTS)
    assert (
        f"evaluation set greedy at version 3: {count} completions were late or failed, most often"
        f" ({count} times): made by versions [4], not only by 3"
    ) in caplog.messages


def test_sessions_that_failed_are_lost_completions():
    def ended(end, reason):
        completion = Completion((1,), (-0.5,), (VersionSpan(0, 0, 1),), "stop", "x")
        return Answer(completion, "ok", reason, session=ScoredSession((), end, None, {}, None))

    answers = [
        [Answer(None, "late", "too late"), ended("done", ""), ended("turns", "turns: 8")],
        [ended("env_error", f"env_error: no port {port}") for port in (40001, 40002)],
    ]
    assert lost_text(answers) == (
        "3 completions were late or failed, most often (2 times): env_error: no port 40001"
    )
    assert lost_text([[ended("done", "")]]) == ""


def test_an_evaluation_whose_replica_is_gone_is_lost_and_not_wrong(tmp_path):
    gone = StaleReplicaError("replica c is gone")
    generate = Recording(
        fails=lambda request: gone if request.prompt_ids == PROMPTS[1].token_ids else None
    )
    with pytest.raises(EvaluationLostError, match="replica c is gone"):
        evaluate(tmp_path, config_of({"data": "d"}), generate, replica="c")
    assert evaluate(tmp_path, config_of({"data": "d"}), generate)["eval/failed_ratio"] == 0.5


def test_a_completion_without_a_score_is_unscored_and_not_wrong(tmp_path):
    async def score(prompt, completions):
        return {"exact": [None if prompt.ordinal == 0 else 1.0 for _ in completions]}

    metrics = evaluate(tmp_path, config_of({"data": "d"}), Recording(), score)
    assert (
        metrics["eval/greedy_accuracy"],
        metrics["eval/greedy_scored"],
        metrics["eval/greedy_unscored_ratio"],
    ) == (1.0, 1.0, 0.5)
    assert [row["status"] for row in rows(tmp_path, "greedy")] == ["unscored", "ok"]


def test_sets_have_their_own_prompts_number_temperature_and_length(tmp_path):
    sets = {
        "math": {"n": 4, "temperature": 0.6, "max_completion_length": 30, "max_prompts": 1},
        "plain": {"data": "other"},
    }
    generate = Recording()

    async def score(prompt, completions):
        return {"exact": [float(place == 2) for place in range(len(completions))]}

    metrics = evaluate(tmp_path, config_of({"data": "d", "sets": sets}), generate, score)
    math_requests = [request for request in generate.requests if request.temperature == 0.6]
    assert [(request.prompt_ids, request.max_tokens, request.n) for request in math_requests] == [
        ((1, 1), 30, 1)
    ] * 4
    assert len({request.seed for request in math_requests}) == 4, "equal seeds give equal samples"
    assert [
        metrics[f"eval/math_{name}"] for name in ("avg_at_4", "pass_at_1", "pass_at_2", "pass_at_4")
    ] == [0.25, 0.25, 0.5, 1.0]
    assert metrics["eval/plain_prompts"] == 2.0 and not any(
        "plain_pass" in name or "greedy_avg" in name for name in metrics
    )
    kept = rows(tmp_path, "math")
    assert [(row["ordinal"], row["index"], row["accuracy"]) for row in kept] == [
        (0, 0, 0.0),
        (0, 1, 0.0),
        (0, 2, 1.0),
        (0, 3, 0.0),
    ]
    first = kept[0]
    assert (first["set"], first["attempt"], first["version"], first["prompt_ids"]) == (
        "math",
        1,
        0,
        [1, 1],
    )
    assert first["versions"] == [
        {"version": 0, "start": 0, "end": len(first["completion_ids"])}
    ] and len(first["logprobs"]) == len(first["completion_ids"])
    assert first["reward_parts"] == {"exact": 0.0}


def test_the_reward_is_the_weighted_sum_and_further_parts_are_kept(tmp_path):
    functions = {
        name: {"function": "m:f", "weight": weight}
        for name, weight in (("right", 2.0), ("short", 0.5), ("shown", 0.0))
    }

    async def score(prompt, completions):
        parts = {"right": 1.0, "short": -1.0, "shown": None, "short/words": 4.0}
        return {
            name: [None if name == "short" and prompt.ordinal == 0 else value for _ in completions]
            for name, value in parts.items()
        }

    metrics = evaluate(
        tmp_path, config_of({"data": "d"}, reward={"functions": functions}), Recording(), score
    )
    assert (
        metrics["eval/greedy_right"],
        metrics["eval/greedy_short"],
        metrics["eval/greedy_short/words"],
    ) == (1.0, -1.0, 4.0)
    assert math.isnan(metrics["eval/greedy_shown"])
    assert [(row["status"], row["reward"]) for row in rows(tmp_path, "greedy")] == [
        ("ok", None),
        ("ok", 1.5),
    ]
    assert rows(tmp_path, "greedy")[1]["reward_parts"] == {
        "right": 1.0,
        "short": -1.0,
        "shown": None,
        "short/words": 4.0,
    }


def answer(accuracy, status="ok"):
    completion = (
        None
        if status in ("late", "failed")
        else Completion((3,), (-0.1,), (VersionSpan(0, 0, 1),), "stop")
    )
    return Answer(completion, status, parts={} if completion is None else {"right": accuracy})


def test_pass_at_k_leaves_out_unscored_completions_and_counts_lost_ones():
    answers = [
        [answer(1.0), answer(0.4), answer(None, "unscored"), answer(None, "late")],
        [answer(0.0), answer(None, "unscored"), answer(None, "unscored"), answer(None, "unscored")],
        [answer(None, "unscored")] * 4,
    ]
    found = measure(answers, "right", pass_threshold=0.5)
    assert (
        found["accuracy"] == pytest.approx(1.4 / 4)
        and found["right"] == pytest.approx(1.4 / 3)
        and found["scored"] == 3.0
    )
    assert found["avg_at_4"] == pytest.approx((1.4 / 3 + 0.0) / 2)
    assert found["pass_at_1"] == pytest.approx((1 / 3 + 0) / 2)
    assert found["pass_at_2"] == pytest.approx(2 / 3), (
        "the second prompt has only one scored sample"
    )
    assert math.isnan(found["pass_at_4"])


@pytest.mark.parametrize(("replicas", "held", "most"), [(1, None, 4), (3, None, 12), (3, "c", 4)])
def test_as_many_requests_run_at_once_as_the_answering_replicas_accept(
    tmp_path, replicas, held, most
):
    prompts = [Prompt(ordinal, 0, "p", (ordinal + 1,)) for ordinal in range(40)]
    generate = Recording(latency=0.01)
    evaluate(
        tmp_path,
        config_of({"data": "d"}, generator={"max_num_seqs": 4, "num_replicas": replicas}),
        generate,
        prompts=prompts,
        replica=held,
    )
    assert generate.most == most
    assert {(request.replica, request.min_weights.version) for request in generate.requests} == {
        (held, 0)
    }


def test_in_flight_the_versions_may_change_and_are_kept(tmp_path):
    metrics = evaluate(
        tmp_path, config_of({"data": "d", "in_flight": True}), Recording(version=4), version=3
    )
    assert (metrics["eval/failed_ratio"], metrics["eval/newest_version"]) == (0.0, 4.0)
    first = rows(tmp_path, "greedy")[0]
    assert (first["version"], first["status"], first["versions"]) == (
        3,
        "ok",
        [{"version": 4, "start": 0, "end": len(first["completion_ids"])}],
    )


def test_parts_of_a_reward_are_reported(tmp_path):
    async def score(prompt, completions):
        return {
            "exact": [1.0] * len(completions),
            "exact/format": [0.5 if prompt.ordinal else None for _ in completions],
        }

    metrics = evaluate(tmp_path, config_of({"data": "d"}), Recording(), score)
    assert (
        metrics["eval/greedy_exact"],
        metrics["eval/greedy_exact/format"],
        metrics["eval/greedy_accuracy"],
    ) == (1.0, 0.5, 1.0)
    assert [row["reward_parts"] for row in rows(tmp_path, "greedy")] == [
        {"exact": 1.0, "exact/format": None},
        {"exact": 1.0, "exact/format": 0.5},
    ]


@pytest.mark.parametrize(
    ("sets", "reward", "metric"),
    [
        ({"a": {}, "a_b": {}}, "b_accuracy", "a_b_accuracy"),
        ({}, "accuracy", "greedy_accuracy"),
        ({}, "late_ratio", "greedy_late_ratio"),
        ({"failed": {}}, "ratio", "failed_ratio"),
        ({"newest": {}}, "version", "newest_version"),
    ],
)
def test_no_metric_hides_another(sets, reward, metric):
    rewards = {"functions": dict.fromkeys(("exact", reward), REWARD["functions"]["exact"])}
    with pytest.raises(ValueError, match=f"two metrics would have the name eval/{metric}"):
        config_of({"data": "d", "sets": sets}, reward=rewards)
    config_of(
        {"data": "d"}, reward={"functions": {"accuracy": REWARD["functions"]["exact"]}}
    )  # accuracy is this reward
