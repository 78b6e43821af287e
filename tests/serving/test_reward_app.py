"""The reward model application without Serve: its settings, its rows and batches, and its routes
over a classifier that the test saves."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from asgi import call
from chat_families import CHATML, save_chat_model
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema
from reward_checkpoint import save_reward_model, score_of

from asyncrl.contracts.errors import InvalidRequestError
from asyncrl.serving.classifier import Classifier, ClassifierError
from asyncrl.serving.reward_model import RewardModel, build_reward_app
from asyncrl.serving.reward_settings import RewardModelApp
from asyncrl.serving.row_batches import RowBatches, batches_of
from asyncrl.serving.score_routes import score_routes
from asyncrl.serving.score_rows import ScoreRows

CONFIG = Path(__file__).parents[2] / "serve_configs" / "reward_model.yaml"
BOS, EOS = 1, 2

pytestmark = pytest.mark.usefixtures("own_serve")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward_models") / "tiny", tiny_model)


@pytest.fixture(scope="module")
def replica(checkpoint: Path) -> RewardModel:
    return RewardModel({"model": str(checkpoint), "device": "cpu", "max_batch_size": 4})


def test_the_serve_config_is_loopback_and_builds() -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load(CONFIG.read_text()))
    assert schema.http_options.host == "127.0.0.1"
    (application,) = schema.applications
    assert application.import_path == "asyncrl.serving.reward_model:build_reward_app"
    args = RewardModelApp.model_validate(application.args)
    assert build_reward_app(args)._bound_deployment.func_or_class.__name__ == "HttpRewardModel"


def test_a_gpu_is_used_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.serving import reward_model

    for there, device, resources in (
        (True, "auto", {"num_cpus": 1.0, "num_gpus": 1}),
        (True, "cpu", {"num_cpus": 1.0}),
        (False, "auto", {"num_cpus": 1.0}),
        (False, "cuda", {"num_cpus": 1.0, "num_gpus": 1}),
    ):
        monkeypatch.setattr(reward_model, "has_gpu", lambda there=there: there)
        deployment = build_reward_app(RewardModelApp(model="m", device=device))._bound_deployment
        assert deployment.ray_actor_options.items() >= resources.items()
        assert ("num_gpus" in resources) == (deployment.init_args[0]["device"] == "cuda")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"device": "cuda", "num_threads": 2}, "only has an effect with device: cpu"),
        ({"served_name": "m", "http": False}, "needs http: true"),
        ({"batch_size": 2}, "batch_size"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        RewardModelApp.model_validate({"model": "m", **settings})


def test_batches_are_full_or_have_little_padding() -> None:
    assert batches_of([], 4, 10_000) == []
    assert batches_of([3, 1, 2, 5, 4], 2, 10_000) == [[1, 2], [0, 4], [3]]
    lengths = [1000, 10, 990, 2000, 12, 1010]
    assert batches_of(lengths, 8, 10_000) == [[1, 4], [2, 0, 5], [3]]
    # Two rows of 1000 fit into 2000 tokens, and 2000 alone.
    assert batches_of(lengths, 8, 2000) == [[1, 4], [2, 0], [5], [3]]


async def test_rows_of_concurrent_requests_share_batches_and_return_in_order() -> None:
    batches: list[list[int]] = []

    def compute(rows: Sequence[Sequence[int]]) -> list[float]:
        batches.append([len(row) for row in rows])
        return [float(row[0]) for row in rows]

    waiting = RowBatches(compute, most=4, most_tokens=10_000, wait_s=0.0)
    answers = await asyncio.gather(
        waiting.scores([[1] * 9, [2] * 3]),
        waiting.scores([[3] * 8, [4] * 2]),
        waiting.scores([]),
    )
    assert answers == [[1.0, 2.0], [3.0, 4.0], []]
    assert batches == [[2, 3, 8, 9]]
    assert await waiting.scores([[7]]) == [7.0]


async def test_a_failing_batch_fails_its_rows_alone_and_canceled_rows_are_dropped() -> None:
    entered, go_on = threading.Event(), threading.Event()
    computed: list[int] = []

    def compute(rows: Sequence[Sequence[int]]) -> list[float]:
        entered.set()
        assert go_on.wait(30)
        if [0] in rows:
            raise RuntimeError("no")
        computed.extend(row[0] for row in rows)
        return [1.0] * len(rows)

    waiting = RowBatches(compute, most=1, most_tokens=10_000, wait_s=0.0)
    first = asyncio.create_task(waiting.scores([[0]]))
    await asyncio.to_thread(entered.wait, 30)
    second, third = (asyncio.create_task(waiting.scores([[number]])) for number in (2, 3))
    await asyncio.sleep(0)
    second.cancel()
    go_on.set()
    with pytest.raises(RuntimeError, match="no"):
        await first
    assert await third == [1.0]
    with pytest.raises(asyncio.CancelledError):
        await second
    assert computed == [3]


def test_texts_become_what_the_model_was_trained_on(checkpoint: Path) -> None:
    rows = ScoreRows(str(checkpoint), vocabulary=64, most_tokens=12)

    def encoded(prompt: str, completion: str, complete: Any = None) -> list[int]:
        (row,) = rows.rows([prompt], [completion], complete, None)
        return row

    ids = [4, 14, 5]  # "0", "+", "1"
    assert encoded("0+", "1") == [*ids, EOS]
    assert encoded("0+", "1", [False]) == ids
    assert encoded("<bos>0+", "1") == [BOS, *ids, EOS]
    spelled = encoded("0+", "1<eos>", [False])
    assert spelled[:3] == ids and EOS not in spelled, "the policy's text has no special token"
    assert encoded("0+1", "") == [*ids, EOS]
    assert rows.rows(None, None, None, [[5, 6], [7]]) == [[5, 6], [7]]
    assert rows.rows([], [], [], None) == []


def test_a_rendered_prompt_gets_no_second_beginning(tmp_path: Path) -> None:
    """This tokenizer puts BOS before plain texts, and its chat template writes none."""
    rows = ScoreRows(save_chat_model(tmp_path / "chat", CHATML), vocabulary=999, most_tokens=64)
    asked = "<|im_start|>user\n3+4<|im_end|>\n<|im_start|>assistant\n"
    chat, plain = rows.rows([asked, "3+4"], ["7", "7"], None, None)
    assert BOS not in chat and plain.count(BOS) == 1 and plain[0] == BOS
    [again] = rows.rows(["<s>3+4"], ["7"], None, None)
    assert again == plain


def test_a_chat_ends_with_the_end_of_its_turns(tiny_model: Path, tmp_path: Path) -> None:
    """The tokenizer's EOS may differ, as in the tokenizers of base models."""
    end = save_reward_model(tmp_path / "chat", tiny_model, chat_end="?")
    rows = ScoreRows(str(end), vocabulary=64, most_tokens=64)
    chat_end = rows.rows(["?"], [""], [False], None)[0][0]
    chat, plain = rows.rows(["0?1", "01"], ["2", "2"], None, None)
    assert chat_end != EOS and chat[-1] == chat_end and plain[-1] == EOS


