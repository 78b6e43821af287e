"""`asyncrl check-env`: what can go wrong between a model's template, an environment and a reward,
found on CPU before anything is rented. It uses no Ray, and loads no weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from asyncrl.config import Config, ConfigError
from asyncrl.contracts.rows import Prompt
from asyncrl.data.prompts import first_prompts
from asyncrl.environments.pool import EnvironmentFailedError
from asyncrl.preflight.check_env.agent_checks import AgentChecks, Request
from asyncrl.preflight.check_env.findings import Finding, findings_text
from asyncrl.preflight.check_env.process_output import Printed
from asyncrl.preflight.check_env.template_checks import TemplateChecks
from asyncrl.preflight.plan.sections import environment_text
from asyncrl.preflight.specs import data_spec, sessions_spec
from asyncrl.preflight.trials.environment import check_agent
from asyncrl.rollout.session_groups import session_template
from asyncrl.runtime.redact import print_shown, secret_names
from asyncrl.sessions.session import SessionTemplate
from asyncrl.text.response import ResponseReader

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
        return "\n\n".join([settings_text(self.config), findings_text(self.findings, width)])


def settings_text(config: Config) -> str:
    """The settings of the config's sessions."""
    return "\n\n".join(environment_text(config))


def check_environment(
    config: Config, tell: Callable[[Finding], None] = lambda finding: None
) -> Checked:
    """Check the environment of a config with scripted turns and agents.

    Args:
        tell: gets each finding as soon as it is known.

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
    check_agent(config.environment, prompts[0].columns)
    findings: list[Finding] = []
    with Printed(lambda text: print_shown(text.rstrip(), file=sys.stderr)) as printed:
        try:
            with AgentChecks(
                config, environment, template, reader, prompts, printed.descriptor
            ) as agents:
                for finding in _all(agents, template, reader, prompts):
                    findings.append(finding)
                    tell(finding)
        except EnvironmentFailedError as error:
            raise ConfigError(str(error)) from None
    for finding in (*printed.findings(), _secrets()):
        findings.append(finding)
        tell(finding)
    return Checked(config, tuple(findings))


def _all(
    agents: AgentChecks,
    template: SessionTemplate,
    reader: ResponseReader,
    prompts: Sequence[Prompt],
) -> Iterator[Finding]:
    """The findings about the template, and about the sessions of scripted agents."""
    alone: Request = ([{"role": "user", "content": prompts[0].text}], None)
    chat, tools = agents.first_request() or alone
    yield from TemplateChecks(template, reader, chat, tools).all()
    yield from agents.findings()
    for chat, further in agents.later_tools(tools):
        yield from TemplateChecks(template, reader, chat, further).tool_calls(made_up=False)


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
