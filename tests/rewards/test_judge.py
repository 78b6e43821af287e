"""The judge against a small server on loopback."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from asyncrl.config import RewardConfig
from asyncrl.rewards.builtin import check_builtin
from asyncrl.rewards.contract import GroupCall, RewardError, call_reward
from asyncrl.rewards.endpoint import Accepted, RefusedError
from asyncrl.rewards.judge import JudgeSettings
from asyncrl.rewards.pool import RewardPool

WHOLE = "whole"
"""Finish reason of a text that is the whole body."""


class Judge(ThreadingHTTPServer):
    """Answers with the entry of `replies` for the completion: a text, a text with its finish
    reason, a status, or a list of these, one per request."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self):
        self.requests, self.connections, self.replies, self.refusal = [], set(), {}, "no"
        self.together = threading.Barrier(1)
        """Holds each answer until this many requests have arrived."""
        self.lock, self.success = threading.Lock(), 200
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def reply_to(self, question):
        completion = question.rpartition("A: ")[2]
        reply = self.replies.get(completion, "Score: 10")
        if isinstance(reply, list):
            return reply.pop(0)
        return reply


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, dict(self.headers), body))
            self.server.connections.add(self.client_address)
            reply = self.server.reply_to(body["messages"][0]["content"])
        self.server.together.wait(30)
        raw = reply if isinstance(reply, bytes) else None
        status, text = (
            (200, "")
            if raw is not None
            else (200, reply)
            if isinstance(reply, str | tuple)
            else (reply, self.server.refusal)
        )
        text, reason = text if isinstance(text, tuple) else (text, "stop")
        message = {"role": "assistant", "content": text}
        payload = json.dumps(
            {"choices": [{"message": message, "finish_reason": reason}]}
            if status == 200
            else {"error": text}
        ).encode()
        payload = text.encode() if reason == WHOLE else payload if raw is None else raw
        self.send_response(self.server.success if status == 200 else status)
        if raw is not None and not raw.startswith(b"["):
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_):
        """Log nothing to the terminal."""


@pytest.fixture
def judge():
    with Judge() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def pool(judge, policy="fail", concurrency=8, **settings):
    settings = {
        "url": judge.url,
        "model": "judge-1",
        "template": "Q: {prompt} ({hint}) A: {completion}",
        **settings,
    }
    function = {"function": "asyncrl.rewards.builtin:llm_judge", "arguments": {"judge": settings}}
    return RewardPool(
        RewardConfig.model_validate(
            {
                "functions": {"judge": function},
                "processes": 1,
                "concurrency": concurrency,
                "policy": policy,
            }
        )
    )


def score(rewards, *completions):
    call = GroupCall(
        ["p"] * len(completions),
        completions,
        [[1]] * len(completions),
        {"hint": "h", "url": "a column"},
    )
    return rewards.submit(call).result(timeout=60)


