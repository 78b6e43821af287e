"""Scripted agents in the config's own environment: how each of them ends, its reward, and what a
turn costs."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeAlias

import psutil

from asyncrl.config import Config, EnvironmentConfig
from asyncrl.config.schema import FailRun
from asyncrl.contracts.rows import AFTER_CUT, Prompt
from asyncrl.environments.pool import BLOCKED, SessionLostError
from asyncrl.environments.running import End, Ended
from asyncrl.preflight.check_env.findings import Finding
from asyncrl.preflight.check_env.scripted_agents import (
    ANSWERS,
    FORMS,
    RIGHT,
    WRONG,
    ScriptedAgents,
    says,
)
from asyncrl.preflight.check_env.scripted_model import (
    Script,
    ScriptedModel,
    ScriptedSession,
    TimedTemplate,
)
from asyncrl.rewards.code import share_settings
from asyncrl.rewards.contract import GroupCall, RewardError, ScoredSession
from asyncrl.rewards.pool import RewardPool, total_rewards
from asyncrl.rollout.session_player import Player
from asyncrl.sessions.session import SessionTemplate
from asyncrl.text.answer import answer_format
from asyncrl.text.chat_messages import Message, Schema, plain_text
from asyncrl.text.response import ResponseReader

Request: TypeAlias = tuple[Sequence[Message], Sequence[Schema] | None]
"""The messages and tools of a turn."""

DEADLINE_S, LATENCY_S = 1.0, 60.0
"""Deadline of the slow agent's session here, and the seconds of one of its turns."""
LONGEST_S, LONGEST_AT_URL_S = 30.0, 120.0
"""Deadline of other sessions here, and of those of programs, which take long to start. That of the
config counts if it is shorter."""
BLOCKED_S = 40.0
"""Seconds that sessions may block their process in all, one after another, until no further one is
played."""
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
    def turns(self) -> int:
        """The turns that it took."""
        return sum(node.sampled for node in self.session.session.nodes)

    @property
    def text(self) -> str:
        """The text of the last turn."""
        chat = self.session.session.chat_so_far
        return str(plain_text(chat[-1].get("content"))) if chat else ""