REFUSED = [
    ({}, "are not two lists of texts"),
    ({"prompts": "a", "completions": "b"}, "are not two lists of texts"),
    ({"prompts": ["a"], "completions": ["\ud800"]}, "half of a surrogate pair"),
    ({"prompts": ["a"], "completions": []}, "1 prompts, 0 completions and 0 values"),
    ({"prompts": ["a"], "completions": ["b"], "complete": [1]}, "complete is not a list of true"),
    ({"prompts": ["a"], "completions": ["b"], "token_ids": [[1]]}, "leave out prompts"),
    ({"token_ids": [1]}, "is not a list of lists"),
    ({"token_ids": [[64]]}, "sequence 0 of token_ids has a value that is no token id below 64"),
    ({"token_ids": [[1], [True]]}, "sequence 1 of token_ids has a value"),
    ({"token_ids": [[]]}, "sequence 0 has no token"),
    ({"token_ids": [[1], [1] * 513]}, "sequence 1 has 513 tokens, above max_tokens = 512"),
    ({"prompts": ["a" * 600], "completions": ["b"]}, "sequence 0 has 602 tokens, above max_tokens"),
    ({"prompts": ["a" * 9999], "completions": ["b"]}, "sequence 0 has 10,000 characters, above"),
    ({"token_ids": [[1]] * 1025}, "1,025 sequences, above 1,024"),
    ({"texts": ["a"]}, "texts is not a field; the fields are prompts, completions"),
    ([], "the body is a JSON list"),
]


@pytest.mark.parametrize(("body", "words"), REFUSED)
async def test_a_bad_request_is_refused_with_one_line(
    replica: RewardModel, body: Any, words: str
) -> None:
    status, answer = await call(score_routes(replica, None), "POST", "/score", body)
    assert status == 400 and words in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


