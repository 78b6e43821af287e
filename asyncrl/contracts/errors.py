"""Errors that pass from one station to another."""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "EngineDiedError",
    "EscapesDirectoryError",
    "EvaluationLostError",
    "GenerationTimeoutError",
    "InvalidRequestError",
    "NoCheckpointError",
    "OutboxClosedError",
    "PartDiedError",
    "PlacementError",
    "PlacementLostError",
    "RolloutFailedError",
    "StaleReplicaError",
    "UnreadableCheckpointError",
]


class PartDiedError(RuntimeError):
    """A process of the run died, or a stream broke because one did. A new attempt, from the last
    committed checkpoint, may go better."""


class EvaluationLostError(Exception):
    """The replica that was held for an evaluation is gone, and with it the version. The message
    says how."""


class RolloutFailedError(Exception):
    """A group could not be generated within its deadline. The message says why."""


class StaleReplicaError(Exception):
    """The replica has not the version asked for and cannot have it now: ask another."""


class EngineDiedError(StaleReplicaError):
    """The engine ended under the request; its replica will be replaced."""


class InvalidRequestError(ValueError):
    """The engine does not take the request; the message says why, in the engine's words."""


class GenerationTimeoutError(Exception):
    """The request was aborted at its deadline."""


class NoCheckpointError(RuntimeError):
    """There is no committed checkpoint where one is needed."""


class UnreadableCheckpointError(RuntimeError):
    """Committed checkpoints are there and none can be read. The run never starts from zero
    instead."""


class EscapesDirectoryError(ValueError):
    """A path leads out of the directory that it belongs to. The message names it and the fix."""


class PlacementError(RuntimeError):
    """The cluster has no room for the run. The message holds the table of what is needed,
    registered and free."""


class PlacementLostError(PlacementError, PartDiedError):
    """Room that was there is gone: a node was lost, or somebody else was faster. A new attempt
    looks for room again."""


class OutboxClosedError(Exception):
    """Nothing more comes from this outbox for this reader: it was closed, or another reader has
    taken over."""


class ConfigError(ValueError):
    """A setting that cannot be used. The message is one line that names the field, the value and
    the fix."""
