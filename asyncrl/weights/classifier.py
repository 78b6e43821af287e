"""The table of a reward model: the backbone's tensors of a causal model's table, and a score, under
the names of transformers' sequence classifier with one label."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from asyncrl.text.tokenizer import special_tokens
from asyncrl.weights.published import CannotPublishError, PublishedTensor, VersionTable, whole_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCORE = "score.weight"
"""Name of the score's weights [1, H] in transformers' sequence classifiers. They have no bias."""


@dataclass(frozen=True, slots=True)
class Padding:
    """The token with which a reward model's users pad sequences."""

    token: str
    number: int


def classifier_table(model_path: str | Path, table: VersionTable) -> VersionTable:
    """The table of the sequence classifier that has the backbone of a causal model.

    Args:
        table: of the causal model, from `version_table`.

    Raises:
        CannotPublishError: transformers has no sequence classifier with this backbone and a score
            without a bias.
    """
    name, shapes, buffers = _classifier(model_path)
    score = shapes.pop(SCORE, None)
    different = sorted(
        parameter for parameter, shape in shapes.items() if table.parameters.get(parameter) != shape
    )
    if score is None or different:
        what = SCORE if score is None else different[0]
        raise CannotPublishError(
            f"{table.architecture} cannot become a reward model: {name} of transformers has no"
            f" {what!r} like it; use another model family"
        )
    kept = [
        tensor
        for tensor in table.tensors
        if (
            all(piece.parameter in shapes for piece in tensor.pieces)
            if tensor.pieces
            else tensor.name in buffers
        )
    ]
    dtype = next(tensor.stored.dtype for tensor in kept if tensor.pieces)
    (scoring,) = whole_table({SCORE: score}, dtype).tensors
    left_out = tuple(tensor.name for tensor in table.tensors if tensor not in kept)
    tensors: tuple[PublishedTensor, ...] = (*kept, scoring)
    parameters = {key: shape for key, shape in table.parameters.items() if key in shapes}
    return replace(
        table,
        tensors=tensors,
        left_out=(*table.left_out, *left_out),
        parameters={**parameters, SCORE: score},
        architecture=name,
    )


def _classifier(model_path: str | Path) -> tuple[str, dict[str, tuple[int, ...]], set[str]]:
    """The class of the sequence classifier, the shapes of its parameters by the names that
    `named_parameters` lists, and the names of the buffers that it saves."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False, num_labels=1)
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config)
    except ValueError:  # transformers' message lists every family that it has
        raise CannotPublishError(
            f"transformers has no sequence classifier for model_type {config.model_type!r}, so it"
            " cannot become a reward model; use another model family"
        ) from None
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    buffers = {name for name, _ in model.named_buffers() if name in model.state_dict()}
    return type(model).__name__, shapes, buffers


def padding_of(tokenizer: PreTrainedTokenizerBase) -> Padding | None:
    """The token to pad with: the tokenizer's own if it is not EOS, else UNK, BOS, or any other
    special token. None = EOS is the only special token.

    A sequence classifier scores the last token that is not padding. If EOS were padding, it would
    score the token before EOS.
    """
    end = tokenizer.eos_token_id
    candidates = (
        (tokenizer.pad_token, tokenizer.pad_token_id),
        (tokenizer.unk_token, tokenizer.unk_token_id),
        (tokenizer.bos_token, tokenizer.bos_token_id),
        *sorted(special_tokens(tokenizer).items(), key=lambda item: item[1]),
    )
    return next(
        (
            Padding(cast(str, token), cast(int, number))
            for token, number in candidates
            if number is not None and number != end
        ),
        None,
    )
