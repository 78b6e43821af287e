"""What is refused, or known to be finished, before anything costs time."""

from __future__ import annotations

from asyncrl.config import Config, OfflineConfig
from asyncrl.preflight.model_snapshot import resolve_models
from asyncrl.rundir.directory import refuse_early, refuse_taken

__all__ = ["look_early"]


def look_early(config: Config | OfflineConfig) -> tuple[Config | OfflineConfig, str | None]:
    """The config with local models and data, and a line that says that the run is finished already;
    None if there is something to train.

    Raises:
        ConfigError: the run directory cannot be used, or a model or dataset cannot be found.
    """
    refuse_taken(config)
    # One call for each kind: a type variable takes no union.
    config = resolve_models(config) if isinstance(config, Config) else resolve_models(config)
    return config, refuse_early(config)