class AgentChecks:
    """Plays scripted agents in the environment of a config, on some prompts. Use it as a context,
    outside an event loop: it has its own, which stands still between two findings.

    Args:
        output: see `EnvironmentPool`.

    Raises:
        EnvironmentFailedError: the environment cannot be imported.
    """

    def __init__(
        self,
        config: Config,
        environment: EnvironmentConfig,
        template: SessionTemplate,
        reader: ResponseReader,
        prompts: Sequence[Prompt],
        output: int | None = None,
    ) -> None:
        self._config, self._environment = config, environment
        self._template, self._reader, self._prompts = template, reader, prompts
        self._agents = ScriptedAgents(template, prompts, config.rollout.max_completion_length)
        self._output = output
        longest = LONGEST_AT_URL_S if environment.at_url else LONGEST_S
        self._block_s = min(environment.block_s, LONGEST_S)
        self._pool = self._player(
            deadline_s=min(environment.deadline_s, longest), block_s=self._block_s
        )
        self._runner = asyncio.Runner()
        self._played: list[tuple[str, asyncio.Task[Tried]]] = []
        """Each scripted agent's name, and its session."""
        self._costed: list[Tried] = []
        self._unplayed = 0
        """Sessions that were given up, because others blocked."""

    def __enter__(self) -> AgentChecks:
        try:
            self._runner.run(self._begin())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._runner:
            self._runner.run(self._pool.close())

    def _player(self, **changes: object) -> Player:
        """The environment in one process, with these settings."""
        config = self._environment.model_copy(update={"processes": 1, **changes})
        return Player(config, self._output)

    @property
    def tried(self) -> list[Tried]:
        """The sessions that have ended, in the order of the agents."""
        return [task.result() for _, task in self._played if task.done()]

    def first_request(self) -> Request | None:
        """The messages and tools of a first turn, as soon as one was taken. None: no agent took a
        turn."""
        while not (found := _turns(self.tried)) and self._some():
            pass
        return next((one for one in found if one[1]), found[0] if found else None)

    def later_tools(self, known: Sequence[Schema] | None) -> list[Request]:
        """A request for each further list of tools that the environment offers, with the tools that
        are not known yet."""
        seen = [*(known or ())]
        found: list[Request] = []
        for one in [*self.tried, *self._costed]:
            for messages, tools in one.session.requests:
                if new := [tool for tool in tools or () if tool not in seen]:
                    seen += new
                    chat = takewhile(lambda message: message.get("role") != "assistant", messages)
                    found.append(([*chat], new))
        return found

    def findings(self) -> Iterator[Finding]:
        """What the sessions show, as they end."""
        names = self._names
        yield from self._without_right(names)
        lines = _Lines()
        told = self._own_rewards
        for name in names if told else ():
            while not all(task.done() for agent, task in self._played if agent == name):
                self._some()
            if name in self._names:
                yield lines.once(self._agent_line(name, self._rewarded(self.tried)))
        while self._some():
            pass
        yield from self._first_chats()
        rewards = self._rewards()
        if isinstance(rewards, Finding):
            yield rewards
            rewards = [None] * len(self.tried)
            order: list[Finding] = []
        else:
            order = self._order(rewards)
        for name in () if told else self._names:
            found = list(zip(self.tried, rewards, strict=True))
            yield lines.once(self._agent_line(name, found))
        yield from order
        if self._unplayed:
            yield self._gave_up()
            return
        yield from self._runner.run(self._slow())
        yield from self._runner.run(self._cost(self._pool))

    async def _begin(self) -> None:
        await self._pool.start()
        self._played = [
            (agent, asyncio.create_task(self._try(self._pool, agent, form, script, prompt)))
            for prompt in self._prompts
            for agent, form, script in self._agents.of(prompt)
        ]

    def _some(self) -> bool:
        """Wait until a further session has ended. False: all have."""
        running = [task for _, task in self._played if not task.done()]
        if running:
            self._runner.run(_first_of(running))
        if len(self._blocked) * self._block_s >= BLOCKED_S:
            self._unplayed += self._runner.run(_canceled(running))
            self._played = [(name, task) for name, task in self._played if not task.cancelled()]
        return bool(running)

    @property
    def _names(self) -> list[str]:
        """The agents, in their order."""
        return list(dict.fromkeys(name for name, _ in self._played))

    @property
    def _blocked(self) -> list[Ended]:
        """The ends of the sessions whose code blocked their process."""
        return [one.ended for one in self.tried if one.ended.note.startswith(BLOCKED)]

    def _gave_up(self) -> Finding:
        """Says that the environment blocks its process too often."""
        text = (
            f"{len(self._blocked)} sessions blocked their process, so the other {self._unplayed}"
            f" were not played: {self._blocked[0].note}"
        )
        return Finding("FAIL", "agents", text)

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

    def _without_right(self, names: Sequence[str]) -> list[Finding]:
        """Says that there is no right agent."""
        if RIGHT in names:
            return []
        columns = ", ".join(self._prompts[0].columns) or "none"
        text = (
            f"could not be made: the data has no column {', '.join(ANSWERS)} (its columns:"
            f" {columns}); so whether a right answer gets more than a wrong one is not known"
        )
        return [Finding("warn", "agent: right", text)]

    def _first_chats(self) -> list[Finding]:
        """Whether the first chat of a task leaves room for an answer."""
        whole = {id(one.prompt) for one in self.tried}
        long = {id(one.prompt): one for one in self.tried if one.turns == 0 and _is_long(one)}
        if not long:
            return []
        note = next(iter(long.values())).ended.note
        text = (
            f"{len(long)} of {len(whole)} tasks begin with a chat that leaves no room for an answer"
            f" ({note}); raise data.max_length = {self._template.max_length}, or shorten the chat"
        )
        return [Finding("FAIL" if len(long) == len(whole) else "warn", "first chat", text)]

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
        quiet = [one for one, _ in mine if not one.turns]
        if len(quiet) == len(mine):
            refused = _is_long(quiet[0]) or quiet[0].session.requests
            why = "" if refused else "; the model was asked for no turn"
            text = f"{len(mine)} sessions: {_counts(ends)}{why}; nothing is trained"
            return Finding("FAIL" if normal else "warn", check, text)
        turns = max(one.turns for one, _ in mine)
        unparsed = sum(one.session.unparsed for one, _ in mine)
        given = sorted({reward for _, reward in mine if reward is not None})
        text = (
            f"{len(mine)} sessions{f' ({len(FORMS)} forms of the answer)' if normal else ''}:"
            f" {_counts(ends)};"
            f" at most {turns} {'turn' if turns == 1 else 'turns'}; reward {_range(given)}"
            + (f"; {unparsed} turns could not be parsed" if unparsed else "")
            + (f"; {len(quiet)} took no turn, and are not trained" if quiet else "")
        )
        trained = [reward for one, reward in mine if one.ended.end in self._environment.train_ends]
        if None in trained:
            why = f"{text}; some sessions have no reward, so they are not trained"
            cut = [one.ended.note for one, _ in mine if one.ended.note.startswith(AFTER_CUT)]
            if cut:
                why += f": {cut[0]}. Let the agent go on with a cut turn, so that length can cost"
            return Finding("FAIL" if normal and not given else "warn", check, why)
        if normal and not trained:
            note = next((one.ended.note for one, _ in mine if one.ended.note), "")
            return Finding("FAIL", check, f"{text}; no session is trained ({note})")
        if normal and len(trained) < len(mine):
            return Finding("warn", check, f"{text}; some ends are not trained")
        return Finding("warn" if quiet else "ok", check, text)

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

    @property
    def _own_rewards(self) -> bool:
        """Whether the environment's own reward is the run's."""
        functions = self._config.reward.functions.values()
        return all(one.function == BUILTIN for one in functions if one.weight)

    def _rewarded(self, tried: Sequence[Tried]) -> list[tuple[Tried, float | None]]:
        """Sessions with the environment's own reward."""
        total = sum(one.weight for one in self._config.reward.functions.values())
        return [
            (one, None if one.ended.reward is None else total * one.ended.reward) for one in tried
        ]

    def _rewards(self) -> list[float | None] | Finding:
        """The run's reward of each session; None where it is not scored."""
        reward = self._config.reward
        weights = {name: one.weight for name, one in reward.functions.items()}
        if self._own_rewards:
            return [reward for _, reward in self._rewarded(self.tried)]
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
            update={"processes": 1, "concurrency": 1, "policy": FailRun()}
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
        usual_s = max(one.ended.other_s for one in self.tried) if self._environment.at_url else 0.0
        deadline_s, latency_s = DEADLINE_S + usual_s, LATENCY_S + usual_s
        pool = self._player(deadline_s=deadline_s, block_s=1.0)
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
        self._costed = played
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
            ScoredSession(
                one.session.session.chat_so_far,
                one.ended.end,
                one.ended.reward,
                one.ended.parts,
                one.ended.output,
            )
            for one in tried
        ],
    )


class _Lines:
    """Lines of which one that says the same as the one before it only refers to it."""

    def __init__(self) -> None:
        self._before = ""

    def once(self, finding: Finding) -> Finding:
        _, error, note = finding.text.partition(NOT_TRAINED)
        before, self._before = self._before, note
        if not error or note != before:
            return finding
        return replace(
            finding, text=finding.text.replace(f"{error}{note}", ", for the same reason")
        )


async def _first_of(tasks: Sequence[asyncio.Task[Tried]]) -> None:
    """Wait until one of the sessions has ended. Raises its error."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _canceled(tasks: Sequence[asyncio.Task[Tried]]) -> int:
    """Cancel the sessions that have not ended. Returns how many."""
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    return len(left)


def _turns(tried: Sequence[Tried]) -> list[Request]:
    """The first requests of sessions that took a turn."""
    return [one.session.requests[0] for one in tried if one.turns]


def _is_long(one: Tried) -> bool:
    """Whether its request left no room for an answer."""
    return one.ended.end == "length"


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
