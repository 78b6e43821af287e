"""What `--help` of the commands on a config shows."""

import re

import pytest

from asyncrl import cli, commands
from asyncrl.config import Config, OfflineConfig
from asyncrl.config.fields import by_name, field_names, find, section_of
from asyncrl.config.help_text import sections_help, settings_help
from asyncrl.contracts.errors import ConfigError
from asyncrl.contracts.section import kinds_of


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", sorted(cli.ON_A_CONFIG))
def test_each_command_shows_its_own_help_and_the_sections(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(capsys, command, "--help")
    assert text.startswith(f"usage: asyncrl {command} ")
    assert " ".join(cli.ON_A_CONFIG[command].split()) in " ".join(text.split())
    assert ("--brief" in text) == (command == "plan")
    kind = OfflineConfig if command in commands.OFFLINE else Config
    sections = {name for name, field in kind.model_fields.items() if kinds_of(field.annotation)}
    assert set(re.findall(r"^  ([a-z_]+) {2,}", text, re.MULTILINE)) == sections
    assert len(text.splitlines()) < 80 and max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("kind", [Config, OfflineConfig])
def test_all_shows_every_setting(kind):
    """A section is shown by its settings. The name of an alternative is the value of its choice."""
    text = settings_help((kind,), "all", 80)
    options = set(re.findall(r"^  --(\S+)", text, re.MULTILINE))
    sections = {
        name
        for name in field_names(kind)
        if (field := find(kind, name)) and section_of(field.annotation)
    }
    names = {
        f"{choice}.name"
        for choice in options
        if (field := find(kind, choice)) and by_name(kinds_of(field.annotation))
    }
    assert options | sections | names == set(field_names(kind)) and not options & names
    both = {"algorithm.reference"} if kind is Config else set()
    assert options & sections == both, "a choice in one alternative, and a section in the other"


def test_a_setting_with_another_default_in_one_alternative_is_shown_for_each():
    text = settings_help((Config,), "algorithm.loss.eps_clip", 200)
    assert [line for line in text.splitlines() if line.startswith("  --")] == [
        "  --algorithm.loss.eps_clip NUMBER   (default: 0.2, with loss: ppo, clip_cov, gspo or"
        " gmpo)",
        "  --algorithm.loss.eps_clip NUMBER   (default: 1.0, with loss: cispo)",
    ]
    old = settings_help((Config,), "algorithm.loss.old_policy", 200)
    assert "{behavior,learner,log_linear}   (default: behavior, with loss: ppo or clip_cov)" in old
    assert "{behavior,log_linear}   (default: behavior, with loss: kl_cov, gspo, gmpo, cis" in old
    text = settings_help((Config,), "algorithm.preference.loss.label_smoothing", 200)
    assert "(default: 0.0, with loss: sigmoid)" in text


def test_settings_of_an_alternative_say_which(capsys):
    lines = shown(capsys, "train", "--help=generator").splitlines()
    assert "  --generator.attach TEXT   (required, with attach)" in lines
    assert "  --generator.num_replicas INTEGER   (default: 1, without attach)" in lines
    assert "  --generator.start_timeout_s NUMBER" in lines, "both have it"
    lines = shown(capsys, "train", "--help=environment").splitlines()
    assert "  --environment.max_turns INTEGER   (default: 16)" in lines, "all have it"


@pytest.mark.parametrize(
    ("command", "asked", "first"),
    [
        ("train", "algorithm.correction", "  --algorithm.correction."),
        ("plan", "objective.center_coef", "  --objective.center_coef NUMBER"),
        ("sft", "data", "  --data.train "),
        ("train", "--learner.bf16", "  --learner.bf16 {true,false}"),
        ("train", "max_steps", "  --max_steps INTEGER   (required)"),
        ("train", "reward.functions", "  --reward.functions YAML"),
        ("train", "generator", "  --generator YAML"),
        ("train", "algorithm.loss", "  --algorithm.loss"),
    ],
)
def test_a_section_or_a_setting_is_shown_alone(command, asked, first, capsys):
    lines = shown(capsys, command, f"--help={asked}").splitlines()
    assert lines[0].startswith(first)
    prefix = f"--{asked.removeprefix('--')}"
    assert all(line.split()[0].startswith(prefix) for line in lines if line.startswith("  --"))


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("learnr", "did you mean learner?"),
        ("learning_rate", "did you mean learner.learning_rate?"),
        ("quux", "use one of algorithm, algorithm.advantage, algorithm.advantage.turns, "),
    ],
)
def test_an_unknown_name_is_refused_with_a_near_one(asked, hint, capsys):
    with pytest.raises(ConfigError, match=f"--help {asked}: no setting .*{re.escape(hint)}"):
        settings_help((Config,), asked, 80)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "--help", asked])
    assert hint in capsys.readouterr().err


def test_a_choice_is_summarized_by_the_keys_of_its_alternatives_first():
    assert "  environment   function, agent, command, max_turns," in sections_help(Config, 80)
    assert "  generator     attach, start_timeout_s, num_replicas," in sections_help(Config, 80)


def test_a_narrow_terminal_keeps_the_names():
    assert "  checkpoint    every_steps, keep" in sections_help(Config, 20)
