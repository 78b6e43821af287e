"""Groups of sessions: a worker with real environment processes and a fake generator that plays."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from asyncrl.config import Config, EnvironmentConfig
from asyncrl.contracts.errors import RolloutFailedError
from asyncrl.contracts.group_table import groups_from_table, table_from_ipc
from asyncrl.contracts.messages import Generated, GenerateRequest
from asyncrl.contracts.nodes import BRANCHES, branch_class
from asyncrl.contracts.rows import Completion, Prompt, VersionSpan
from asyncrl.contracts.session_table import SessionsRow, nodes_of_group
from asyncrl.control.diagnostics import batch_metrics, scoring_metrics
from asyncrl.observe.metric_catalog import known_names
from asyncrl.preflight.specs import scoring_spec, worker_spec
from asyncrl.rewards.contract import call_reward
from asyncrl.rewards.pool import GroupRewards
from asyncrl.rewards.score import attach_rewards, group_call, score_table
from asyncrl.rewards.scoring import scored_block
from asyncrl.rewards.summary import examples, scored_from_text, scored_to_text, summaries
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.sessions.session_rows import session_rows
from asyncrl.testing import FakeGenerate
from asyncrl.text.template import render_messages
from asyncrl.text.tokenizer import decode_prompt, load_tokenizer
from jobs.guess.game import WIDTH
from jobs.guess.task import make_model

LOW, HIDDEN = 20, 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guess") / "model"
    make_model(folder, 0)
    return folder


class Player(FakeGenerate):
    """Halves the range that the prompt leaves, at a version that grows with each answer."""

    def __init__(self, model: Path, writes: Callable[[int], str] | None = None) -> None:
        super().__init__()
        self.tokenizer: Any = load_tokenizer(str(model))
        self.writes = writes or self.call
        self.requests: list[GenerateRequest] = []
        self.made: dict[tuple[int, ...], int] = {}
        """Prompt and completion → the version that made it last."""
        self.chains = False
        """Whether only one session plays, so that the versions before a request are known."""

    def call(self, number: int) -> str:
        return f'<tool_call>{{"name": "guess", "arguments": {{"number": {number}}}}}</tool_call>'

    async def generate(self, request: GenerateRequest) -> Generated:
        assert request.min_weights is not None and request.min_weights.version <= self.version
        self.requests.append(request)
        if self.chains:
            # At least as new as the turns before.
            known = [one for one in self.made if request.prompt_ids[: len(one)] == one]
            newest = max((self.made[one] for one in known), default=0)
            assert request.min_weights.version == newest
        text = decode_prompt(self.tokenizer, request.prompt_ids)
        first, last = LOW, LOW + WIDTH - 1
        said = re.findall(r'"number": (\d+)\}.*?tool\n(higher|lower)', text, re.DOTALL)
        for number, answer in said:
            first, last = (
                (int(number) + 1, last) if answer == "higher" else (first, int(number) - 1)
            )
        ids = self.tokenizer.encode(self.writes((first + last) // 2) + "<|im_end|>")
        ids = tuple(ids[: request.max_tokens])
        spans = (VersionSpan(self.version, 0, len(ids)),)
        completion = Completion(ids, (-0.5,) * len(ids), spans, "stop", "text")
        self.made[(*request.prompt_ids, *ids)] = self.version
        self.version += 1
        return Generated((completion,) * request.n, "fake", 1.0, 2.0)


def make_config(model: Path, function: str, samples: int = 3, **environment: Any) -> Config:
    return Config.model_validate(
        {
            "name": "worker",
            "max_steps": 1,
            "model": {"path": str(model)},
            "data": {"train": "unused", "max_length": 160},
            "environment": {"function": function, "processes": 1, **environment},
            "algorithm": {"advantage": "reinforce_plus_plus" if samples == 1 else "grpo"},
            "rollout": {"n_samples_per_prompt": samples, "max_completion_length": 12},
        }
    )


def made(
    config: Config, generate: FakeGenerate, columns: Mapping[str, object]
) -> tuple[pa.Table, Any]:
    """The row of a group that a worker makes, and what it tells the driver."""
    prompt = Prompt(5, 0, f"{LOW}..", (4, 5), columns)

    async def scenario() -> tuple[pa.Table, Any]:
        worker = RolloutWorker(worker_spec(config, "run", 2, lambda: generate))
        await worker.ready()
        try:
            finished = await worker.rollout(prompt, 0)
            stream = await worker.take("reader", 8, 1.0)
        finally:
            await worker.close()
        return table_from_ipc(cast("pa.Buffer", stream)), finished

    return asyncio.run(asyncio.wait_for(scenario(), 120))


def rewarded(config: Config, table: pa.Table) -> pa.Table:
    """The table with raw rewards."""
    call = group_call(table)
    parts: dict[str, list[float | None]] = {}
    for name, function in config.reward.functions.items():
        found = call_reward(function.function, call)
        parts[name] = found.rewards
        parts |= {f"{name}/{part}": values for part, values in found.parts.items()}
    return attach_rewards(table, GroupRewards(parts))


def scored(config: Config, table: pa.Table) -> dict[str, Any]:
    """The row with rewards, statuses and advantages."""
    (row,) = score_table(rewarded(config, table), scoring_spec(config)).to_pylist()
    return cast("dict[str, Any]", row)


def trains(config: Config, end: str) -> EnvironmentConfig:
    """The environment of a config, which also trains sessions with this end."""
    assert config.environment is not None
    ends = [*config.environment.train_ends, end]
    return config.environment.model_copy(update={"train_ends": ends})


def test_games_are_won_on_exactly_the_tokens_that_were_sampled(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, player = make_config(model, "jobs.guess.game:play"), Player(model)
    table, finished = made(config, player, {"low": LOW, "hidden": HIDDEN})
    row = scored(config, table)
    assert row["reward"] == [1.0] * 3 and row["status"] == ["ok"] * 3
    assert row["session_end"] == ["done"] * 3 and row["session_note"] == [""] * 3
    assert [part["environment/won"] for part in row["reward_parts"]] == [1.0] * 3
    assert row["turn_reward"] == [1.0] * 18
    sessions = nodes_of_group(cast("SessionsRow", row))
    for nodes, messages in zip(sessions, group_call(table).sessions or [], strict=True):
        (only,) = session_rows(nodes).rows
        text = render_messages(player.tokenizer, values_of(messages.messages), {}, None, False)
        assert decode_prompt(player.tokenizer, only.token_ids.tolist()) == text.rstrip("\n")
        assert only.trained.sum() == 6 * 4  # six calls of four tokens
        # A turn never uses older weights than the one before it.
        versions = only.versions[only.trained]
        assert (versions[1:] >= versions[:-1]).all()
    assert finished.tokens == 3 * 6 * 4
    # The game's template does not write its tool.
    assert table["session_overridden"].to_pylist() == [[6] * 3]
    assert caplog.text.count("does not write the tools of requests") == 1
    assert finished.oldest_version == 0
    (group,) = groups_from_table(table)
    assert [len(t.completion.turns) for t in group.trajectories] == [6] * 3
    assert len({request.seed for request in player.requests}) == 18
    # Three sessions that ask the same have the same hashes, one for each turn.
    hashes = [[node.request_hash for node in nodes if node.sampled] for nodes in sessions]
    assert hashes[0] == hashes[1] == hashes[2] and len({*hashes[0], ""}) == 7


def test_a_turn_asks_for_the_newest_version_before_it(model: Path) -> None:
    config, player = make_config(model, "jobs.guess.game:play", samples=1), Player(model)
    player.chains = True
    made(config, player, {"low": LOW, "hidden": HIDDEN})
    least = [request.min_weights and request.min_weights.version for request in player.requests]
    assert least == [0, 0, 1, 2, 3, 4]


def test_the_summary_of_a_group_survives_its_way_to_the_driver(model: Path) -> None:
    config = make_config(model, "tests.environments.environments_under_test:sometimes_raises")
    table, _ = made(config, Player(model), {"low": LOW})
    block = scored_block(rewarded(config, table), scoring_spec(config))
    (found,) = map(scored_from_text, block["scored_summary"].to_pylist())
    assert found.sessions is not None
    (example,) = examples(block)
    assert example.completion.startswith("user: q\nassistant: ")
    assert found.sessions.ends == {"done": 2, "env_error": 1}
    assert found.sessions.tokens == {"trained": 8, "env_error": 4}
    assert sum(found.sessions.tokens.values()) == found.tokens
    assert (found.sessions.turns, found.sessions.branches, found.usable) == (3, {}, 2)
    metrics = scoring_metrics([found]) | batch_metrics([found], 2, [0], 2)
    assert metrics["session/env_error_ratio"] == pytest.approx(1 / 3)
    assert metrics["session/tokens_sampled"] == 12 == metrics["session/tokens_trained"] + 4
    assert {name for name in metrics if name.startswith("session/")} <= (
        known_names() | {"session/tokens_env_error"}
    )


def test_branches_are_counted_by_class(model: Path) -> None:
    config = make_config(model, "tests.environments.environments_under_test:rewrites")
    table, _ = made(config, Player(model), {"low": LOW})
    block = scored_block(rewarded(config, table), scoring_spec(config))
    (found,) = map(scored_from_text, block["scored_summary"].to_pylist())
    assert found.sessions is not None and found.sessions.turns == 3 * 6
    assert found.sessions.branches == {"separate": 3, "forked": 3, "repeated": 6}
    metrics = scoring_metrics([found])
    counts = {name: value for name, value in metrics.items() if "/branches_" in name}
    assert counts == {f"session/branches_{name}": n for name, n in found.sessions.branches.items()}
    every = replace(found.sessions, branches=dict.fromkeys(BRANCHES, 1))
    for sessions, leaving in ((found.sessions, 0), (every, len(BRANCHES) - 3)):
        metrics = scoring_metrics([replace(found, sessions=sessions)])
        # Not forked, repeated and separate ones.
        assert metrics["session/branch_ratio"] == leaving / found.sessions.turns
    assert {f"session/branches_{name}" for name in BRANCHES} <= known_names()
    (row,) = table.to_pylist()
    classes = [branch_class(reason) for reason in row["turn_branch_reason"]]
    assert classes == ["", "", "forked", "separate", "repeated", "repeated"] * 3


def values_of(messages: Any) -> Any:
    """The messages with the arguments of their calls as values, as templates read them."""
    from asyncrl.text.chat_messages import template_messages

    return template_messages(messages)


def test_the_same_seeds_give_the_same_requests(model: Path) -> None:
    config = make_config(model, "jobs.guess.game:play")
    seeds = []
    for _ in range(2):
        player = Player(model)
        made(config, player, {"low": LOW, "hidden": HIDDEN})
        seeds.append(sorted(request.seed or 0 for request in player.requests))
    assert seeds[0] == seeds[1]


def test_a_call_that_does_not_parse_stays_text(model: Path) -> None:
    config = make_config(model, "jobs.guess.game:play")
    writes = '<tool_call>{"name": "guess", "arguments": {"number": }}</tool_call>'
    table, _ = made(config, Player(model, lambda _: writes), {"low": LOW, "hidden": 30})
    row = scored(config, table)
    assert row["reward"] == [-1.0] * 3 and row["completion_text"] == ["text"] * 3
    assert row["session_unparsed"] == [1] * 3 and row["turn_reward"] == [-1.0] * 3
    assert [part["environment/won"] for part in row["reward_parts"]] == [0.0] * 3


def test_a_session_that_fails_is_masked_and_its_siblings_are_trained(model: Path) -> None:
    function = "tests.environments.environments_under_test:sometimes_raises"
    config = make_config(model, function)
    table, _ = made(config, Player(model), {"low": LOW})
    row = scored(config, table)
    assert sorted(row["session_end"]) == ["done", "done", "env_error"]
    failed = row["session_end"].index("env_error")
    assert "RuntimeError: unlucky" in row["session_note"][failed]
    assert row["status"][failed] == "env_error"
    assert row["reward"][failed] is None and row["advantage"][failed] is None
    assert [row["status"][place] for place in range(3) if place != failed] == ["ok", "ok"]
    (summary,) = summaries(score_table(rewarded(config, table), scoring_spec(config)))
    assert summary.sessions is not None
    ((why, count),) = summary.sessions.failures.items()
    assert why.startswith("env_error: RuntimeError: unlucky") and count == 1
    assert scored_from_text(scored_to_text(summary)) == summary
    trained = config.model_copy(update={"environment": trains(config, "env_error")})
    (summary,) = summaries(score_table(rewarded(trained, table), scoring_spec(trained)))
    assert summary.sessions is not None and not summary.sessions.failures


def test_a_session_whose_process_another_ended_begins_again(model: Path) -> None:
    function = "tests.environments.environments_under_test:dies_once"
    config = make_config(model, function, block_s=1)
    player = Player(model)
    table, _ = made(config, player, {"low": LOW})
    assert sorted(scored(config, table)["session_end"]) == ["done", "done", "env_error"]
    assert len(player.requests) == 5  # three before the death, and two again
    assert len({request.seed for request in player.requests}) == 5


def test_a_session_without_a_turn_has_no_token(model: Path) -> None:
    function = "tests.environments.environments_under_test:asks_nothing"
    config = make_config(model, function)
    table, finished = made(config, Player(model), {"low": LOW})
    row = scored(config, table)
    assert row["status"] == ["no_token"] * 3 and finished.tokens == 0
    assert nodes_of_group(cast("SessionsRow", row)) == [[], [], []]
    assert row["session_note"] == ["it asked the model for no turn"] * 3
    (summary,) = summaries(score_table(rewarded(config, table), scoring_spec(config)))
    assert summary.sessions is not None and summary.sessions.unasked == 3
    assert summary.sessions.failures == {"done: it asked the model for no turn": 3}
    assert scoring_metrics([summary])["session/unasked_ratio"] == 1.0


def test_a_generator_that_fails_fails_the_group(model: Path) -> None:
    class Broken(Player):
        async def generate(self, request: GenerateRequest) -> Generated:
            raise ValueError("no such token")

    config = make_config(model, "jobs.guess.game:play")
    with pytest.raises(RolloutFailedError, match=r"no such token[\s\S]*Traceback"):
        made(config, Broken(model), {"low": LOW, "hidden": 30})
