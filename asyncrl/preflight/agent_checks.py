"""Scripted agents in the config's own environment: how each of them ends, its reward, and what a
turn costs."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import psutil

from asyncrl.config import Config, EnvironmentConfig
from asyncrl.contracts.rows import Prompt
from asyncrl.environments.pool import SessionLostError
from asyncrl.environments.running import End, Ended
from asyncrl.preflight.finding import Finding
from asyncrl.preflight.scripted import (
    Script,
    ScriptedModel,
    ScriptedSession,
    TimedTemplate,
)
from asyncrl.preflight.scripted_agents import ANSWERS, FORMS, RIGHT, WRONG, ScriptedAgents, says
from asyncrl.rewards.code import share_settings
from asyncrl.rewards.contract import GroupCall, RewardError, Session
from asyncrl.rewards.pool import RewardPool, total_rewards
from asyncrl.rollout.player import Player
from asyncrl.runtime.together import together
from asyncrl.sessions.session import SessionTemplate
from asyncrl.text.answer import answer_format
from asyncrl.text.chat_messages import plain_text
from asyncrl.text.response import ResponseReader
from asyncrl.text.template import Message, Schema

__all__ = ["AgentChecks", "Tried"]

DEADLINE_S, LATENCY_S = 1.0, 60.0
"""Of the slow agent: the deadline of its session here, and the seconds of a turn."""
LONGEST_S, LONGEST_AT_URL_S = 30.0, 120.0
"""Deadline of other sessions here, and of those of programs, which take long to start. That of the
config counts if it is shorter."""
COSTED, COSTED_S = 100, 1.0
"""Sessions whose cost is measured, and the seconds after which no further one begins."""
BUILTIN = "asyncrl.rewards.builtin:environment"
NOT_TRAINED = " and are not trained: "


@dataclass(frozen=True, slots=True)
class Tried:
    """A session of a scripted agent."""

    agent: str
    form: str
    """In which form it gives its answer; "" if it has only one."""
    prompt: Prompt
    session: ScriptedSession
    ended: Ended

    @property
    def text(self) -> str:
        """The text of the last turn."""
        chat = self.session.session.chat_so_far
        return str(plain_text(chat[-1].get("content"))) if chat else ""


class AgentChecks:
    """Plays scripted agents in the environment of a config, on some prompts."""

    def __init__(
        self,
        config: Config,
        environment: EnvironmentConfig,
        template: SessionTemplate,
        reader: ResponseReader,
        prompts: Sequence[Prompt],
    ) -> None:
        self._config, self._environment = config, environment
        self._template, self._reader, self._prompts = template, reader, prompts
        self._agents = ScriptedAgents(template, prompts, config.rollout.max_completion_length)
        self.tried: list[Tried] = []

    @property
    def first_request(self) -> tuple[Sequence[Message], Sequence[Schema] | None] | None:
        """The messages and tools of a first turn. None: the environment asked for none."""
        requests = [one.session.requests[0] for one in self.tried if one.session.requests]
        return next((one for one in requests if one[1]), requests[0] if requests else None)

    async def play(self) -> list[Finding]:
        """Play all agents, and the cost. Raises EnvironmentFailedError."""
        longest = LONGEST_AT_URL_S if self._environment.url else LONGEST_S
        shorter = {"processes": 1, "deadline_s": min(self._environment.deadline_s, longest)}
        pool = Player(self._environment.model_copy(update=shorter))
        try:
            await pool.start()
            self.tried = await together(
                self._try(pool, agent, form, script, prompt)
                for prompt in self._prompts
                for agent, form, script in self._agents.of(prompt)
            )
            cost = await self._cost(pool)
        finally:
            await pool.close()
        return [*await asyncio.to_thread(self._findings), *await self._slow(), *cost]

    async def _try(
        self,
        pool: Player,
        agent: str,
        form: str,
        script: Script,
        prompt: Prompt,
        latency_s: float = 0.0,
        template: SessionTemplate | None = None,
    ) -> Tried:
        template = template or self._template
        alone = False
        while True:
            most = self._config.rollout.max_completion_length
            model = ScriptedModel(template, script, most, latency_s)
            session = ScriptedSession(template, self._reader, model)
            task = {**prompt.columns, "prompt": prompt.text}
            try:
                ended = await pool.play(task, session, alone)
            except SessionLostError as error:
                alone = alone or error.alone
            except Exception as error:  # of the scripted model, or of the session
                note = f"the session failed: {type(error).__name__}: {error}"
                ended = Ended("env_error", note=note)
                return Tried(agent, form, prompt, session, ended)
            else:
                return Tried(agent, form, prompt, session, ended)
            finally:
                session.session.close("the session has ended")

    def _findings(self) -> list[Finding]:
        rewards = self._rewards()
        if isinstance(rewards, Finding):
            none: list[float | None] = [None] * len(self.tried)
            return [rewards, *self._agent_lines(none)]
        return [*self._agent_lines(rewards), *self._order(rewards)]

    def _agent_lines(self, rewards: Sequence[float | None]) -> list[Finding]:
        found = list(zip(self.tried, rewards, strict=True))
        names = list(dict.fromkeys(one.agent for one in self.tried))
        lines = _once([self._agent_line(name, found) for name in names])
        if RIGHT in names:
            return lines
        columns = ", ".join(self._prompts[0].columns) or "none"
        text = (
            f"could not be made: the data has no column {', '.join(ANSWERS)} (its columns:"
            f" {columns}); so whether a right answer gets more than a wrong one is not known"
        )
        return [Finding("warn", "agent: right", text), *lines]

    def _agent_line(self, name: str, found: Sequence[tuple[Tried, float | None]]) -> Finding:
        """How the sessions of an agent ended, and what they got."""
        mine = [(one, reward) for one, reward in found if one.agent == name]
        normal = name in (RIGHT, WRONG)
        check = f"agent: {name}"
        errors = [one.ended for one, _ in mine if one.ended.end in ("env_error", "agent_error")]
        if errors:
            end = errors[0].end
            # A program may end with an error because the answer is wrong, but not each time.
            fails = normal and (end == "env_error" or len(errors) == len(mine))
            return Finding(
                "FAIL" if fails else "warn",
                check,
                f"{len(errors)} of {len(mine)} sessions end with {end}{NOT_TRAINED}"
                f"{errors[0].note}",
            )
        ends = Counter(one.ended.end for one, _ in mine)
        if self._environment.url and not any(one.session.requests for one, _ in mine):
            text = f"{len(mine)} sessions: {_counts(ends)}; the model was asked for no turn"
            return Finding("FAIL" if normal else "warn", check, text)
        turns = max(one.ended.turns for one, _ in mine)
        unparsed = sum(one.session.unparsed for one, _ in mine)
        given = sorted({reward for _, reward in mine if reward is not None})
        text = (
            f"{len(mine)} sessions{f' ({len(FORMS)} forms of the answer)' if normal else ''}:"
            f" {_counts(ends)};"
            f" at most {turns} {'turn' if turns == 1 else 'turns'}; reward {_range(given)}"
            + (f"; {unparsed} turns could not be parsed" if unparsed else "")
        )
        trained = [reward for one, reward in mine if one.ended.end in self._environment.train_ends]
        if None in trained:
            why = f"{text}; some sessions have no reward, so they are not trained"
            return Finding("FAIL" if normal and not given else "warn", check, why)
        if normal and not trained:
            note = next((one.ended.note for one, _ in mine if one.ended.note), "")
            return Finding("FAIL", check, f"{text}; no session is trained ({note})")
        if normal and len(trained) < len(mine):
            return Finding("warn", check, f"{text}; some ends are not trained")
        return Finding("ok", check, text)

    def _order(self, rewards: Sequence[float | None]) -> list[Finding]:
        """Whether a right answer gets more than any other."""
        over: dict[str, float] = {}
        rights: set[float] = set()
        for prompt in self._prompts:
            given = {
                (one.agent, one.form): reward
                for one, reward in zip(self.tried, rewards, strict=True)
                if one.prompt is prompt and reward is not None
            }
            # By how much a right answer beats a wrong one, in each form that graders may want.
            gains = {
                form: given[RIGHT, form] - given[WRONG, form]
                for form in FORMS
                if {(RIGHT, form), (WRONG, form)} <= given.keys()
            }
            if not gains:
                continue
            worst = min(gains, key=lambda form: gains[form])
            if gains[worst] < 0:
                right, wrong = given[RIGHT, worst], given[WRONG, worst]
                text = (
                    f"a wrong answer gets more than the right one: {wrong:g} and {right:g} for"
                    f" answers of the form {worst.format('…')!r}"
                )
                return [Finding("FAIL", "reward", text)]
            best = max(gains, key=lambda form: (gains[form], given[RIGHT, form]))
            right = given[RIGHT, best]
            rights.add(right)
            by = {agent: reward - right for (agent, _), reward in given.items()}
            by |= {RIGHT: -math.inf, WRONG: -gains[best]}
            over = {agent: max(over.get(agent, -math.inf), more) for agent, more in by.items()}
        if not rights:
            return []
        got = _range(sorted(rights))
        if more := [agent for agent, by in over.items() if by > 0]:
            text = f"right answers get {got}, and these agents get more: {', '.join(more)}"
            return [Finding("FAIL", "reward", text)]
        if same := [agent for agent, by in over.items() if by == 0]:
            text = f"right answers get {got}, and these agents get as much: {', '.join(same)}"
            return [Finding("warn", "reward", text)]
        return [Finding("ok", "reward", f"right answers get {got}, and all other agents less")]

    def _rewards(self) -> list[float | None] | Finding:
        """The run's reward of each session; None where it is not scored."""
        reward = self._config.reward
        weights = {name: one.weight for name, one in reward.functions.items()}
        scored = [name for name, weight in weights.items() if weight]
        if all(reward.functions[name].function == BUILTIN for name in scored):
            total = sum(weights.values())
            return [
                None if one.ended.reward is None else total * one.ended.reward for one in self.tried
            ]
        if reward.num_gpus:
            return Finding("warn", "reward", "not tried: rewards need a GPU (reward.num_gpus)")
        try:
            return self._function_rewards(weights)
        except RewardError as error:
            return Finding("FAIL", "reward", str(error))

    def _function_rewards(self, weights: Mapping[str, float]) -> list[float | None]:
        """The weighted sum of the reward functions for each session. Raises RewardError."""
        share_settings(self._config.reward.sandbox)
        once = self._config.reward.model_copy(
            update={"processes": 1, "concurrency": 1, "policy": "fail", "retries": 0}
        )
        found: dict[int, float | None] = {}
        with RewardPool(once, answers=answer_format(self._config.model.path)) as pool:
            asyncio.run(pool.check())
            for prompt in self._prompts:
                numbers = [number for number, one in enumerate(self.tried) if one.prompt is prompt]
                mine = [self.tried[number] for number in numbers]
                given = pool.submit(_call(prompt, mine)).result()
                totals = total_rewards({name: given.parts[name] for name in weights}, weights)
                found |= dict(zip(numbers, totals, strict=True))
        return [
            found[number] if one.ended.end in self._environment.train_ends else None
            for number, one in enumerate(self.tried)
        ]

    async def _slow(self) -> list[Finding]:
        """An agent whose model does not answer in time."""
        # A program gets the time that it needs to start and to end.
        usual_s = max(one.ended.other_s for one in self.tried) if self._environment.url else 0.0
        deadline_s, latency_s = DEADLINE_S + usual_s, LATENCY_S + usual_s
        changes = {"processes": 1, "deadline_s": deadline_s, "block_s": 1.0}
        pool = Player(self._environment.model_copy(update=changes))
        try:
            await pool.start()
            began = time.monotonic()
            one = await self._try(pool, "slow", "", says("{}", ""), self._prompts[0], latency_s)
            took = time.monotonic() - began
        finally:
            await pool.close()
        check = "agent: slow"
        if not one.session.requests:
            return [Finding("warn", check, "the environment asked the model for no turn")]
        if one.ended.end == "deadline":
            text = f"ends deadline after {took:.1f} s, with a deadline of {deadline_s:.3g} s here"
            return [Finding("ok", check, text)]
        text = f"ends {one.ended.end} instead of deadline after {took:.1f} s: {one.ended.note}"
        return [Finding("warn", check, text)]

    async def _cost(self, pool: Player) -> list[Finding]:
        """CPU time of a turn, of sessions one after another."""
        template = TimedTemplate(
            *(getattr(self._template, name) for name in SessionTemplate.__slots__)
        )
        played: list[Tried] = []
        children, began = _children_s(), time.thread_time()
        until = time.monotonic() + COSTED_S
        while len(played) < COSTED and time.monotonic() < until:
            prompt = self._prompts[len(played) % len(self._prompts)]
            played.append(
                await self._try(pool, "cost", "", self._agents.usual_turn, prompt, 0.0, template)
            )
        own, others = time.thread_time() - began, _children_s() - children
        turns = sum(len(one.session.model.texts) for one in played)
        if not turns:
            return []
        render, read = template.spent["render"], sum(one.session.read_s for one in played)
        rest = own - render - read - sum(one.session.model.cpu_s for one in played)
        parts = {
            "rendering": render,
            "parsing": read,
            "bookkeeping and messages": rest,
            "the environment's process": others,
        }
        each = {name: 1000 * max(0.0, seconds) / turns for name, seconds in parts.items()}
        text = ", ".join(f"{name} {value:.1f}" for name, value in each.items())
        total = sum(each.values())
        return [Finding("ok", "cost", f"{total:.1f} ms of CPU a turn: {text} ({turns} turns)")]


