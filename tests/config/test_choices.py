"""Choices: settings with alternatives that have settings of their own, in every place that takes
one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from small_config import SMALL

from asyncrl.algorithms.losses import Loss
from asyncrl.config import Config, ConfigError, OfflineConfig, explain, load_any, load_config
from asyncrl.config.aliases import OF_ANOTHER, explain_unknown, other_names
from asyncrl.config.fields import by_name, field_names, find
from asyncrl.contracts.section import Section, key_of, kinds_of, name_of

OFFLINE = {
    "name": "small",
    "objective": "dpo",
    "model": {"path": "m"},
    "data": {"train": "t"},
}
LOSSES = ", ".join(filter(None, map(name_of, kinds_of(Loss))))
SESSIONS = {"data": {**SMALL["data"], "max_length": 16}}
URL = "http://127.0.0.1:8000/v1"
LEAVE_OUT = "has moved; leave it out, which is the same as"
KINDS: tuple[type[BaseModel], ...] = (Config, OfflineConfig)


class Choice(NamedTuple):
    """A choice of some kind of config."""

    name: str
    """Dotted."""
    field: FieldInfo
    kinds: tuple[type[Section], ...]

    @property
    def adapter(self) -> TypeAdapter[Any]:
        marks = self.field.metadata
        whole: Any = self.field.annotation
        return TypeAdapter(Annotated[(whole, *marks)] if marks else whole)


def choices(kind: type[BaseModel], prefix: str = "") -> Iterator[Choice]:
    """Every choice of a kind of config, also in alternatives of others."""
    for name, field in kind.model_fields.items():
        kinds = kinds_of(field.annotation)
        if len(kinds) > 1:
            yield Choice(f"{prefix}{name}", field, kinds)
        for one in kinds:
            yield from choices(one, f"{prefix}{name}.")


ALL = [(kind, choice) for kind in KINDS for choice in choices(kind)]
NAMED = [
    pytest.param(kind, choice, id=f"{kind.__name__}-{choice.name}")
    for kind, choice in ALL
    if by_name(choice.kinds)
]
KEYED = [
    pytest.param(kind, choice, id=f"{kind.__name__}-{choice.name}")
    for kind, choice in ALL
    if not by_name(choice.kinds)
]


def names_of(choice: Choice) -> list[str]:
    return [name for kind in choice.kinds if (name := name_of(kind))]


def messages(error: ValidationError) -> str:
    return "; ".join(item["msg"] for item in error.errors())


def test_the_choices_are_found() -> None:
    assert {choice.name for kind, choice in ALL if kind is Config} == {
        "algorithm",
        "algorithm.advantage",
        "algorithm.distillation.teacher",
        "algorithm.distillation.use",
        "algorithm.distillation.use.kl",
        "algorithm.loss",
        "algorithm.preference.loss",
        "algorithm.preference.pairs",
        "algorithm.reference",
        "data.length_policy",
        "environment",
        "generator",
        "learner.optimizer",
        "learner.schedule",
        "reward.policy",
        "reward.sandbox",
        "staleness.on_stale",
        "warm_start.packing_strategy",
    }
    assert {choice.name for kind, choice in ALL if kind is OfflineConfig} == {
        "data.length_policy",
        "learner.optimizer",
        "learner.schedule",
        "objective",
        "objective.loss",
    }


@pytest.mark.parametrize(("kind", "choice"), NAMED)
def test_a_name_and_a_mapping_have_the_same_defaults(kind: type[BaseModel], choice: Choice) -> None:
    assert len(names_of(choice)) == len(set(names_of(choice)))
    for one in choice.kinds:
        name = name_of(one) or "package.module:function"
        required = [key for key, field in one.model_fields.items() if field.is_required()]
        if set(required) - {"name"}:
            with pytest.raises(ValidationError, match="Field required"):
                choice.adapter.validate_python(name)
            continue
        short = choice.adapter.validate_python(name)
        assert type(short) is one and short == choice.adapter.validate_python({"name": name})
        assert short == choice.adapter.validate_python(short.model_dump(mode="json"))
        assert short == choice.adapter.validate_python(short)
    if choice.field.is_required():
        with pytest.raises(ValidationError, match="use one of"):
            choice.adapter.validate_python({})
        return
    default = choice.field.get_default()
    assert choice.adapter.validate_python({}) == default
    assert isinstance(default, choice.kinds[0])


@pytest.mark.parametrize(("kind", "choice"), NAMED)
def test_an_unknown_name_is_answered_with_the_known_ones(
    kind: type[BaseModel], choice: Choice
) -> None:
    for value in ("quux", {"name": "quux"}, 3, ["quux"], True, {"name": None}):
        with pytest.raises(ValidationError) as refused:
            choice.adapter.validate_python(value)
        text = messages(refused.value)
        assert f"use one of {', '.join(names_of(choice))}" in text
        assert ("your own function as package.module:function" in text) == (
            choice.name in ("algorithm.loss", "algorithm.advantage")
        )


@pytest.mark.parametrize(("kind", "choice"), NAMED)
def test_settings_of_another_alternative_are_unknown_in_this_one(
    kind: type[BaseModel], choice: Choice
) -> None:
    for one in choice.kinds:
        for other in choice.kinds:
            for key in other.model_fields.keys() - one.model_fields.keys():
                name = name_of(one) or "package.module:function"
                with pytest.raises(ValidationError) as refused:
                    choice.adapter.validate_python({"name": name, key: 1})
                assert "Extra inputs are not permitted" in messages(refused.value)


@pytest.mark.parametrize(("kind", "choice"), KEYED)
def test_a_key_chooses_an_alternative_and_null_counts_as_left_out(
    kind: type[BaseModel], choice: Choice
) -> None:
    keys = [key for one in choice.kinds if (key := key_of(one))]
    assert len(keys) >= len(choice.kinds) - 1 and len(keys) == len(set(keys))
    if len(keys) > 1:
        with pytest.raises(ValidationError, match=f"give only one of {', '.join(keys)}"):
            choice.adapter.validate_python(dict.fromkeys(keys, "x"))
    nulls = dict.fromkeys(keys)
    if len(keys) == len(choice.kinds):
        with pytest.raises(ValidationError, match=f"give one of {', '.join(keys)}"):
            choice.adapter.validate_python(nulls)
    elif choice.name != "reward.sandbox":  # it also needs a level
        assert choice.adapter.validate_python(nulls) == choice.adapter.validate_python({})
    for one in choice.kinds:
        for other in choice.kinds:
            assert key_of(other) not in one.model_fields or other is one


def config(changes: dict[str, Any]) -> Config:
    return Config.model_validate({**SMALL, **changes})


def refusal(changes: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as refused:
        config(changes)
    return explain(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"algorithm": {"loss": "pop"}},
            f"algorithm.loss = 'pop': use one of {LOSSES}, or your own function as"
            " package.module:function",
        ),
        (
            {"algorithm": {"loss": {"name": "pop"}}},
            f"algorithm.loss.name = 'pop': use one of {LOSSES}, or your own function as"
            " package.module:function",
        ),
        (
            {"algorithm": {"loss": "not a:function"}},
            "algorithm.loss.name = 'not a:function': name a function as package.module:function",
        ),
        (
            {"learner": {"optimizer": None}},
            "learner.optimizer = None: use one of adamw, sgd",
        ),
        (
            {"learner": {"optimizer": {"name": "sgd", "betas": [0.9, 0.9]}}},
            "learner.optimizer.betas has no effect with optimizer: sgd; leave it out, or use it"
            " with optimizer: adamw",
        ),
        (
            {"algorithm": {"loss": {"name": "my.module:loss", "eps_clip": 0.1}}},
            "algorithm.loss.eps_clip has no effect with loss: your own; leave it out, or use it"
            " with loss: ppo, clip_cov, gspo, gmpo or cispo",
        ),
        (
            {"algorithm": {"loss": {"name": "ppo", "arguments": {"a": 1}}}},
            "algorithm.loss.arguments.a has no effect with loss: ppo; leave it out, or use it with"
            " loss: your own",
        ),
        (
            {"algorithm": {"loss": {"name": "gspo", "eps_clp": 0.1}}},
            "algorithm.loss.eps_clp is unknown; did you mean algorithm.loss.eps_clip?",
        ),
        (
            {"algorithm": {"loss": {"eps_clip": 2}}},
            "algorithm.loss.eps_clip = 2: input should be less than or equal to 1",
        ),
        (
            {"algorithm": {"distillation": {"teacher": {"path": "m", "retries": 1}}}},
            "algorithm.distillation.teacher.retries has no effect with"
            " algorithm.distillation.teacher.path; leave one of them out",
        ),
        (
            {"algorithm": 3},
            "algorithm = 3: write its settings below it, each as `name: value`, or leave it out",
        ),
        (
            {"generator": {"attach": "standing", "num_replicas": 2}},
            "generator.num_replicas has no effect with generator.attach; leave one of them out",
        ),
        (
            {"environment": {"max_turns": 2}},
            "environment: give one of function, agent, command",
        ),
        (
            {"reward": {**SMALL["reward"], "policy": {"name": "fail", "retries": 2}}},
            "reward.policy.retries has no effect with policy: fail; leave it out, or use it with"
            " policy: retry",
        ),
        (
            {"reward": {**SMALL["reward"], "sandbox": "container"}},
            "reward.sandbox.level = 'container': needs a service; set reward.sandbox.service, or"
            " use namespaces",
        ),
        (
            {"reward": {**SMALL["reward"], "sandbox": {"wall_s": 1}}},
            "reward.sandbox.level is missing; set it",
        ),
        (
            {
                "reward": {
                    **SMALL["reward"],
                    "sandbox": {
                        "service": "http://127.0.0.1:8700",
                        "level": "container",
                        "python": "/bin/python",
                    },
                }
            },
            "reward.sandbox.python has no effect with reward.sandbox.service; leave one of them"
            " out",
        ),
        ({"reward": {}}, "reward.functions is empty; name at least one function"),
        (
            {"algorithm": {"correction": {"truncation": "none"}}},
            "algorithm.correction.truncation.level = 'none': input should be 'token', 'sequence' or"
            " 'geometric', or leave it out",
        ),
    ],
)
def test_a_message_names_the_choice_and_what_has_the_setting(
    changes: dict[str, Any], message: str
) -> None:
    assert refusal(changes) == message


def test_a_single_value_stands_for_a_section() -> None:
    short = config(
        {
            "algorithm": {
                "ce": 0.1,
                "group_filter": "m:f",
                "loss": {"old_policy": "learner"},
                "correction": {"truncation": "geometric"},
                "distillation": {"teacher": "http://127.0.0.1:8000/v1", "reward_weight": 1.0},
            },
            "rollout": {**SMALL["rollout"], "repetition_stop": 20},
            "reward": {**SMALL["reward"], "overlong": 4, "sandbox": "landlock"},
        }
    )
    long = config(
        {
            "algorithm": {
                "ce": {"coef": 0.1},
                "group_filter": {"name": "m:f"},
                "loss": {"name": "ppo", "old_policy": "learner"},
                "correction": {"truncation": {"level": "geometric"}},
                "distillation": {
                    "teacher": {"url": "http://127.0.0.1:8000/v1"},
                    "reward_weight": 1.0,
                },
            },
            "rollout": {**SMALL["rollout"], "repetition_stop": {"times": 20}},
            "reward": {
                **SMALL["reward"],
                "overlong": {"buffer": 4},
                "sandbox": {"level": "landlock"},
            },
        }
    )
    assert short == long


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and any(key != "…" for key in value):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@pytest.mark.parametrize("old", other_names().moved)
def test_an_old_key_is_refused_with_a_line_of_settings_that_exist(old: str) -> None:
    first = old.partition(".")[0]
    assert not any(find(kind, old) for kind in KINDS), "an old key must not be a setting"
    for line in other_names().moved[old]:
        tree = yaml.safe_load(line)
        assert any(all(find(kind, name) for name in leaves(tree)) for kind in KINDS), line
    kind = OfflineConfig if first in ("sft", "dpo", "reward_model") else Config
    known = field_names(kind)
    shown = [line for line in other_names().moved[old] if line.partition(":")[0] in known]
    of_another = OF_ANOTHER if shown[0].startswith("objective: {name") else ""
    message = f"{old} has moved; write {', or '.join(shown)}{of_another}"
    assert shown and explain_unknown(old, known) == message

    changes: Any = 1
    for part in reversed(old.split(".")):
        changes = {part: changes}
    base: dict[str, Any] = OFFLINE if kind is OfflineConfig else SMALL
    tree = {**base, **{key: merged(base.get(key), one) for key, one in changes.items()}}
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(tree)
    assert message in explain(refused.value, kind)


def merged(under: object, over: object) -> object:
    both = isinstance(under, dict) and isinstance(over, dict)
    return {**under, **over} if both else over  # type: ignore[dict-item]


def test_an_old_key_of_the_other_kind_of_run_is_answered_for_this_one() -> None:
    old = "learner.value_learning_rate"
    for kind, section in ((Config, "algorithm: {advantage"), (OfflineConfig, "objective: {")):
        answer = explain_unknown(old, field_names(kind))
        assert answer.startswith(f"{old} has moved; write {section}") and ", or " not in answer
    assert "moved" not in explain_unknown("reward.retries", field_names(OfflineConfig))


def written(tmp_path: Path, tree: dict[str, Any]) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize(
    ("changes", "overrides", "expected"),
    [
        (
            {},
            ["--algorithm.loss", "vespo", "--algorithm.loss.k_positive", "3"],
            {"algorithm": {"loss": {"name": "vespo", "k_positive": 3.0}}},
        ),
        (
            {"algorithm": {"loss": "gspo"}},
            ["--algorithm.loss.eps_clip=0.1"],
            {"algorithm": {"loss": {"name": "gspo", "eps_clip": 0.1}}},
        ),
        (
            {"algorithm": {"loss": {"name": "vespo", "k_positive": 3.0}}},
            ["--algorithm.loss", "gspo"],
            {"algorithm": {"loss": "gspo"}},
        ),
        (
            {"algorithm": {"loss": {"dual_clip": 3.0}}},
            ["--algorithm.loss.dual_clip", "null"],
            {},
        ),
        (
            {},
            ["--algorithm.loss.k_positive", "3", "--algorithm.loss", "vespo"],
            {"algorithm": {"loss": {"name": "vespo", "k_positive": 3.0}}},
        ),
        (
            {"algorithm": {"loss": {"name": "vespo", "k_positive": 3.0}}},
            ["--algorithm.loss.name", "gspo"],
            {"algorithm": {"loss": "gspo"}},
        ),
        (
            {"learner": {"schedule": {"name": "linear", "warmup_steps": 5}}},
            ["--learner.schedule", "cosine"],
            {"learner": {"schedule": {"name": "cosine", "warmup_steps": 5}}},
        ),
        (
            {"algorithm": {"loss": {"name": "m:f", "arguments": {"x": 1}}}},
            ["--algorithm.loss", "m:g"],
            {"algorithm": {"loss": "m:g"}},
        ),
        (
            {
                "reward": {
                    **SMALL["reward"],
                    "sandbox": {"level": "container", "service": "http://127.0.0.1:1"},
                }
            },
            ["--reward.sandbox", "namespaces"],
            {
                "reward": {
                    **SMALL["reward"],
                    "sandbox": {"level": "namespaces", "service": "http://127.0.0.1:1"},
                }
            },
        ),
        (
            {"algorithm": {"advantage": "rloo", "reference": {"kl_loss_coef": 0.1}}},
            ["--algorithm.reference.kl_coef", "0.2"],
            {"algorithm": {"advantage": "rloo", "reference": {"kl_coef": 0.2}}},
        ),
        (
            {},
            ["--algorithm.loss", "my.losses:loss", "--algorithm.loss.arguments.scale", "2"],
            {"algorithm": {"loss": {"name": "my.losses:loss", "arguments": {"scale": 2}}}},
        ),
        (
            {},
            ["--algorithm.loss", "{name: cispo, eps_clip: 0.5}"],
            {"algorithm": {"loss": {"name": "cispo", "eps_clip": 0.5}}},
        ),
        (
            {"algorithm": {"loss": {"name": "ppo", "eps_clip": 0.3, "eps_clip_high": 0.5}}},
            ["--algorithm.loss", "cispo"],  # its eps_clip has another default
            {"algorithm": {"loss": {"name": "cispo", "eps_clip_high": 0.5}}},
        ),
        *(
            (
                {"algorithm": {"distillation": {"teacher": before}}},
                [f"--algorithm.distillation.teacher.{name}", value],
                {"algorithm": {"distillation": {"teacher": after}}},
            )
            for before, name, value, after in (
                ("/t", "num_cpus", "1", {"path": "/t", "num_cpus": 1}),
                (URL, "retries", "3", {"url": URL, "retries": 3}),
                ("/t", "url", URL, URL),
            )
        ),
        (
            {},
            ["--reward.policy", "retry"],
            {"reward": {**SMALL["reward"], "policy": {"name": "retry", "retries": 2}}},
        ),
        (
            {"reward": {**SMALL["reward"], "policy": "retry"}},
            ["--reward.policy.retries", "5"],
            {"reward": {**SMALL["reward"], "policy": {"name": "retry", "retries": 5}}},
        ),
        ({}, ["--generator.attach", "x"], {"generator": {"attach": "x"}}),
        ({"generator": {"attach": "x"}}, ["--generator.attach", "null"], {}),
        (
            {"generator": {"num_replicas": 2, "start_timeout_s": 9}},
            ["--generator.attach", "x"],
            {"generator": {"attach": "x", "start_timeout_s": 9}},
        ),
        (
            {**SESSIONS, "environment": {"function": "m:f", "url": True, "max_turns": 4}},
            ["--environment.command", "[play]"],
            {**SESSIONS, "environment": {"command": ["play"], "max_turns": 4}},
        ),
        (
            {"reward": {**SMALL["reward"], "sandbox": "landlock"}},
            ["--reward.sandbox.service", "http://127.0.0.1:8700"],
            {
                "reward": {
                    **SMALL["reward"],
                    "sandbox": {"level": "landlock", "service": "http://127.0.0.1:8700"},
                }
            },
        ),
        (
            {"algorithm": {"loss": "gspo", "filter_zero_variance": True}},
            ["--algorithm.preference", "{}"],
            {"algorithm": {"preference": {}, "filter_zero_variance": True}},
        ),
        (
            {"generator": {"num_replicas": 2}},
            ["--generator", "{attach: x}"],
            {"generator": {"attach": "x"}},
        ),
        (
            {},
            ["--algorithm.reference.kl_loss_coef", "0.1", "--algorithm.reference.estimator", "k1"],
            {"algorithm": {"reference": {"kl_loss_coef": 0.1, "estimator": "k1"}}},
        ),
        (
            {"algorithm": {"reference": {"kl_loss_coef": 0.1}}},
            ["--algorithm.reference", "null"],
            {},
        ),
        (
            {"algorithm": {"distillation": {"teacher": "http://127.0.0.1:8000/v1"}}},
            ["--algorithm.distillation.use", "ref_kl"],
            None,
        ),
        (
            {"rollout": {**SMALL["rollout"], "repetition_stop": 20}},
            ["--rollout.repetition_stop.ngram", "4"],
            {"rollout": {**SMALL["rollout"], "repetition_stop": {"times": 20, "ngram": 4}}},
        ),
        (
            {"reward": {**SMALL["reward"], "sandbox": "landlock"}},
            ["--reward.sandbox.wall_s", "5"],
            {"reward": {**SMALL["reward"], "sandbox": {"level": "landlock", "wall_s": 5.0}}},
        ),
        (
            {},
            ["--learner.optimizer.betas", "0.9,0.99"],
            {"learner": {"optimizer": {"name": "adamw", "betas": [0.9, 0.99]}}},
        ),
        (
            {"data": {**SMALL["data"], "max_length": 8}},
            ["--data.length_policy", "truncate", "--data.length_policy.side", "keep_end"],
            {
                "data": {
                    **SMALL["data"],
                    "max_length": 8,
                    "length_policy": {"name": "truncate", "side": "keep_end"},
                }
            },
        ),
    ],
)
def test_the_command_line_reaches_into_a_choice(
    tmp_path: Path,
    changes: dict[str, Any],
    overrides: list[str],
    expected: dict[str, Any] | None,
) -> None:
    path = written(tmp_path, {**SMALL, **changes})
    if expected is None:
        with pytest.raises(ConfigError, match=r"distillation\.use\.kl is missing; set it"):
            load_any(path, overrides)
        return
    assert load_any(path, overrides) == config(expected)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--algorithm.eps_clip", "0.1"],
            "algorithm.eps_clip has moved; write algorithm: {loss: {name: …, eps_clip: …}}",
        ),
        (
            ["--algorithm.loss", "gspo", "--algorithm.loss.dual_clip", "3"],
            "algorithm.loss.dual_clip has no effect with loss: gspo; leave it out, or use it with"
            " loss: ppo",
        ),
        (
            ["--algorithm.loss.dual_clp", "3"],
            "algorithm.loss.dual_clp is unknown; did you mean algorithm.loss.dual_clip?",
        ),
        (
            ["--algorithm.loss", "pop"],
            f"algorithm.loss = 'pop': use one of {LOSSES}, or your own function as"
            " package.module:function",
        ),
        (
            ["--algorithm.loss.eps_clip.low", "3"],
            "algorithm.loss.eps_clip.low is unknown: algorithm.loss.eps_clip is a single value;"
            " write --algorithm.loss.eps_clip VALUE",
        ),
        (["--algorithm.kl_coef", "0"], f"algorithm.kl_coef {LEAVE_OUT} 0"),
        (["--algorithm.dual_clip", "null"], f"algorithm.dual_clip {LEAVE_OUT} null"),
        (
            ["--algorithm.reference.kl_coef", "0"],
            "algorithm.reference.kl_coef = 0: input should be greater than 0, or leave"
            " algorithm.reference out",
        ),
        (
            ["--algorithm.ce", "0"],
            "algorithm.ce.coef = 0: input should be greater than 0, or leave algorithm.ce out",
        ),
        (
            ["--data.train", "[{path: a}, {path: b}]", "--data.train.0.path", "c"],
            "data.train is a list, and an option sets all of it; write --data.train '[…]'",
        ),
    ],
)
def test_overrides_of_a_choice_that_are_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        load_any(written(tmp_path, SMALL), overrides)


@pytest.mark.parametrize("old", sorted(other_names().off_at_zero))
def test_an_old_zero_that_meant_off_is_left_out(old: str) -> None:
    kind = OfflineConfig if old.startswith(("dpo", "reward_model")) else Config
    known = field_names(kind)
    assert explain_unknown(old, known, 0.0) == f"{old} {LEAVE_OUT} 0.0"
    assert f"{old} has moved; write " in explain_unknown(old, known, 1)


def test_an_old_zero_with_an_effect_is_written_in_its_new_place() -> None:
    assert "has moved; write " in explain_unknown("algorithm.eps_clip", field_names(Config), 0)


CORRECTED = [name for name in map(name_of, kinds_of(Loss)) if name not in ("", "reinforce")]


@pytest.mark.parametrize("before", CORRECTED)
@pytest.mark.parametrize("option", ["--algorithm.loss", "--algorithm.loss.name"])
def test_another_loss_over_a_whole_config_has_its_defaults(
    tmp_path: Path, before: str, option: str
) -> None:
    path = written(tmp_path, config({"algorithm": {"loss": before}}).dump())
    for after in CORRECTED:
        expected = config({"algorithm": {"loss": after}}).algorithm
        assert load_config(path, [option, after]).algorithm == expected


@pytest.mark.parametrize("option", ["--algorithm.preference={}", "--algorithm.preference.loss=ipo"])
def test_another_section_over_a_whole_config_has_its_defaults(tmp_path: Path, option: str) -> None:
    name, _, value = option.removeprefix("--algorithm.preference").rpartition("=")
    section = {"loss": value} if name else {}
    expected = config({"algorithm": {"preference": section}}).algorithm
    path = written(tmp_path, config({}).dump())
    assert load_config(path, [option]).algorithm == expected


WHOLE = [
    {"algorithm": {"preference": {"loss": "ipo", "pairs": "margin"}}},
    {
        "algorithm": {
            "advantage": {"name": "grpo", "turns": {"coef": 1}},
            "loss": {"name": "ppo", "old_policy": "learner", "dual_clip": None},
            "correction": {
                "truncation": "token",
                "band": {"above": 4},
                "rejection": {"above": 1},
                "sequence_mask": None,
            },
            "reference": {"kl_loss_coef": 0.1, "ref_load": "/ref", "update_interval": 4},
        },
        "environment": {"agent": "m:f", "arguments": {"a": 1}},
        "data": {"train": "t", "max_prompt_length": 8, "max_length": 64},
    },
    {"algorithm": {"advantage": "my.module:advantage", "loss": "my.module:loss"}},
    {"algorithm": {"distillation": {"teacher": "/t", "use": {"name": "top_k", "top_k": 4}}}},
    {
        "algorithm": {
            "distillation": {
                "teacher": {"url": "https://a/v1", "key_env": "KEY"},
                "use": {"name": "ref_kl", "kl": {"kl_loss_coef": 0.1}},
            }
        }
    },
    {"generator": {"attach": "standing", "start_timeout_s": 9}},
    {"staleness": {"on_stale": {"name": "drop", "over_sampling": 3}}},
    {
        "warm_start": {"data": "w", "packing_strategy": "bfd_split"},
        "eval": {"data": "e", "sets": {"long": {"n": 4}}},
        "learner": {"optimizer": "sgd", "schedule": {"name": "cosine", "warmup_steps": 3}},
    },
    {
        "reward": {
            **SMALL["reward"],
            "policy": "drop_group",
            "overlong": 4,
            "sandbox": {"service": "http://127.0.0.1:8700", "level": "container"},
        }
    },
]


@pytest.mark.parametrize("changes", WHOLE)
def test_a_dumped_config_is_read_as_the_same_config(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole = config(changes)
    tree = whole.dump()
    assert Config.model_validate(tree) == whole
    assert load_any(written(tmp_path, tree)) == whole
    assert Config.model_validate(whole) == whole


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge", "simpo", "kto"])
def test_a_dumped_config_on_a_dataset_is_read_as_the_same_config(tmp_path: Path, loss: str) -> None:
    policy = {"name": "truncate", "side": "keep_end"}
    data = {"train": [{"path": "t"}], "length_policy": policy}
    whole = OfflineConfig.model_validate(
        {**OFFLINE, "data": data, "objective": {"name": "dpo", "loss": loss}}
    )
    assert load_any(written(tmp_path, whole.dump())) == whole


def test_reading_settings_imports_neither_torch_nor_ray() -> None:
    """Every command starts with it."""
    program = (
        "import sys, asyncrl.config, asyncrl.config.help_text, asyncrl.config.aliases\n"
        "asyncrl.config.aliases.other_names()\n"
        "heavy = ('torch', 'ray', 'vllm', 'deepspeed', 'transformers')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("old", "alternative"),
    [("algorithm.eps_clip", "…"), ("learner.warmup_steps", "…"), ("algorithm.dual_clip", "ppo")],
)
def test_a_way_names_an_alternative_only_where_no_other_has_the_setting(
    old: str, alternative: str
) -> None:
    (way,) = other_names().moved[old]
    assert f"{{name: {alternative}, " in way


def test_of_many_settings_that_have_moved_the_first_are_named(tmp_path: Path) -> None:
    old = {"eps_clip": 0.2, "dual_clip": None, "gamma": 1.0, "turn_coef": 0.0, "pass_k": 4}
    tree = {**SMALL, "algorithm": {**old, "kl_coef": 0.0, "ce_coef": 0.0}}
    with pytest.raises(ConfigError) as refused:
        load_any(written(tmp_path, tree))
    text = str(refused.value)
    assert text.count(" has moved; ") == 5
    assert "2 more settings have moved, so an earlier asyncrl wrote them" in text


def test_an_old_mapping_with_keys_of_the_users_own_is_answered(tmp_path: Path) -> None:
    tree = {**SMALL, "agent": {"command": ["x"], "variables": {"A": "1"}}}
    with pytest.raises(ConfigError, match=r"agent\.variables has moved; write environment"):
        load_any(written(tmp_path, tree))


def test_a_correction_that_counts_twice_names_the_setting_of_the_loss(tmp_path: Path) -> None:
    tree = {**SMALL, "algorithm": {"correction": {"truncation": "token"}}}
    with pytest.raises(ConfigError, match=r"write loss: \{name: ppo, old_policy: learner\}"):
        load_any(written(tmp_path, tree))


@pytest.mark.parametrize("name", ["lo\nss", "loss.k\n"])
def test_a_key_with_a_new_line_is_one_line(tmp_path: Path, name: str) -> None:
    for ask in (
        lambda: load_any(written(tmp_path, {**SMALL, "algorithm": {name: 1}})),
        lambda: load_any(written(tmp_path, SMALL), [f"--algorithm.{name}", "1"]),
    ):
        with pytest.raises(ConfigError) as refused:
            ask()
        assert len(str(refused.value).splitlines()) == 1


def test_an_argument_of_an_own_function_is_told_its_place(tmp_path: Path) -> None:
    tree = {**SMALL, "algorithm": {"loss": {"name": "m:f", "x": 1}}}
    with pytest.raises(ConfigError, match=r"goes below algorithm\.loss\.arguments"):
        load_any(written(tmp_path, tree))
