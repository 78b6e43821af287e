"""vLLM's outputs as asyncrl's messages.

The functions import vLLM themselves, which keeps this module cheap to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.contracts.errors import StaleReplicaError
from asyncrl.contracts.messages import Details, GenerateRequest, StreamPiece, Tokens
from asyncrl.contracts.rows import TRUNCATED, Completion, VersionSpan
from asyncrl.text.stops import text_before
from asyncrl.text.streaming import TextStream
from asyncrl.text.tokenizer import decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.logprobs import FlatLogprobs, LogprobsOnePosition, PromptLogprobs, SampleLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
    from vllm.v1.engine.output_processor import RequestState


def to_completion(
    output: CompletionOutput,
    tokenizer: PreTrainedTokenizerBase,
    stop: Sequence[str],
    version: int | None = None,
) -> Completion:
    """A whole completion. Its text ends before the first of the strings in `stop`.

    Args:
        version: of the completion's adapter. None without one: vLLM labels the weights.

    Raises:
        StaleReplicaError: the engine aborted it.
    """
    ids, finish_reason = tuple(output.token_ids), _finish_reason(output)
    return Completion(
        token_ids=ids,
        logprobs=tuple(_flat(output.logprobs).logprobs),
        versions=_spans(output, len(ids), version),
        finish_reason=finish_reason,
        text=text_before(decode(tokenizer, ids), stop),
    )


def to_piece(
    output: RequestOutput,
    request: GenerateRequest,
    text: TextStream,
    details: Details,
    version: int | None = None,
) -> StreamPiece:
    """The next piece of a stream of one completion.

    Args:
        text: the completion's text so far; the piece's tokens are added to it.
        version: see `to_completion`.

    Raises:
        StaleReplicaError: the engine aborted the completion.
    """
    completion = output.outputs[0]
    finish_reason = _finish_reason(completion) if output.finished else completion.finish_reason
    prompt = (
        _tokens(request.prompt_ids, output.prompt_logprobs, details)
        if details.prompt and output.prompt_logprobs
        else None
    )
    if not request.max_tokens:
        return StreamPiece(Tokens((), ()), "", "length", prompt=prompt)
    added = text.add(completion.token_ids, output.finished)
    made = text.tokens - request.continued
    versions = _spans(completion, made, version) if output.finished else ()
    cached = (output.num_cached_tokens or 0) if output.finished else 0
    tokens = _tokens(completion.token_ids, completion.logprobs, details)
    return StreamPiece(tokens, added, finish_reason, versions, cached, prompt)


def version_spans(labels: Sequence[WeightVersionSpan], tokens: int) -> tuple[VersionSpan, ...]:
    """vLLM's weight-version spans with integer versions. A label that is not a number names the
    checkpoint's weights, version 0.

    Args:
        tokens: length of the completion.
    """
    spans: list[VersionSpan] = []
    for label in labels:
        version = int(label.version) if label.version.isdecimal() else 0
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, label.end)
        elif label.end > label.start:
            spans.append(VersionSpan(version, label.start, label.end))
    return tuple(spans) if spans or not tokens else (VersionSpan(0, 0, tokens),)


def _spans(output: CompletionOutput, tokens: int, version: int | None) -> tuple[VersionSpan, ...]:
    """The spans of a completion: of one adapter's version, or of vLLM's labels."""
    if version is None:
        return version_spans(output.weight_versions or (), tokens)
    return (VersionSpan(version, 0, tokens),) if tokens else ()


def scores(output: RequestOutput, prompt: int, completion: Sequence[int]) -> tuple[float, ...]:
    """Log-probs (nats) of the completion's tokens, from one pass over prompt and completion.

    Args:
        output: vLLM's answer to `asyncrl.generation.engine.arguments.scoring_params`.
        prompt: length of the prompt, in tokens.
    """
    assert output.prompt_logprobs is not None
    positions = output.prompt_logprobs[prompt:]
    return tuple(_score(positions[index], token) for index, token in enumerate(completion))


def tokens_so_far(state: RequestState) -> int:
    """Length of an unfinished completion, in tokens."""
    assert state.detokenizer is not None  # only pooling requests have none
    return state.detokenizer.num_output_tokens()


def _score(position: LogprobsOnePosition | None, token: int) -> float:
    assert position is not None  # only a prompt's first token has none
    return position[token].logprob


def _tokens(
    ids: Sequence[int], logprobs: SampleLogprobs | PromptLogprobs | None, details: Details
) -> Tokens:
    """Tokens with vLLM's flat log-probs: for each token its own, then those of the most probable
    ones. A prompt's first token has none."""
    flat = _flat(logprobs)
    ranges = list(zip(flat.start_indices, flat.end_indices, strict=True))
    own = tuple(flat.logprobs[start] if end > start else None for start, end in ranges)
    if not details.top:
        return Tokens(tuple(ids), own)
    best = tuple(
        tuple(zip(flat.token_ids[start + 1 : end], flat.logprobs[start + 1 : end], strict=True))
        for start, end in ranges
    )
    return Tokens(tuple(ids), own, best)


def _flat(logprobs: SampleLogprobs | PromptLogprobs | None) -> FlatLogprobs:
    from vllm.logprobs import FlatLogprobs

    assert isinstance(logprobs, FlatLogprobs)  # `sampling_params` asks for these
    return logprobs


def _finish_reason(output: CompletionOutput) -> str:
    reason = output.finish_reason
    if reason is None or reason not in ("stop", *TRUNCATED):
        raise StaleReplicaError(f"the vLLM engine ended a completion with {reason!r}")
    return reason