def _call(prompt: Prompt, tried: Sequence[Tried]) -> GroupCall:
    """What reward functions get of sessions of one prompt."""
    ids = [
        [token for node in one.session.session.nodes if node.sampled for token in node.token_ids]
        for one in tried
    ]
    return GroupCall(
        [prompt.text] * len(tried),
        [one.text for one in tried],
        ids,
        prompt.columns,
        ["stop"] * len(tried),
        [False] * len(tried),
        [
            Session(
                one.session.session.chat_so_far,
                one.ended.end,
                one.ended.reward,
                one.ended.parts,
                one.ended.output,
            )
            for one in tried
        ],
    )


def _once(findings: Sequence[Finding]) -> list[Finding]:
    """The findings. One that says the same as the one before it only refers to it."""
    found = list(findings[:1])
    for before, finding in pairwise(findings):
        _, error, note = finding.text.partition(NOT_TRAINED)
        same = bool(error) and note == before.text.partition(NOT_TRAINED)[2]
        text = finding.text.replace(f"{NOT_TRAINED}{note}", ", for the same reason")
        found.append(replace(finding, text=text) if same else finding)
    return found


def _counts(ends: Mapping[End, int]) -> str:
    """How sessions ended, with numbers if they differ."""
    return ", ".join(ends if len(ends) == 1 else (f"{end} {n}" for end, n in ends.items()))


def _range(values: Sequence[float]) -> str:
    """Sorted values in words."""
    if not values:
        return "none"
    return f"{values[0]:g}" + (f" to {values[-1]:g}" if len(values) > 1 else "")


def _children_s() -> float:
    """CPU seconds of all processes that this one has started."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
