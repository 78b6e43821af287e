"""What is refused, or known to be finished, before anything costs time."""

from __future__ import annotations

from typing import Any

from asyncrl.config import Config, OfflineConfig
from asyncrl.preflight.model_snapshot import resolve_models
from asyncrl.rundir.directory import refuse_early, refuse_taken


def check_before_start(config: Config | OfflineConfig) -> tuple[Config | OfflineConfig, str | None]:
    """The config with local models and data, and a line that says that the run is finished already;
    None if there is something to train.

    Raises:
        ConfigError: the run directory cannot be used, or a model or dataset cannot be found.
    """
    refuse_taken(config)
    resolve: Any = resolve_models  # its type is one kind of config at a time
    resolved: Config | OfflineConfig = resolve(config)
    return resolved, refuse_early(resolved)
