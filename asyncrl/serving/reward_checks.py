"""Whether a directory contains a reward model, as far as its JSON files and the names of its
weights show. This module does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.config import ConfigError
from asyncrl.generation.model_checks import check_weight_files
from asyncrl.serving.reward_settings import RewardModelApp

WAY_OUT = "give the directory of a Hugging Face sequence classifier with one label"
NO_DIRECTORY = "there is no such directory"
DEFAULT_LABELS = 2
"""Labels of a classifier whose config.json names none."""


def check_reward_app(app: RewardModelApp) -> RewardModelApp:
    """Check the model before a replica loads it. Return the settings as they are.

    Raises:
        ConfigError: one line with the setting, its value and the fix.
    """
    path, model = Path(app.model), f"model = {app.model!r}"
    if not path.is_dir():
        raise ConfigError(f"{model}: {NO_DIRECTORY}; {WAY_OUT}")
    tree = _config_json(path, model)
    named = tree.get("architectures")
    if why := not_one_label(named if isinstance(named, list) else [], _labels(tree)):
        raise ConfigError(f"{model}: {why}; {WAY_OUT}")
    if tree.get("quantization_config") is not None:
        raise ConfigError(
            f"{model}: its config.json has a quantization_config; give the checkpoint without it"
        )
    check_weight_files(path, "model")
    context = tree.get("max_position_embeddings")
    if isinstance(context, int) and (app.max_tokens or 0) > context:
        raise ConfigError(
            f"max_tokens = {app.max_tokens} is above the context of {context} tokens of {model};"
            " lower it"
        )
    return app


def not_one_label(architectures: Sequence[object], labels: int) -> str | None:
    """Why a model of this config.json is no reward model; None: no known problem."""
    if str(*architectures[:1]).endswith("ForSequenceClassification") and labels == 1:
        return None
    return (
        f"its config.json has architectures {list(architectures)} and {labels} labels, so it is no"
        " sequence classifier with one label"
    )


def _config_json(path: Path, model: str) -> Mapping[str, object]:
    try:
        tree = json.loads((path / "config.json").read_text())
    except OSError as error:
        raise ConfigError(f"{model}: {error.strerror} (config.json); {WAY_OUT}") from None
    except ValueError as error:
        raise ConfigError(f"{model}: config.json is not JSON ({error})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{model}: config.json contains no object of settings; {WAY_OUT}")
    return tree


def _labels(tree: Mapping[str, object]) -> int:
    """Labels of the classifier, as transformers reads them."""
    names, number = tree.get("id2label"), tree.get("num_labels")
    if isinstance(names, dict):
        return len(names)
    return number if isinstance(number, int) else DEFAULT_LABELS
