"""A served reward model as a reward (`serve_configs/reward_model.yaml`), asked by URL, or by the
name of its Serve application on the same Ray cluster."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from asyncrl.contracts.errors import InvalidRequestError
from asyncrl.rewards.endpoint import (
    Accepted,
    BusyError,
    Endpoint,
    RefusedError,
    first_answer,
    refuse_key_in_the_clear,
)

if TYPE_CHECKING:
    from asyncrl.runtime.ray.serve_calls import Handle

logger = logging.getLogger(__name__)

_Request = dict[str, list[Any]]
_Ask = Callable[[_Request], Awaitable[list[float | None]]]
"""Asks for the scores of a request's completions."""

FINISHED = "stop"
ORDINARY: _Request = {"prompts": ["0"], "completions": ["0"], "complete": [True]}
"""A request that no server refuses for what is in it."""
"""Finish reason of a completion that ended by itself."""


class RewardModelSettings(BaseModel):
    """The argument `reward_model` of the reward. It needs `url` or `app`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    url: str | None = Field(default=None, pattern=r"^https?://[^\s]+$")
    """Base URL of the server, such as http://127.0.0.1:8000. `/score` is added."""
    app: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the Serve application on the run's Ray cluster, to ask through its handle. Each
    reward process then connects to the cluster."""
    key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*$")
    """Environment variable with the server's key, set for every process that computes rewards. None
    = no key is sent. Only for `url`."""
    retries: int = Field(default=2, ge=0)
    """Retries after a server error, a lost connection or an unreadable answer."""
    timeout_s: float = Field(default=25.0, gt=0)
    """Seconds for one group, including retries. After that, its completions are unscored. Must be
    below reward.deadline_s."""
    at_once: int = Field(default=64, gt=0)
    """Concurrent requests of one reward process. A request contains one group. Only for `url`."""

    @model_validator(mode="after")
    def check_usable(self) -> RewardModelSettings:
        """Refuse settings without effect, and a key that would be sent unencrypted."""
        if (self.url is None) == (self.app is None):
            raise ValueError("set one of url and app")
        if self.url is not None:
            refuse_key_in_the_clear(self.url, self.key_env)
        elif unused := sorted({"key_env", "at_once"} & self.model_fields_set):
            raise ValueError(f"{unused[0]} only has an effect with url; leave it out")
        return self


async def reward_model(
    prompts: Sequence[str],
    completions: Sequence[str],
    reward_model: Mapping[str, object],
    finish_reason: Sequence[str] | None = None,
) -> dict[str, list[float | None]]:
    """The reward model's score of each completion; None where it gave none in time. The part
    `unscored_refused` is 1 for a completion that the server refuses, such as one that is too long.

    Args:
        reward_model: The fields of a `RewardModelSettings`.
        finish_reason: Why each completion ended. One that did not `stop` is scored without an end.
            None = all ended.

    Raises:
        ValueError: The settings cannot be used.
        RuntimeError: The server refuses the settings, so a retry cannot succeed.
    """
    settings = RewardModelSettings.model_validate(dict(reward_model))
    reasons = finish_reason or [FINISHED] * len(completions)
    request: _Request = {
        "prompts": list(prompts),
        "completions": list(completions),
        "complete": [reason == FINISHED for reason in reasons],
    }
    ask, accepted = (_by_url if settings.url is not None else _by_handle)(settings)

    async def ask_all() -> list[float | RefusedError | None]:
        try:
            return list(await ask(request))
        except RefusedError as refused:
            # One completion may be the reason, so each is asked for alone.
            alone = [{name: [values[at]] for name, values in request.items()} for at in range(n)]
            given: list[float | RefusedError | None] = [refused]
            if n > 1:
                given = await _one_by_one(ask, alone)
            if all(isinstance(one, RefusedError) for one in given):
                await accepted.check(lambda: ask(ORDINARY))
            return given

    n = len(completions)
    found = await first_answer(
        ask_all, accepted.title, settings.retries, settings.timeout_s, "reward_model.timeout_s"
    )
    given = [None] * n if found is None else found
    refused = [isinstance(one, RefusedError) for one in given]
    if any(refused):
        first = next(one for one in given if isinstance(one, RefusedError))
        title = accepted.title
        logger.warning("%s refuses %d of %d completions: %s", title, sum(refused), n, first)
    return {
        "reward": [None if isinstance(one, RefusedError) else one for one in given],
        "unscored_refused": [float(one) for one in refused],
    }


async def _one_by_one(ask: _Ask, requests: Sequence[_Request]) -> list[float | RefusedError | None]:
    """The score of each request's one completion, or why it is refused."""

    async def of(request: _Request) -> float | RefusedError | None:
        try:
            return (await ask(request))[0]
        except RefusedError as refused:
            return refused

    return list(await asyncio.gather(*map(of, requests)))


def _by_url(settings: RewardModelSettings) -> tuple[_Ask, Accepted]:
    assert settings.url is not None  # the caller has looked
    server = _server(asyncio.get_running_loop(), settings.url, settings.key_env, settings.at_once)

    async def ask(request: _Request) -> list[float | None]:
        return _scores((await server.post(request)).json()["scores"], request)

    return ask, server.accepted


def _by_handle(settings: RewardModelSettings) -> tuple[_Ask, Accepted]:
    from asyncrl.runtime.ray.serve_calls import ask_one

    assert settings.app is not None  # one of both is set
    app = _app(asyncio.get_running_loop(), settings.app)

    async def ask(request: _Request) -> list[float | None]:
        try:
            scores = _scores(await ask_one(await app.handle(), "score", **request), request)
        except InvalidRequestError as error:
            raise RefusedError(str(error)) from None
        except ConnectionError as error:
            raise BusyError(str(error)) from None
        app.accepted.any = True
        return scores

    return ask, app.accepted


@lru_cache(maxsize=16)
def _server(
    loop: asyncio.AbstractEventLoop, url: str, key_env: str | None, at_once: int
) -> Endpoint:
    """One per event loop, so that its connections are kept between calls."""
    check = "reward_model.url, key_env"
    return Endpoint(url.rstrip("/") + "/score", key_env, at_once, "reward_model", check)


@lru_cache(maxsize=16)
def _app(loop: asyncio.AbstractEventLoop, name: str) -> _App:
    """One per event loop, so that its handle is kept between calls."""
    return _App(name)


class _App:
    def __init__(self, name: str) -> None:
        self.accepted = Accepted(f"reward_model.app = {name!r}", "reward_model.app")
        self._name = name
        self._connecting = asyncio.Lock()
        self._handle: Handle | None = None

    async def handle(self) -> Handle:
        """The application's handle. Connects this process to Ray if it is not connected."""
        from asyncrl.runtime.ray.serve_calls import application_handle

        async with self._connecting:
            if self._handle is None:
                try:
                    self._handle = await asyncio.to_thread(application_handle, self._name)
                except LookupError as error:
                    raise RuntimeError(f"{self.accepted.title}: {error}") from None
            return self._handle


def _scores(values: object, request: _Request) -> list[float | None]:
    """The scores in an answer. Raises ValueError if they are not one for each completion."""
    wanted = request["complete"]
    if not isinstance(values, list) or len(values) != len(wanted):
        raise ValueError(f"the answer has no list of {len(wanted)} scores")
    return [_finite(value) for value in values]


def _finite(value: object) -> float | None:
    """The score; None if it is null, NaN or infinite. Raises ValueError if it is no number."""
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise ValueError(f"the answer has a score of type {type(value).__name__}")
    try:
        score = float(value)
    except OverflowError:
        return None
    return score if math.isfinite(score) else None
