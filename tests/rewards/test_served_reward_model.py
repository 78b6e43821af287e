"""A served reward model as a reward: against a small server, and a real Serve application on the
session's Ray cluster."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from reward_checkpoint import save_reward_model, score_of
from served_http import listening

from asyncrl.config import RewardConfig
from asyncrl.rewards.builtin import check_builtin
from asyncrl.rewards.contract import GroupCall, RewardError, call_reward
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.reward_model import _scores

FUNCTION = "asyncrl.rewards.builtin:reward_model"


class Handler(BaseHTTPRequestHandler):
    """Answers with the next entry of the server's `replies`: scores, or a status."""

    server: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        reply = self.server.replies.pop(0)
        status, answer = (reply, {"error": "no"}) if isinstance(reply, int) else (200, reply)
        payload = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        """Log nothing to the terminal."""


@pytest.fixture
def server() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        served: Any = made
        served.requests, served.replies = [], []
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield served
        made.shutdown()
        thread.join()


def group(*completions: str) -> GroupCall:
    reasons = ["stop", *["length"] * (len(completions) - 1)]
    return GroupCall(
        ["p"] * len(completions),
        completions,
        [[1]] * len(completions),
        {"reward_model": "a column"},
        reasons,
        [reason == "length" for reason in reasons],
    )


def asked(server: Any, **settings: Any) -> list[float | None]:
    chosen = {"url": f"http://127.0.0.1:{server.server_port}/", **settings}
    return call_reward(FUNCTION, group("a", "b"), {"reward_model": chosen}).rewards


def test_a_group_is_one_request_and_only_a_stop_is_an_end(server: Any) -> None:
    server.replies = [{"scores": [0.5, None], "model": "m"}]
    assert asked(server) == [0.5, None]
    ((path, body),) = server.requests
    assert path == "/score"
    assert body == {"prompts": ["p"] * 2, "completions": ["a", "b"], "complete": [True, False]}


