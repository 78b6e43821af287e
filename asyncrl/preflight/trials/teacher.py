"""The teacher of distillation: checked before anything starts, and described in the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx2

from asyncrl.config import Config, ConfigError, DistillationConfig
from asyncrl.config.distillation import (
    TeacherAdvantage,
    TeacherKl,
    TeacherServer,
    TeacherTopK,
)
from asyncrl.contracts.errors import TeacherError
from asyncrl.learning.frozen.teacher import request_headers, scored_ids
from asyncrl.preflight.resources.model_limits import model_context, vocabulary_at
from asyncrl.text.tokenizer import ROUND_TRIP_TEXTS, load_tokenizer, tokenizer_hash
from asyncrl.weights.stored import stored_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SETTING = "algorithm.distillation.teacher"
PROBE_TIMEOUT_S = 20.0
GENERATED = 1
"""Tokens that a server generates although none are asked for, within its context."""
SHOWN_HASH = 12
"""Characters of a hash that the plan shows."""


def check_teacher(config: Config) -> str | None:
    """The plan's line about the teacher; None without distillation.

    Raises:
        ConfigError: the teacher cannot be read or reached, has another tokenizer, knows fewer
            token ids than the tokenizer has, or has a context below the longest trajectory.
    """
    distillation = config.algorithm.distillation
    if distillation is None:
        return None
    tokenizer = load_tokenizer(config.model.path)
    teacher = distillation.teacher
    if isinstance(teacher, TeacherServer):
        found = _check_server(teacher, tokenizer, config.longest_trajectory, config.longest_text)
        scored = "scored at temperature 1, like the rollouts"
    else:
        found = _check_checkpoint(config, teacher.path, tokenizer)
        scored = f"scored at the rollouts' temperature {config.rollout.temperature:g}"
    return f"teacher: {distillation.teacher_text}, {found}; {scored}; {_use(distillation)}"


def _use(distillation: DistillationConfig) -> str:
    weight, use = distillation.reward_weight, distillation.use
    rewards = f"plus {weight:g} x the rewards' advantage" if weight else "rewards only measured"
    match use:
        case TeacherAdvantage():
            return (
                f"advantage of a token = {use.coef:g} x (log π_teacher - log π_behavior), {rewards}"
            )
        case TeacherTopK():
            return (
                f"loss {use.coef:g} x KL(π ‖ π_teacher) over the sampled token, the teacher's"
                f" {use.top_k} most probable others, and the rest as one ({8 * use.top_k} bytes per"
                f" completion token in the rows); {rewards}"
            )
        case TeacherKl():
            return f"reference of {use.kl.coef:g} x KL ({use.kl.estimator}), {rewards}"


def _check_checkpoint(config: Config, path: str, tokenizer: PreTrainedTokenizerBase) -> str:
    model_context(config, path, SETTING)
    try:
        theirs = load_tokenizer(path)
    except ValueError as error:
        raise ConfigError(str(error).replace("model.path", SETTING, 1)) from None
    digest = tokenizer_hash(tokenizer)
    if tokenizer_hash(theirs) != digest:
        raise ConfigError(
            f"{SETTING} = {path!r} has a different tokenizer from model.path ="
            f" {config.model.path!r}, so it would score other tokens; use a teacher with the same"
            " tokenizer"
        )
    vocabulary = vocabulary_at(Path(path), SETTING)
    highest = max(tokenizer.get_vocab().values())
    if vocabulary is not None and vocabulary <= highest:
        raise ConfigError(
            f"{SETTING} = {path!r} has vocab_size = {vocabulary}, and the tokenizer has ids up to"
            f" {highest}; use a teacher that knows all of them"
        )
    device = config.learner.device
    held = reference_parameters(path) * (2 if config.learner.bf16 else 4)
    return (
        f"a process on {device} with {held / (1 << 20):,.0f} MiB of weights; same tokenizer"
        f" ({digest[:SHOWN_HASH]})"
    )


def reference_parameters(path: str) -> int:
    """Elements in the tensors of a checkpoint."""
    return sum(tensor.elements for tensor in stored_tensors(path).values())


def _check_server(
    server: TeacherServer,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    longest_text: str,
) -> str:
    """What a server tells about itself. `longest` is the run's longest trajectory, in tokens;
    `longest_text` names the settings that make it."""
    url = server.url.rstrip("/")
    try:
        with httpx2.Client(
            headers=request_headers(server),
            timeout=PROBE_TIMEOUT_S,
            trust_env=False,
            follow_redirects=False,
        ) as client:
            listed = client.get(f"{url}/models")
            listed.raise_for_status()
            models = listed.json()["data"]
            model = _chosen(models, server)
            _probe(client, url, str(model["id"]), tokenizer)
            return (
                f"a server with model {model['id']!r}; {_context(model, longest, longest_text)};"
                f" {_tokens(client, url, model, tokenizer)}"
            )
    except TeacherError as error:
        raise ConfigError(f"{SETTING} = {url!r}: {error}") from None
    except (httpx2.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{SETTING} = {url!r} does not answer as an OpenAI-compatible server"
            f" ({type(error).__name__}: {error}); start it first, and give its base URL with /v1"
        ) from None


def _chosen(models: Sequence[dict[str, object]], server: TeacherServer) -> dict[str, object]:
    if server.model is None:
        return models[0]
    named = [model for model in models if model["id"] == server.model]
    if not named:
        listed = ", ".join(str(model["id"]) for model in models)
        raise TeacherError(f"it has no model {server.model!r}; it lists {listed}")
    return named[0]


def _context(model: Mapping[str, object], longest: int, longest_text: str) -> str:
    """What the server tells about its context, as vLLM's and asyncrl's do.

    Raises:
        TeacherError: it is too short for the run's longest trajectory.
    """
    context = model.get("max_model_len")
    if not isinstance(context, int) or isinstance(context, bool):
        return f"its context is unknown: it must take {longest + GENERATED} tokens"
    if context < longest + GENERATED:
        raise TeacherError(
            f"its max_model_len = {context}, and a trajectory may have {longest} tokens"
            f" ({longest_text}), to which the server adds {GENERATED}; raise its"
            " max_model_len, or lower those"
        )
    return f"context of {context} tokens"


def _probe(client: httpx2.Client, url: str, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Ask for log-probs of the tokenizer's lowest and highest ids. A server with a smaller
    vocabulary refuses the highest.

    Raises:
        TeacherError: the server does not give them.
    """
    ids = sorted(tokenizer.get_vocab().values())
    probe = [ids[0], ids[-1], ids[0]]
    body = {"model": model, "prompt": probe, "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = client.post(f"{url}/completions", json=body)
    if answer.status_code != 200:
        raise TeacherError(
            f"it refuses to score token ids up to {ids[-1]} with status {answer.status_code}:"
            f" {answer.text[:200]!r}"
        )
    scored_ids(answer.json(), probe)


def _tokens(
    client: httpx2.Client,
    url: str,
    model: dict[str, object],
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """What the server tells about its tokenizer: its hash at asyncrl's endpoint, else the ids of
    some texts, as vLLM's /tokenize gives them.

    Raises:
        TeacherError: it has another tokenizer.
    """
    digest = tokenizer_hash(tokenizer)
    if isinstance(model.get("tokenizer"), str):
        if model["tokenizer"] != digest:
            raise TeacherError("it has a different tokenizer from model.path; use another teacher")
        return f"same tokenizer ({digest[:SHOWN_HASH]})"
    parts = urlsplit(url)
    at = f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix('/v1')}/tokenize"
    for text in ROUND_TRIP_TEXTS:
        body = {"model": model["id"], "prompt": text, "add_special_tokens": False}
        answer = client.post(at, json=body)
        if answer.status_code != 200:
            return "its tokenizer is unknown: only the range of its token ids was checked"
        if answer.json()["tokens"] != tokenizer.encode(text, add_special_tokens=False):
            raise TeacherError(
                f"it has a different tokenizer from model.path: it encodes {text!r} with other ids"
            )
    return f"the same token ids in {len(ROUND_TRIP_TEXTS)} texts"