@pytest.mark.parametrize("padding", [0, EOS], ids=["pad", "pad is eos"])
async def test_scores_are_those_of_transformers(
    tmp_path: Path, tiny_model: Path, padding: int
) -> None:
    path = save_reward_model(tmp_path / "model", tiny_model, pad_token_id=padding)
    prompts = ["0+1=", "3", "what is 2+40? " * 9, "-"]
    completions = ["1", "", "42", "abc" * 30]
    complete = [True, False, True, True]
    replica = RewardModel({"model": str(path), "device": "cpu", "max_batch_size": 3})

    routes = score_routes(replica, None)
    body = {"prompts": prompts, "completions": completions, "complete": complete}
    texts, ids = await asyncio.gather(
        call(routes, "POST", "/score", body),
        call(routes, "POST", "/score", {"token_ids": [[5, 6], [5, 6, EOS], [EOS]]}),
    )
    rows = replica._rows.rows(prompts, completions, complete, None)
    wanted = score_of(path, rows)
    assert texts == (200, {"scores": pytest.approx(wanted, abs=1e-5), "model": "model"})
    wanted = score_of(path, [[5, 6], [5, 6, EOS], [EOS]])
    assert ids == (200, {"scores": pytest.approx(wanted, abs=1e-5), "model": "model"})
    assert abs(wanted[0] - wanted[1]) > 1e-3


async def test_the_other_routes_and_the_key(replica: RewardModel) -> None:
    async def get(path: str, key: str | None = None) -> tuple[int, Any]:
        return await call(score_routes(replica, key), "GET", path)

    assert await get("/health") == (200, {"status": "ok", "model": "tiny"})
    status, answer = await get("/v1/models")
    assert (
        status == 200 and answer["data"][0].items() >= {"id": "tiny", "max_model_len": 512}.items()
    )
    assert (await get("/health", "secret"))[0] == 401
    status, answer = await get("/v1/completions")
    assert status == 404 and "/score, /v1/models, /health" in answer["error"]["message"]


async def test_a_failed_forward_pass_is_reported_without_its_text(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Classifier, rows: Any) -> list[float]:
        raise RuntimeError("secret text")

    replica = RewardModel({"model": str(checkpoint), "device": "cpu"})
    routes = score_routes(replica, None)
    monkeypatch.setattr(Classifier, "scores", lambda self, rows: [float("nan")] * len(rows))
    assert (await call(routes, "POST", "/score", {"token_ids": [[1]]}))[1]["scores"] == [None]
    monkeypatch.setattr(Classifier, "scores", fail)
    status, answer = await call(routes, "POST", "/score", {"token_ids": [[1]]})
    assert status == 500 and "secret" not in str(answer)
    assert answer["error"]["message"] == "the server failed; see its log"
    with pytest.raises(RuntimeError, match="a forward pass failed"):
        replica.check_health()
    assert (await call(routes, "GET", "/health"))[0] == 503


Change = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tree: tree.update(architectures=["Qwen3ForCausalLM"]), "no sequence classifier"),
        (lambda tree: tree.update(id2label={"0": "a", "1": "b"}), "and 2 labels"),
        (lambda tree: tree.update(hidden_size=32), "it cannot be loaded"),
        (
            lambda tree: tree.update(num_hidden_layers=3, layer_types=None),
            "its weights lack",
        ),
        (
            lambda tree: tree.update(num_hidden_layers=1, layer_types=None),
            "Qwen3ForSequenceClassification has no place for model.layers.1.",
        ),
        (lambda tree: tree.update(model_type="unheard-of"), "it cannot be loaded"),
    ],
)
def test_another_checkpoint_is_refused_with_one_line(
    tmp_path: Path, tiny_model: Path, change: Change, words: str
) -> None:
    path = save_reward_model(tmp_path / "model", tiny_model)
    tree = json.loads((path / "config.json").read_text())
    change(tree)
    (path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ClassifierError) as refused:
        Classifier(str(path), "float32", "cpu")
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_pickles_and_missing_directories_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    path = save_reward_model(tmp_path / "model", tiny_model)
    (path / "model.safetensors").unlink()
    torch.save({}, path / "pytorch_model.bin")
    with pytest.raises(ClassifierError, match="it cannot be loaded"):
        Classifier(str(path), "float32", "cpu")
    with pytest.raises(ClassifierError, match="there is no such directory"):
        Classifier(str(tmp_path / "none"), "float32", "cpu")


def test_a_sequence_above_the_context_is_refused_at_the_start(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="max_tokens = 513 is above the context of 512 tokens"):
        RewardModel({"model": str(checkpoint), "device": "cpu", "max_tokens": 513})


async def test_a_direct_caller_gets_the_same_error(replica: RewardModel) -> None:
    with pytest.raises(InvalidRequestError, match="has no token"):
        await replica.score(token_ids=[[]])