def test_scores_are_read_from_the_replies_and_connections_are_kept(judge, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    judge.replies = {
        "half": "Fine. Score: 5",
        "two": "Score: 1 at first, no: **Score**: 2/10",
        "{hint}": "Score: 0",
    }
    with pool(judge, key_env="JUDGE_KEY") as rewards:
        given_scores = score(rewards, "good", "half", "two", "{hint}").parts["judge"]
        assert given_scores == [
            1.0,
            0.5,
            0.2,
            0.0,
        ]
        opened = set(judge.connections)
        given_scores = score(rewards, "good", "half", "two", "{hint}").parts["judge"]
        assert given_scores == [
            1.0,
            0.5,
            0.2,
            0.0,
        ]
    assert judge.connections == opened
    path, headers, body = judge.requests[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer s3cret"
    assert body["model"] == "judge-1" and body["temperature"] == 0.0
    asked = {body["messages"][0]["content"] for _, _, body in judge.requests}
    assert asked == {
        "Q: p (h) A: good",
        "Q: p (h) A: half",
        "Q: p (h) A: two",
        "Q: p (h) A: {hint}",
    }


def test_sixteen_groups_reach_the_judge_at_once(judge):
    """Sixteen groups then take as long as one."""
    judge.together = threading.Barrier(16)
    with pool(judge, concurrency=16) as rewards:
        groups = [
            rewards.submit(GroupCall(["p"], [f"group {number}"], [[1]], {"hint": "h"}))
            for number in range(16)
        ]
        assert [group.result(timeout=60).parts["judge"] for group in groups] == [[1.0]] * 16


def test_a_failing_judge_is_retried_and_then_scores_nothing(judge):
    judge.replies = {
        "busy": [503, 429, "Score: 4"],
        "mute": "I would rather not say.",
        "wild": "Score: 11",
        "down": 500,
    }
    with pool(judge, retries=2) as rewards:
        given_scores = score(rewards, "busy", "mute", "wild", "down", "good").parts["judge"]
        assert given_scores == [
            0.4,
            None,
            None,
            None,
            1.0,
        ]
    assert len(judge.requests) == 4 * 3 + 1


def test_an_invalid_body_scores_nothing(judge):
    judge.replies = {"packed": b"this is no gzip", "deep": b"[" * 100_000, "list": b"[]"}
    with pool(judge, retries=0) as rewards:
        given_scores = score(rewards, "packed", "deep", "list", "good").parts["judge"]
        assert given_scores == [
            None,
            None,
            None,
            1.0,
        ]


def test_a_missing_judge_scores_nothing() -> None:
    with Judge() as closed:
        pass
    with pool(closed, retries=1, timeout_s=5.0) as rewards:
        assert score(rewards, "good").parts["judge"] == [None]


def test_a_request_that_the_server_refuses_is_an_error(judge):
    judge.replies = {"bad": 401}
    with (
        pool(judge) as rewards,
        pytest.raises(
            RewardError, match=r"RuntimeError: the judge at .* refuses requests with status 401"
        ),
    ):
        score(rewards, "good", "bad")


def given(judge, *completions, **settings):
    """What the function returns, in this process."""
    settings = {
        "url": judge.url,
        "model": "m",
        "template": "Q: {prompt} A: {completion}",
    } | settings
    call = GroupCall(["p"] * len(completions), completions, [[1]] * len(completions))
    return call_reward("asyncrl.rewards.builtin:llm_judge", call, {"judge": settings})


@pytest.mark.parametrize("status", [400, 413, 414, 422, 451])
def test_a_completion_that_the_server_refuses_costs_only_that_completion(judge, status):
    judge.replies = {"long": status}
    found = given(judge, "good", "long", "good")
    assert found.rewards == [1.0, None, 1.0]
    assert found.parts.pop("unscored_refused") == [0.0, 1.0, 0.0]
    assert found.parts == {"unscored_cut": [0.0] * 3, "unscored_unread": [0.0] * 3}
    assert len(judge.requests) == 3  # a retry would be refused as well


@pytest.mark.parametrize("status", [401, 403, 404])
def test_settings_that_the_server_refuses_are_an_error(judge, status):
    judge.replies = {"bad": status}
    with pytest.raises(RewardError, match=f"refuses requests with status {status}: .*see judge"):
        given(judge, "good", "bad")


@pytest.mark.parametrize(
    "why",
    [
        "your input was flagged",
        "rejected by our safety system",
        "usage policies violated",
        "content policy",
        "content_filter",
        "ResponsibleAIPolicyViolation",
        "PROHIBITED_CONTENT",
    ],
)
def test_a_flagged_completion_is_refused_alone(judge, why):
    judge.replies, judge.refusal = {"bad": 403}, why
    assert given(judge, "good", "bad").rewards == [1.0, None]


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [], "prompt_feedback": {"block_reason": "SAFETY"}},
        {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}},
        {"error": {"code": "content_filter"}},
        {"choices": [{"message": {}, "error": {"message": "Input was flagged"}}]},
    ],
)
def test_a_block_in_the_body_of_an_answer_is_a_refusal(judge, body):
    judge.replies = {"bad": (json.dumps(body), WHOLE)}
    found = given(judge, "good", "bad")
    assert found.rewards == [1.0, None] and found.parts["unscored_refused"] == [0.0, 1.0]
    assert len(judge.requests) == 2


def test_a_reply_of_a_server_with_filters_is_read(judge):
    results = {"content_filter_results": {"hate": {"filtered": False}}}
    choice = {"message": {"content": "Score: 7"}, "finish_reason": "stop", **results}
    judge.replies = {"good": (json.dumps({"choices": [choice]}), WHOLE)}
    assert given(judge, "good").rewards == [0.7]


def test_every_status_of_success_is_an_answer(judge):
    judge.success = 201
    assert given(judge, "good").rewards == [1.0]


def test_a_server_that_refuses_every_request_is_an_error(judge):
    judge.replies, judge.refusal = {"good": 400, "0": 400}, "max_tokens is not supported"
    with pytest.raises(
        RewardError,
        match=r"refuses every request, .* with 0 as its texts \(status 400: .*max_tokens is not",
    ):
        given(judge, "good", "good")
    assert len(judge.requests) == 3
    judge.replies = {"0": 400}
    assert given(judge, "good").rewards == [1.0]


@pytest.mark.parametrize("after", [(), ("good",)])
def test_refused_completions_never_end_the_run(judge, after):
    """Not even if no other one is among the first."""
    bad = [f"bad {number}" for number in range(70)]
    judge.replies = dict.fromkeys(bad, 400)
    assert given(judge, *bad, *after).rewards == [*[None] * 70, *[1.0] * len(after)]


async def test_a_request_that_waited_before_the_ordinary_one_rescues_the_run() -> None:
    accepted = Accepted("the judge", "judge.url")

    async def ask():
        accepted.any = True  # by a request that waited
        raise RefusedError("status 400")

    await accepted.check(ask)


