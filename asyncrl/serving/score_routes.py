"""The HTTP routes of a reward model, listed in `SCORE_PATHS`."""

# No postponed annotations here: FastAPI evaluates those of the routes.

import time
from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from asyncrl.api.http import answer_unknown, json_body, refusal, safely
from asyncrl.serving.http import METHODS, Guard, new_app
from asyncrl.serving.score_rows import FIELDS
from asyncrl.web.connection import while_connected
from asyncrl.web.errors import ApiError, printable

SCORE_PATHS = ("/score", "/v1/models", "/health")

LARGEST_BODY = 32 << 20
"""Upper limit of a request body, in bytes."""


class ScoreServed(Protocol):
    """The backend of the routes: a replica, or a fake in a test."""

    @property
    def model_entry(self) -> dict[str, object]:
        """The model in the answer of /v1/models, with its name as `id`."""
        ...

    async def score(
        self,
        prompts: object = None,
        completions: object = None,
        complete: object = None,
        token_ids: object = None,
    ) -> list[float | None]:
        """The score of each sequence. Raises InvalidRequestError."""
        ...

    def check_health(self) -> None:
        """Raise RuntimeError if the model cannot compute any more."""
        ...


def score_routes(served: ScoreServed, key: str | None) -> FastAPI:
    """Build the application. With a key, every path requires it. Without one, the application only
    answers requests addressed to loopback."""
    app = new_app()
    started = int(time.time())

    @app.post("/score")
    async def score(request: Request) -> Response:
        return await safely(request, _scored(served, request))

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        entry = {"object": "model", "created": started, "owned_by": "asyncrl"}
        return JSONResponse({"object": "list", "data": [served.model_entry | entry]})

    @app.get("/health")
    async def health() -> JSONResponse:
        try:
            served.check_health()
        except RuntimeError:
            broken = "the reward model is broken and will be replaced; try again"
            return refusal("/health", ApiError(503, broken, "unavailable"))
        return JSONResponse({"status": "ok", "model": served.model_entry["id"]})

    answer_unknown(app, SCORE_PATHS, METHODS)
    app.add_middleware(Guard, key=key)
    return app


async def _scored(served: ScoreServed, request: Request) -> Response:
    fields = _fields(await json_body(request, LARGEST_BODY))
    scores = await while_connected(request.receive, served.score(**fields))
    return JSONResponse({"scores": scores, "model": served.model_entry["id"]})


def _fields(tree: object) -> dict[str, object]:
    """The arguments of `score` in a body. Raises ApiError."""
    if not isinstance(tree, dict):
        raise ApiError(
            400,
            f"the body is a JSON {type(tree).__name__}; send an object with prompts and"
            " completions, or with token_ids",
            "invalid_body",
        )
    if unknown := sorted(set(tree) - set(FIELDS)):
        name = printable(unknown[0])
        raise ApiError(
            400,
            f"{name} is not a field; the fields are {', '.join(FIELDS)}",
            "unknown_field",
            name,
        )
    return tree
