"""A standing application: generators that answer HTTP as well."""

# No postponed annotations here: Serve reads the builder's annotation, and validates YAML arguments
# against it only if it is a class.

import asyncio
import os
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.context import _get_global_client

from asyncrl.generation.app import STATUS_S, application, build_app
from asyncrl.generation.replica import Generator
from asyncrl.generation.settings import GeneratorApp
from asyncrl.runtime.serve_calls import ask_all
from asyncrl.serving.http import api_key, refuse_open_host, routes
from asyncrl.serving.identity import ServedModel
from asyncrl.serving.metrics import HttpStatus, Traffic
from asyncrl.serving.words import ModelWords

__all__ = ["HttpGenerator", "build_standing_app"]


@serve.ingress()
class HttpGenerator(Generator):
    """`Generator` behind the routes of `asyncrl.serving.http`. What a job asks comes through the
    Serve handle, as ever."""

    # Serve awaits a replica's constructor
    async def __init__(self, app: dict[str, Any]) -> None:  # type: ignore[misc]
        # Before an engine is started for a minute.
        self._key = api_key(dict(os.environ))
        refuse_open_host(
            await asyncio.to_thread(_bound_host), self._key, await asyncio.to_thread(_nodes)
        )
        self.traffic = Traffic()
        self.words = ModelWords(app["model"])
        await super().__init__(app)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for the routes once the engine has started."""
        return routes(self, self._key)

    @property
    def model(self) -> ServedModel:
        """What requests are checked against."""
        return ServedModel(
            self.settings.model_name,
            self.engine.max_model_len,
            self.engine.vocabulary,
            self.engine.longest_token,
        )

    async def http_status(self) -> HttpStatus:
        """This replica's status, and its HTTP requests."""
        return HttpStatus(await self.status(), self.traffic)

    async def http_statuses(self) -> list[HttpStatus]:
        """Of every replica that answers: a scrape reaches any one of them."""
        handle = await asyncio.to_thread(application, self.application)
        answers = await ask_all(handle, "http_status", timeout_s=STATUS_S)
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def build_standing_app(args: GeneratorApp) -> serve.Application:
    """What `serve deploy` builds from YAML: with `http`, the routes of `asyncrl.serving.http`, else
    none."""
    return build_app(args, HttpGenerator if args.http else Generator)


def _nodes() -> int:
    return sum(bool(node["Alive"]) for node in ray.nodes())


def _bound_host() -> str | None:
    """The host that Serve's proxies bind, whatever a file says: the first who started Serve on this
    cluster chose it."""
    client: Any = _get_global_client()
    host: str | None = client.http_config.host
    return host
