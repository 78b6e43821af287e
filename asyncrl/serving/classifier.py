"""A sequence classifier with one label, as a reward model: computes the scores of token sequences.

A sequence's score is a linear map of the last layer's output at its last token. transformers finds
that token by looking for padding from the right. This is wrong if the padding token is EOS, so the
position is given here instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from asyncrl.models.supported import caps_attention
from asyncrl.models.unused import unused
from asyncrl.serving.reward_checks import NO_DIRECTORY, WAY_OUT, not_one_label

UNBOUNDED_CONTEXT = 1 << 20
"""Context of a model whose config.json has no max_position_embeddings, in tokens."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference between our score of a sequence and that of transformers, absolute and
relative."""


class ClassifierError(ValueError):
    """The directory contains no reward model that can be served. The message is one line."""


class Classifier:
    """A sequence classifier in evaluation mode."""

    def __init__(
        self, path: str, dtype: Literal["float32", "bfloat16"], device: Literal["cpu", "cuda"]
    ) -> None:
        """Load a checkpoint directory. Code and pickles in it are not run.

        Raises:
            ClassifierError: it is not a classifier with one label, lacks weights, or does not score
                the last token.
        """
        self._path, self._device = path, device
        self._model = self._loaded({"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])
        score = getattr(self._model, "score", None)
        if not isinstance(score, nn.Linear) or self._model.base_model is self._model:
            raise self._error(f"{type(self._model).__name__} has no score of the last token")
        self._weight = score.weight.detach().float()
        self._bias = None if score.bias is None else score.bias.detach().float()
        text = self._model.config.get_text_config()
        positions = getattr(text, "max_position_embeddings", None)
        self.context = positions if isinstance(positions, int) else UNBOUNDED_CONTEXT
        """Longest sequence, in tokens."""
        self.vocabulary = int(text.vocab_size)
        """Token ids are below this."""
        self._compare(getattr(text, "pad_token_id", None))

    @torch.inference_mode()
    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The scores of non-empty sequences, computed in one forward pass."""
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
        for padded, row in zip(ids, rows, strict=True):
            padded[: len(row)] = torch.tensor(row)
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        output = self._model.base_model(
            input_ids=ids.to(self._device), attention_mask=mask.to(self._device), use_cache=False
        )
        hidden: Tensor = output.last_hidden_state
        last = hidden[torch.arange(len(rows)), lengths - 1].float()
        scores: list[float] = linear(last, self._weight, self._bias)[:, 0].tolist()
        return scores

    def _loaded(self, dtype: torch.dtype) -> PreTrainedModel:
        if not Path(self._path).is_dir():
            raise self._error(NO_DIRECTORY)
        try:
            config = AutoConfig.from_pretrained(self._path, trust_remote_code=False)
            names, labels = config.architectures or [], config.num_labels
            if why := not_one_label(names, labels):
                raise self._error(why)
            own = "eager" if caps_attention(config.to_dict()) else None
            model, found = AutoModelForSequenceClassification.from_pretrained(
                self._path,
                config=config,
                dtype=dtype,
                attn_implementation=own,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except ClassifierError:
            raise
        except Exception as error:  # transformers and safetensors raise many kinds
            why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            raise self._error(f"it cannot be loaded ({why})") from None
        if lacking := sorted(map(str, found["missing_keys"])):
            raise self._error(f"its weights lack {lacking[0]}")
        # A head that predicts tokens has no part in a score.
        more = set(map(str, found["unexpected_keys"])) - {"lm_head.weight", "lm_head.bias"}
        if more := more - unused(dict.fromkeys(more, ()), type(model)):
            raise self._error(f"{type(model).__name__} has no place for {min(more)} of its weights")
        loaded: PreTrainedModel = model.eval().to(self._device)
        return loaded

    def _compare(self, padding: object) -> None:
        """Raise ClassifierError unless transformers gives a sequence without padding the same
        score."""
        row = [token for token in range(self.vocabulary) if token != padding][:4]
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([row], device=self._device))
        wanted, score = float(output.logits[0, 0]), self.scores([row])[0]
        most = TOLERANCE[self._model.dtype] * max(1.0, abs(wanted))
        if not abs(score - wanted) <= most:
            raise self._error(
                f"{type(self._model).__name__} does not score the last token alone: {wanted:g}, not"
                f" {score:g}"
            )

    def _error(self, why: str) -> ClassifierError:
        return ClassifierError(f"model = {self._path!r}: {why}; {WAY_OUT}")