def test_a_busy_server_is_asked_again_and_then_scores_nothing(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.rewards.endpoint.FIRST_PAUSE_S", 0.01)
    server.replies = [503, {"scores": [1.0]}, {"scores": [1, 2]}, 500, 429, []]
    assert asked(server) == [1.0, 2.0]
    assert asked(server) == [None, None]
    assert server.replies == []


@pytest.mark.parametrize("status", [401, 403, 404])
def test_settings_that_the_server_refuses_are_an_error(server: Any, status: int) -> None:
    server.replies = [status]
    with pytest.raises(
        RewardError, match=rf"the reward model at .*/score refuses requests with status {status}"
    ):
        asked(server)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_completion_that_the_server_refuses_costs_only_that_completion(
    server: Any, status: int
) -> None:
    """The group is refused, then one of its two completions."""
    server.replies = [status, status, {"scores": [2.0]}]
    chosen = {"url": f"http://127.0.0.1:{server.server_port}/"}
    given = call_reward(FUNCTION, group("a", "b"), {"reward_model": chosen})
    assert sorted(given.rewards, key=str) == [2.0, None] and server.replies == []
    assert sorted(given.parts["unscored_refused"]) == [0.0, 1.0]
    assert server.requests[0][1]["completions"] == ["a", "b"]


def test_a_server_that_refuses_every_request_is_an_error(server: Any) -> None:
    """The group, each completion alone, and then an ordinary one."""
    server.replies = [400] * 4
    with pytest.raises(RewardError, match=r"refuses every request, also .*status 400"):
        asked(server)
    assert server.requests[-1][1]["completions"] == ["0"] and server.replies == []
    server.replies = [400, 400, 400, {"scores": [0.5]}]
    assert asked(server) == [None, None]


def test_scores_that_are_no_finite_numbers_are_unscored() -> None:
    request = {"complete": [True] * 5}
    values = json.loads("[1, NaN, 1e999, null, 1" + "0" * 400 + "]")
    assert _scores(values, request) == [1.0, None, None, None, None]
    for wrong in ([1.0], ["1"] * 5, None):
        with pytest.raises(ValueError, match="the answer has"):
            _scores(wrong, request)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set one of url and app"),
        ({"url": "http://127.0.0.1:1", "app": "a"}, "set one of url and app"),
        ({"url": "127.0.0.1:1"}, "url"),
        ({"url": "http://scores.example", "key_env": "K"}, "in the clear"),
        ({"app": "a", "key_env": "K"}, "key_env only has an effect with url"),
        ({"app": "a", "at_once": 2}, "at_once only has an effect with url"),
        ({"url": "http://127.0.0.1:1", "model": "m"}, "model"),
        ({"app": "a", "timeout_s": 30}, "reward_model.timeout_s = 30 is not below"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_run(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        check_builtin(FUNCTION, {"reward_model": settings}, 30.0)
    assert message in str(refused.value)
    check_builtin(FUNCTION, {"reward_model": {"app": "a"}}, 30.0)


class OverTheHandle:
    """The backend of the HTTP routes: the real replica."""

    model_entry = {"id": "served"}  # noqa: RUF012

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def score(self, **fields: Any) -> Any:
        return await self._handle.score.remote(**fields)

    def check_health(self) -> None:
        """The replica answers, so it is healthy."""


class Served(NamedTuple):
    path: Path
    handle: Any


@pytest.fixture(scope="module")
def served(
    ray_cluster: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A reward model whose padding token is EOS, under Serve."""
    from ray import serve
    from ray.serve.config import ProxyLocation

    from asyncrl.serving import build_reward_app
    from asyncrl.serving.reward_settings import RewardModelApp

    path = save_reward_model(
        tmp_path_factory.mktemp("reward_models") / "served", tiny_model, pad_token_id=2
    )
    args = RewardModelApp(model=str(path), device="cpu", num_cpus=0.1, max_batch_size=4, http=False)
    serve.start(proxy_location=ProxyLocation.Disabled)
    handle = serve.run(build_reward_app(args), name="scores", route_prefix=None)
    yield Served(path, handle)
    serve.delete("scores")


@pytest.mark.timeout(300)
async def test_scores_over_the_handle_over_http_and_from_a_reward_process_are_those_of_transformers(
    served: Served,
) -> None:
    from asyncrl.serving.score_routes import score_routes

    rows = [[5, 6, 2], [7], [2], [9] * 100, [4, 2], [5] * 30]
    wanted = score_of(served.path, rows)

    every = [served.handle.score.remote(token_ids=rows)]
    every += [served.handle.score.remote(token_ids=[row]) for row in rows]
    first, *others = [await answer for answer in every]
    assert first == pytest.approx(wanted, abs=1e-5)
    assert [row[0] for row in others] == pytest.approx(wanted, abs=1e-5)
    # "0+=" and the completions in the tokens of the model, with EOS after one that has ended.
    call = GroupCall(["0+="] * 2, ["1", "42"], [[1]] * 2, {}, ["stop", "length"], [False, True])
    wanted = score_of(served.path, [[4, 14, 17, 5, 2], [4, 14, 17, 8, 6]])
    with listening(score_routes(OverTheHandle(served.handle), None)) as address:
        functions = {
            name: {"function": FUNCTION, "arguments": {"reward_model": settings}}
            for name, settings in (("by_url", {"url": address}), ("by_app", {"app": "scores"}))
        }
        config = RewardConfig.model_validate({"functions": functions, "processes": 1})
        with RewardPool(config) as pool:
            parts = pool.submit(call).result(timeout=120).parts
    assert parts["by_url"] == pytest.approx(wanted, abs=1e-5)
    assert parts["by_app"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.timeout(120)
def test_an_application_that_does_not_exist_or_refuses_is_an_error(served: Served) -> None:
    def scored(app: str, completion: str) -> None:
        call_reward(FUNCTION, group(completion), {"reward_model": {"app": app}})

    with pytest.raises(RewardError, match=r"reward_model.app = 'none': .*does not exist.*deploy"):
        scored("none", "1")
    too_long = group("1" * 600, "1")
    given = call_reward(FUNCTION, too_long, {"reward_model": {"app": "scores"}})
    assert given.rewards[0] is None and given.rewards[1] is not None
    assert given.parts == {"unscored_refused": [1.0, 0.0]}
