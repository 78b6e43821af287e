"""Writes one version as a Hugging Face directory with the checkpoint's names, settings and
tokenizer. transformers and vLLM can load it. A reward model becomes a sequence classifier."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from asyncrl.runtime.files.opening import replace_text
from asyncrl.text.stops import GENERATION_CONFIG, Stops, generation_settings
from asyncrl.text.tokenizer import load_tokenizer, save_tokenizer
from asyncrl.weights.classifier import SCORE, padding_of
from asyncrl.weights.gather import TORCH_DTYPES, weight_layout
from asyncrl.weights.published import VersionTable
from asyncrl.weights.stored import INDEX, save_tensors

COPIED = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files copied from the checkpoint if they exist. vLLM needs a processor for a vision model."""
TOKENIZER_SETTINGS = "tokenizer_config.json"


class HfDirectory:
    """Writes a Hugging Face directory: call `write` for each bucket, then `finish`. The directory
    must exist."""

    def __init__(
        self, directory: str | Path, table: VersionTable, dtype: str, bucket_bytes: int
    ) -> None:
        """
        Args:
            dtype: torch's name of the parameters' dtype.
            bucket_bytes: size of each weights file; at least that of the largest tensor.
        """
        self.directory, self.table, self.dtype = Path(directory), table, dtype
        self.entries, self.sizes = weight_layout(table, dtype, bucket_bytes)
        self.files = [
            f"model-{number + 1:05d}-of-{len(self.sizes):05d}.safetensors"
            for number in range(len(self.sizes))
        ]

    def write(self, number: int, content: np.ndarray) -> None:
        """Write one bucket [sizes[number]] uint8 as a file."""
        flat = torch.from_numpy(content)
        tensors = {
            entry.name: (
                flat[entry.offset : entry.offset + entry.nbytes]
                .view(TORCH_DTYPES[entry.dtype])
                .view(entry.shape)
            )
            for entry in self.entries
            if entry.bucket == number
        }
        save_tensors(self.directory / self.files[number], tensors)

    def finish(self, model_path: str | Path, tokenizer_source: str, stops: Stops) -> None:
        """Write the index, the tokenizer, and the checkpoint's settings with the dtype of the
        weights and the stops of the run."""
        weight_map = {entry.name: self.files[entry.bucket] for entry in self.entries}
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry in self.entries)},
            "weight_map": weight_map,
        }
        replace_text(self.directory / INDEX, json.dumps(index, indent=2))
        settings: dict[str, object] = json.loads((Path(model_path) / "config.json").read_text())
        settings.setdefault("architectures", [self.table.architecture])
        if SCORE in self.table.parameters:
            settings = self._classifying(settings, tokenizer_source)
        replace_text(
            self.directory / "config.json",
            json.dumps({**_typed(settings, self.dtype), "dtype": self.dtype}, indent=2) + "\n",
        )
        write_stops(self.directory, model_path, stops)
        for name in COPIED:
            if (Path(model_path) / name).exists():
                shutil.copyfile(Path(model_path) / name, self.directory / name)
        save_tokenizer(tokenizer_source, self.directory)
        if SCORE in self.table.parameters:
            self._name_padding(tokenizer_source)

    def _classifying(
        self, settings: Mapping[str, object], tokenizer_source: str
    ) -> dict[str, object]:
        """The settings of a sequence classifier with one label."""
        labels = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
        padding = padding_of(load_tokenizer(tokenizer_source))
        number = None if padding is None else padding.number
        architectures = [self.table.architecture]
        return {**settings, **labels, "architectures": architectures, "pad_token_id": number}

    def _name_padding(self, tokenizer_source: str) -> None:
        """Write the padding token of config.json to the tokenizer's settings, which may name EOS or
        none."""
        padding = padding_of(load_tokenizer(tokenizer_source))
        path = self.directory / TOKENIZER_SETTINGS
        if padding is None or not path.exists():
            return
        tokenizer = json.loads(path.read_text())
        replace_text(path, json.dumps({**tokenizer, "pad_token": padding.token}, indent=2) + "\n")


def write_stops(directory: Path, model_path: str | Path, stops: Stops) -> None:
    """Write generation_config.json with these stops. transformers and vLLM read it: without them,
    the model would go on after the end that it was trained to write."""
    text = json.dumps(generation_settings(model_path, stops), indent=2)
    replace_text(directory / GENERATION_CONFIG, f"{text}\n")


def _typed(settings: Mapping[str, object], dtype: str) -> dict[str, object]:
    """The settings with this dtype instead of every `dtype` or `torch_dtype`, under the newer
    name `dtype`."""
    found: dict[str, object] = {}
    for name, value in settings.items():
        if name in ("dtype", "torch_dtype"):
            found["dtype"] = dtype
        else:
            found[name] = _typed(value, dtype) if isinstance(value, dict) else value
    return found