@pytest.mark.parametrize(
    "reply",
    [
        r"Score: \boxed{7}",
        r"$$\text{Score: } 1$$ no, score: $\boxed{7/10}$",
        "Score: **7**",
        "Score: 7/10.",
        "Score: **7**/10",
        "7 of 10 [[7]]",
        "Score: [7]",
        "**Score:** 7",
        '{"score": 7, "max_score": 10}',
        "Score: 7 out of 10",
        "The maximum score: 10\n\n## Score\n: 7",
    ],
)
def test_common_ways_to_write_a_score_are_read(judge, reply):
    judge.replies = {"good": reply}
    assert given(judge, "good", retries=0).rewards == [0.7]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (("It claims Score: 10, but", "length"), "cut"),
        (("<think>It claims Score: 10, but", "max_tokens"), "cut"),
        (("Score: 10", "content_filter"), "refused"),
        (("Score: 10", "content_filter: PROHIBITED_CONTENT"), "refused"),
        (("Score: 10", "max_output_tokens"), "cut"),
        (("Score: 10", "model_context_window_exceeded"), "cut"),
        (("Score: 10", "a_new_reason"), "unread"),
        (("Score: 1/5", "stop"), "unread"),
        (("Score: 7,5", "stop"), "unread"),
        (("Score: 0-10 scale", "stop"), "unread"),
        (("<think>It claims Score: 10", "stop"), "unread"),
        (("Score: 10", "abort"), "unread"),
        (("Score: \\boxed{1}/5", "stop"), "unread"),
        (("Seven of ten", "stop"), "unread"),
        (("Score: 11", "stop"), "unread"),
    ],
)
def test_a_judgment_that_did_not_end_is_no_score(judge, reply, reason):
    judge.replies = {"cut": reply, "good": ("<think>Score: 10?</think>Score: 3", "stop")}
    found = given(judge, "cut", "good", retries=0)
    assert found.rewards == [None, 0.3]
    for one in ("cut", "refused", "unread"):
        assert found.parts[f"unscored_{one}"] == [float(reason == one), 0.0]


def test_a_list_in_the_arguments_is_the_same_for_all(judge):
    settings = {"url": judge.url, "model": "m", "template": "{rubric} {prompt} A: {completion}"}
    two = GroupCall(["p"] * 2, ["a", "b"], [[1]] * 2)
    arguments = {"judge": settings, "rubric": ["x", "y"]}
    call_reward("asyncrl.rewards.builtin:llm_judge", two, arguments)
    asked = {body["messages"][0]["content"] for _, _, body in judge.requests}
    assert asked == {"['x', 'y'] p A: a", "['x', 'y'] p A: b"}


def test_a_judge_reads_the_answer_part(judge):
    found = given(judge, "<think>Score: 10</think>good", "<think>good")
    assert found.rewards == [1.0, 0.0]
    assert [body["messages"][0]["content"] for _, _, body in judge.requests] == ["Q: p A: good"]


def test_a_missing_key_is_named(judge, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with (
        pool(judge, key_env="JUDGE_KEY") as rewards,
        pytest.raises(
            RewardError, match=r"judge.key_env = 'JUDGE_KEY': this process has no such variable"
        ),
    ):
        score(rewards, "good")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "m"}, "url"),
        ({"url": "http://127.0.0.1:1/v1"}, "model"),
        ({"url": "ftp://127.0.0.1", "model": "m"}, "url"),
        ({"url": "http://judge.example/v1", "model": "m", "key_env": "K"}, "in the clear"),
        ({"url": "http://127.0.0.1:1", "model": "m", "score": "("}, "not a regular expression"),
        ({"url": "http://127.0.0.1:1", "model": "m", "score": "(a)(b)"}, "has 2 groups"),
        ({"url": "http://127.0.0.1:1", "model": "m", "lowest": 5, "highest": 5}, "not below"),
        ({"url": "http://127.0.0.1:1", "model": "m", "template": "{prompt}"}, "{completion}"),
        ({"url": "http://127.0.0.1:1", "model": "m", "tries": 3}, "tries"),
        ({"url": "http://127.0.0.1:1", "model": "m", "timeout_s": 30}, "reward.deadline_s = 30"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_run(settings, message):
    with pytest.raises(ValueError) as refused:
        check_builtin("asyncrl.rewards.builtin:llm_judge", {"judge": settings}, 30.0)
    assert message in str(refused.value)


def test_a_built_in_that_does_not_exist_is_refused_and_others_are_left_alone() -> None:
    with pytest.raises(ValueError, match="there is no 'exact' in"):
        check_builtin("asyncrl.rewards.builtin:exact", {}, 30.0)
    check_builtin("asyncrl.rewards.builtin:exact_match", {}, 30.0)
    check_builtin("mine:llm_judge", {"judge": 7}, 30.0)


def test_a_key_goes_to_loopback_or_over_tls() -> None:
    for url in ("http://localhost:8000/v1", "http://[::1]:8000/v1", "https://judge.example/v1"):
        assert JudgeSettings(url=url, model="m", key_env="K").key_env == "K"
