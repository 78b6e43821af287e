"""The endpoint's texts, with a real tokenizer and chat template."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.contracts.messages import Details, GenerateRequest, StreamPiece, Tokens
from asyncrl.serving.answers import Choice, ask
from asyncrl.serving.chat_tokenizer import ModelTokenizer
from asyncrl.serving.identity import ServedModel
from asyncrl.serving.requests import Asked
from asyncrl.testing import FakeServed
from asyncrl.text.chat_messages import MessagesError
from asyncrl.text.template import Template
from asyncrl.text.tokenizer import load_tokenizer
from asyncrl.web.errors import ApiError

MESSAGES = [{"role": "user", "content": "What is 2 plus 40?"}]


def served_model(path: Path) -> ServedModel:
    return ServedModel("llama", 256, len(load_tokenizer(str(path))), 20)


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def requests_of(asked: Asked, tokenizer: Any) -> list[GenerateRequest]:
    return asked.requests([ids for _, ids in await asked.prompts(tokenizer)])


async def test_a_chat_has_the_same_tokens_as_in_a_run(llama_model: Path) -> None:
    chat = Asked(CHAT, {"model": "llama", "messages": MESSAGES}, served_model(llama_model))
    (request,) = await requests_of(chat, ModelTokenizer(str(llama_model)))
    (expected,) = Template(str(llama_model)).render([MESSAGES]).ids
    assert (
        request.prompt_ids == tuple(expected)
        and request.prompt_ids.count(load_tokenizer(str(llama_model)).bos_token_id) <= 1
    )


async def test_a_plain_prompt_has_the_same_tokens_as_in_a_run(llama_model: Path) -> None:
    body = {"model": "llama", "prompt": ["What is 2", "and 3"]}
    completions = Asked(COMPLETIONS, body, served_model(llama_model))
    requests = await requests_of(completions, ModelTokenizer(str(llama_model)))
    assert [list(request.prompt_ids) for request in requests] == Template(str(llama_model)).render(
        ["What is 2", "and 3"]
    ).ids


async def test_every_token_has_a_text(llama_model: Path) -> None:
    ours, tokenizer = ModelTokenizer(str(llama_model)), load_tokenizer(str(llama_model))
    ids = [*tokenizer.encode("What is 2 plus 日?"), tokenizer.eos_token_id]
    texts = await ours.spell(ids)
    assert (
        texts[ids[0]] == tokenizer.bos_token
        and texts[tokenizer.eos_token_id] == tokenizer.eos_token
    )
    assert (
        "".join(texts[token] for token in ids[1:-1] if "\ufffd" not in texts[token])
        == "What is 2 plus ?"
    )
    assert sum("\ufffd" in texts[token] for token in ids) == 3, "the bytes of one character"


async def test_parts_of_characters_have_ids_and_no_bytes(llama_model: Path) -> None:
    """Their texts are all U+FFFD, which would be a single key."""
    model, tokenizer = served_model(llama_model), load_tokenizer(str(llama_model))
    parts = tokenizer.encode("日", add_special_tokens=False)

    class Parts(FakeServed):
        tokenizer = ModelTokenizer(str(llama_model))  # type: ignore[assignment]

        def __init__(self) -> None: ...

        async def stream(self, request: GenerateRequest, details: Details) -> Any:
            best = tuple((one, -1.0) for one in parts)
            yield StreamPiece(
                Tokens(tuple(parts), (-1.0, float("-inf"), -2.0), (best,) * 3), "日", "stop"
            )

    async def logprobs(path: str, **body: Any) -> Any:
        asked, tokenizer = Asked(path, {"model": "llama", **body}, model), Parts.tokenizer
        (request,) = await requests_of(asked, tokenizer)
        choice = Choice(tokenizer, asked.dialect.request, request, str)
        pieces = ask(Parts(), [request], asked.details)
        (answer,) = [(await choice.part(told)).answer async for told in pieces]
        assert answer is not None
        return asked.dialect.answer([answer])["choices"][0]["logprobs"]

    written = await logprobs(COMPLETIONS, prompt="a", logprobs=3)
    names = [f"token_id:{token}" for token in parts]
    assert written["tokens"] == names and written["token_logprobs"] == [-1.0, -9999.0, -2.0]
    assert list(written["top_logprobs"][0]) == names
    content = (await logprobs(CHAT, messages=MESSAGES, logprobs=True))["content"]
    assert [(token["token"], token["bytes"]) for token in content] == [("\ufffd", None)] * 3


async def test_a_model_without_a_template_refuses_chats(llama_model: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(llama_model, tmp_path / "plain")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (plain / name).unlink(missing_ok=True)
    with pytest.raises(
        ApiError,
        match=(
            r"the chat template of 'llama' refuses the messages \(there is no chat template\); .*"
            r" or use /v1/completions"
        ),
    ):
        chat = Asked(CHAT, {"model": "llama", "messages": MESSAGES}, served_model(llama_model))
        await chat.prompts(ModelTokenizer(str(plain)))


async def test_a_client_cannot_replace_the_template_or_see_paths(llama_model: Path) -> None:
    tokenizer = ModelTokenizer(str(llama_model))
    for name in ("chat_template", "tokenize", "tools", "add_generation_prompt"):
        with pytest.raises(MessagesError, match=f"^{name} is not a variable of a template$"):
            await tokenizer.render(MESSAGES, {name: "{{ 1 }}"}, None)
    for name in ("self", "messages", "conversation", "raise_exception"):
        try:
            text = await tokenizer.render(MESSAGES, {name: "{{ 1 }}"}, None)
        except MessagesError as error:
            assert str(llama_model) not in str(error) and "\n" not in str(error)
        else:
            assert text == await tokenizer.render(MESSAGES, {}, None)


def test_top_logprobs_above_the_vocabulary_are_refused() -> None:
    """vLLM's engine would crash."""
    small = ServedModel("small", 64, vocabulary=8, longest_token=2)
    with pytest.raises(ApiError, match="logprobs: 'small' has 8 tokens; use at most that many"):
        Asked(COMPLETIONS, {"model": "small", "prompt": "a", "logprobs": 9}, small)
    with pytest.raises(ApiError, match="top_logprobs: 'small' has 8 tokens"):
        body = {"model": "small", "messages": MESSAGES, "logprobs": True, "top_logprobs": 9}
        Asked(CHAT, body, small)
