"""What `--help` of the commands on a config shows."""

import re

import pytest

from asyncrl import cli
from asyncrl.config import Config, OfflineConfig
from asyncrl.config.help_text import sections_help, settings_help
from asyncrl.config.load import field_names, section_of
from asyncrl.contracts.errors import ConfigError


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
    kind = OfflineConfig if command in cli.OFFLINE else Config
    sections = {name for name, field in kind.model_fields.items() if section_of(field.annotation)}
    assert set(re.findall(r"^  ([a-z_]+) {2,}", text, re.MULTILINE)) == sections
    assert len(text.splitlines()) < 80 and max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("kind", [Config, OfflineConfig])
def test_all_shows_every_setting_once(kind):
    options = re.findall(r"^  --(\S+)", settings_help((kind,), "all", 80), re.MULTILINE)
    sections = {name.rpartition(".")[0] for name in field_names(kind) if "." in name}
    assert sorted(options) == sorted(set(field_names(kind)) - sections)


@pytest.mark.parametrize(
    ("command", "asked", "first"),
    [
        ("train", "algorithm.correction", "  --algorithm.correction."),
        ("plan", "dpo", "  --dpo.loss {sigmoid,ipo,hinge,simpo,kto}   (default: sigmoid)"),
        ("sft", "data", "  --data.train "),
        ("train", "--learner.bf16", "  --learner.bf16 {true,false}"),
        ("train", "max_steps", "  --max_steps INTEGER   (required)"),
        ("train", "reward.functions", "  --reward.functions JSON"),
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
        ("quux", "use one of agent, algorithm, algorithm.correction, "),
    ],
)
def test_an_unknown_name_is_refused_with_a_near_one(asked, hint, capsys):
    with pytest.raises(ConfigError, match=f"--help {asked}: no setting .*{re.escape(hint)}"):
        settings_help((Config,), asked, 80)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "--help", asked])
    assert hint in capsys.readouterr().err


def test_a_narrow_terminal_keeps_the_names():
    assert "  checkpoint    every_steps, keep" in sections_help(Config, 20)
