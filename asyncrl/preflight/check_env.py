"""`asyncrl check-env`: what can go wrong between a model's template, an environment and a reward,
found on CPU before anything is rented. It uses no Ray, and loads no weights."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from asyncrl.config import Config, ConfigError
from asyncrl.data.prompts import first_prompts
from asyncrl.environments.pool import EnvironmentFailedError
from asyncrl.preflight.agent_checks import AgentChecks
from asyncrl.preflight.environment import check_agent
from asyncrl.preflight.finding import Finding, findings_text
from asyncrl.preflight.plan_sections import environment_text
from asyncrl.preflight.specs import data_spec, sessions_spec
from asyncrl.preflight.template_checks import TemplateChecks
from asyncrl.rollout.sessions import session_template
from asyncrl.runtime.redact import secret_names
from asyncrl.text.response import ResponseReader

__all__ = ["Checked", "check_environment"]

ROWS = 2
"""Rows of data.train that the scripted agents get."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What the checks of an environment found."""

    config: Config
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        """Whether something would make training false."""
        return any(finding.verdict == "FAIL" for finding in self.findings)

    def text(self, width: int | None = None) -> str:
        """The session's settings and the findings. `width`: see `findings_text`."""
        findings = findings_text(self.findings, width)
        return "\n\n".join([*environment_text(self.config), findings])


def check_environment(config: Config) -> Checked:
    """Check the environment of a config with scripted turns and agents.

    Raises:
        ConfigError: there is no environment, or it, the model's tokenizer or the data cannot be
            used.
    """
    spec, environment = sessions_spec(config), config.environment
    if spec is None or environment is None:
        raise ConfigError(
            "check-env checks an environment, and the config has none; set environment.function, or"
            " run `asyncrl plan`"
        )
    try:
        template = session_template(spec)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    reader = ResponseReader(template.tokenizer)
    if not getattr(template.tokenizer, "chat_template", None):
        raise ConfigError(
            f"model.path = {config.model.path!r} has no chat template, and the turns of an"
            " environment are chats; add chat_template.jinja to the model's folder"
        )
    prompts = first_prompts(data_spec(config), ROWS)
    check_agent(config.agent, prompts[0].columns)
    agents = AgentChecks(config, environment, template, reader, prompts)
    try:
        played = asyncio.run(agents.play())
    except EnvironmentFailedError as error:
        raise ConfigError(str(error)) from None
    chat, tools = agents.first_request or ([{"role": "user", "content": prompts[0].text}], None)
    checks = TemplateChecks(template, reader, chat, tools)
    return Checked(config, (*checks.all(), *played, _secrets()))


def _secrets() -> Finding:
    """Names of environment variables that the environment's processes see."""
    names = secret_names(os.environ)
    if not names:
        return Finding("ok", "secrets", "no environment variable looks like one")
    text = (
        f"the environment's processes see {', '.join(names)}, and so may code that it runs; unset"
        " what they do not need before `asyncrl train`"
    )
    return Finding("warn", "secrets", text)
