"""On-policy distillation: the teacher, and how the policy learns from it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from asyncrl.algorithms.references import KlTerm
from asyncrl.contracts.section import ByKey, ByName, Section, Short
from asyncrl.runtime.setting_paths import ModelPath
from asyncrl.runtime.urls import sends_in_the_clear


class TeacherServer(Section):
    """A teacher behind the base URL of an OpenAI-compatible server."""

    KEY: ClassVar[str] = "url"

    url: str = Field(pattern=r"^https?://")
    """Base URL, such as http://127.0.0.1:8000/v1."""
    model: str | None = None
    """Model name in requests. Default: the first model that the server lists."""
    key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*$")
    """Environment variable with the URL's API key, set on every node. None = no key is sent."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for one completion, retries included. After that, it is masked."""
    retries: int = Field(default=2, ge=0)
    """Retries after a server error or a lost connection."""
    at_once: int = Field(default=32, gt=0)
    """Concurrent requests."""

    @model_validator(mode="after")
    def keys_are_not_sent_in_the_clear(self) -> TeacherServer:
        if self.key_env is not None and sends_in_the_clear(self.url):
            raise ValueError(
                f"url = {self.url!r} would send the key of {self.key_env} in the clear; use https,"
                " or leave key_env out"
            )
        return self


class TeacherModel(Section):
    """A teacher that the run loads, in a process of its own, on the learner's device."""

    KEY: ClassVar[str] = "path"

    path: ModelPath
    """A Hugging Face checkpoint directory or a name on the hub, with the model's tokenizer.
    `{runs_root}` in it is replaced."""
    num_cpus: float = Field(default=0.2, ge=0)
    """Logical CPUs that its process declares to Ray."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Largest fraction of a GPU's memory that PyTorch may allocate in it, with `placement: share`:
    0.1 by default. In other placements it has a GPU of its own."""


def _teacher(value: object) -> str:
    return "url" if str(value).startswith(("http://", "https://")) else "path"


class TeacherAdvantage(Section):
    """Each token gets the advantage coef * (log π_teacher - log π_behavior), whose expectation is
    the negative reverse KL divergence."""

    name: Literal["advantage"] = "advantage"
    coef: float = Field(default=1.0, gt=0)
    """Weight of the teacher's advantage, per nat."""


class TeacherTopK(Section):
    """The reverse KL divergence is a part of the loss. It is over the sampled token, the teacher's
    top_k most probable others, and the rest as one."""

    name: Literal["top_k"] = "top_k"
    coef: float = Field(default=1.0, gt=0)
    """Weight of the divergence, per nat."""
    top_k: int = Field(default=32, gt=0, le=128)
    """Tokens of the teacher at each position, besides the sampled one. Each adds 8 bytes per
    completion token to a group's row."""


class TeacherKl(Section):
    """The teacher is the reference policy of a KL term."""

    name: Literal["ref_kl"] = "ref_kl"
    kl: KlTerm
    """`kl_loss_coef` or `kl_coef`, as in algorithm.reference."""


class DistillationConfig(Section):
    """On-policy distillation: a frozen teacher scores the tokens that the policy sampled."""

    teacher: Annotated[TeacherServer | TeacherModel, ByKey(), Short(_teacher)]
    """The teacher: a Hugging Face checkpoint directory, a name on the hub, or the base URL of an
    OpenAI-compatible server. Or a mapping with `path` or `url`, and more settings."""
    use: Annotated[TeacherAdvantage | TeacherTopK | TeacherKl, ByName("advantage")] = (
        TeacherAdvantage()
    )
    """How the policy learns from the teacher."""
    reward_weight: float = Field(default=0.0, ge=0)
    """Weight of the rewards' advantage. 0 = rewards are only measured."""
    max_failed_groups: int = Field(default=32, gt=0)
    """Groups in a row without any answer of the teacher, after which the run ends."""

    @property
    def teacher_text(self) -> str:
        """Where the teacher is, for people."""
        teacher = self.teacher
        return teacher.url if isinstance(teacher, TeacherServer) else teacher.path

    @property
    def adds_advantage(self) -> bool:
        """Whether each token gets an advantage from the teacher."""
        return isinstance(self.use, TeacherAdvantage)

    @property
    def top_k(self) -> int:
        """Tokens of the teacher at each position that the loss compares; 0 = none."""
        return self.use.top_k if isinstance(self.use, TeacherTopK) else 0

    @model_validator(mode="after")
    def servers_score_sampled_tokens(self) -> DistillationConfig:
        if self.top_k and isinstance(self.teacher, TeacherServer):
            raise ValueError(
                f"use: top_k does not work with the teacher at {self.teacher.url}: a server only"
                " scores the sampled tokens; give the teacher's checkpoint, or set use: advantage"
            )
        return self
