"""The settings of the reward model application. `serve deploy` reads them from YAML. This module
does not import torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from asyncrl.config import Section
from asyncrl.contracts.section import Unset
from asyncrl.generation.settings import check_served_name


class RewardModelApp(Section):
    """One reward model application."""

    model: str
    """Directory of a Hugging Face sequence classifier with one label, on every replica's node. Use
    an absolute path."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the backbone's weights. The score itself is computed in float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the replicas. `auto` = `cuda` if the Ray cluster has a GPU, else `cpu`."""
    num_replicas: int = Field(default=1, gt=0)
    """Serve replicas, each with one copy of the model."""
    num_cpus: float = Field(default=1.0, ge=0)
    """Logical CPUs that one replica declares to Ray."""
    num_threads: Annotated[int | None, Unset] = Field(default=None, gt=0)
    """Threads with which torch computes on the CPU. Default: num_cpus, rounded up."""
    max_batch_size: int = Field(default=32, gt=0)
    """Most sequences of one forward pass."""
    max_batch_tokens: int = Field(default=65_536, gt=0)
    """Most tokens of one forward pass, with padding. A single longer sequence is computed alone."""
    batch_wait_s: float = Field(default=0.005, ge=0)
    """Seconds that an idle replica waits for more sequences before it computes."""
    max_tokens: Annotated[int | None, Unset] = Field(default=None, gt=0)
    """Longest sequence, in tokens. A request with a longer one is refused. Default: the model's
    context."""
    http: bool = True
    """Also serve HTTP: `/score`, `/v1/models` and `/health`, under the application's
    route_prefix. Without it, only the Serve handle answers."""
    served_name: str | None = Field(default=None, min_length=1)
    """Name of the model in HTTP responses. Default: the last part of `model`."""

    @model_validator(mode="after")
    def settings_act(self) -> RewardModelApp:
        if self.device == "cuda" and self.num_threads is not None:
            raise ValueError(
                f"num_threads = {self.num_threads} only has an effect with device: cpu; leave it"
                " out"
            )
        check_served_name(self.served_name, self.http)
        return self

    @property
    def threads(self) -> int:
        """Threads with which torch computes on the CPU."""
        return self.num_threads or max(1, math.ceil(self.num_cpus))

    @property
    def model_name(self) -> str:
        """What HTTP responses call the model."""
        return self.served_name or Path(self.model).name

    def on(self, device: Literal["cpu", "cuda"]) -> RewardModelApp:
        """The settings with `auto` decided."""
        if self.device != "auto":
            return self
        threads = self.num_threads if device == "cpu" else None
        return self.model_copy(update={"device": device, "num_threads": threads})
