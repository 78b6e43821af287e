"""Standing Serve applications with HTTP routes: generators, which speak the APIs of OpenAI and
Anthropic, and reward models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.serving.reward_model import build_reward_app as build_reward_app
    from asyncrl.serving.standing import build_standing_app as build_standing_app

__getattr__ = lazy_exports(
    __name__,
    build_reward_app="reward_model",
    build_standing_app="standing",
)
