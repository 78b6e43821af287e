"""The standing application: generators that also answer HTTP requests."""

# No postponed annotations here: Serve reads those of the routes and of the builder.

import asyncio
import os
from collections.abc import Mapping

from fastapi import FastAPI
from ray import serve

from asyncrl.generation.app import STATUS_S, application, build_app
from asyncrl.generation.model_checks import check_app, check_tokens_and_tensors
from asyncrl.generation.replica import Generator
from asyncrl.generation.settings import GeneratorApp
from asyncrl.runtime.ray.serve_calls import ask_all
from asyncrl.serving.building import checked_settings
from asyncrl.serving.chat_tokenizer import ModelTokenizer
from asyncrl.serving.http import api_key, refuse_open_host, routes
from asyncrl.serving.identity import ServedModel
from asyncrl.serving.metrics import HttpStatus, Traffic
from asyncrl.serving.proxies import bound_host, nodes


@serve.ingress()
class HttpGenerator(Generator):
    """`Generator` with the routes of `asyncrl.serving.http`. Requests of jobs still arrive through
    the Serve handle."""

    # Serve awaits a replica's constructor.
    async def __init__(self, app: dict[str, object]) -> None:  # type: ignore[misc]
        # Check this first: starting an engine takes a minute.
        self._key = api_key(dict(os.environ))
        refuse_open_host(
            await asyncio.to_thread(bound_host), self._key, await asyncio.to_thread(nodes)
        )
        # The builder may not have seen this node's files.
        check_app(GeneratorApp.model_validate(app))
        self.traffic = Traffic()
        await super().__init__(app)
        self.tokenizer = ModelTokenizer(self.settings.model)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the routes. Serve calls this after the engine has started."""
        return routes(self, self._key)

    @property
    def model(self) -> ServedModel:
        """The limits that requests are checked against."""
        return ServedModel(
            self.settings.model_name,
            self.engine.requests.max_model_len,
            self.engine.requests.vocabulary,
            self.engine.requests.longest_token,
            self.engine.requests.tokenizer_hash,
        )

    async def http_status(self) -> HttpStatus:
        """This replica's status, and its HTTP requests."""
        return HttpStatus(await self.status(), self.traffic)

    async def http_statuses(self) -> list[HttpStatus]:
        """The status of every replica that answers, since a scrape reaches only one of them."""
        handle = await asyncio.to_thread(application, self.application)
        answers = await ask_all(handle, "http_status", timeout_s=STATUS_S)
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def build_standing_app(args: Mapping[str, object] | GeneratorApp) -> serve.Application:
    """The application that `serve deploy` builds from YAML. It has HTTP routes if `http` is set.

    Raises:
        RayServeException: one line with the setting, its value and the fix. Serve shows it.
    """
    app = checked_settings(GeneratorApp, args, _check)
    return build_app(app, HttpGenerator if app.http else Generator)


def _check(app: GeneratorApp) -> GeneratorApp:
    app = check_app(app)
    check_tokens_and_tensors(app)
    return app
