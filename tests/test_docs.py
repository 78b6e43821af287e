"""Every repository file that the docs name exists."""

import re
from pathlib import Path
from typing import get_args

import pytest

from asyncrl.algorithms.advantages import Advantage
from asyncrl.algorithms.corrections import Truncation
from asyncrl.algorithms.losses import Loss
from asyncrl.contracts.section import kinds_of, name_of

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(path for path in sorted(ROOT.glob("*.md")) if path.name != "CHANGELOG.md"),
]
"""All pages except the changelog, which names files of the past."""
NAMED = re.compile(
    r"(?<![\w/.])((?:asyncrl|tests|jobs|benchmarks|docs|serve_configs|notebooks)/"
    r"[\w/.-]+\.(?:py|md|yaml|ipynb))"
)
BARE = re.compile(r"(?<![\w/.])test_\w+\.py")
"""A test file without its folder."""
TEST_FILES = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
TEST = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = set(NAMED.findall(page.read_text()))
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert not missing
    unknown = sorted(set(BARE.findall(page.read_text())) - TEST_FILES)
    assert not unknown, "no folder under tests/ has these files"
    for path, test in TEST.findall(page.read_text()):
        assert f"def {test}" in (ROOT / path).read_text(), f"{path} has no {test}"


LEVELS = get_args(Truncation.model_fields["level"].annotation)
CHOICES = [*filter(None, map(name_of, [*kinds_of(Loss), *kinds_of(Advantage)]))]


@pytest.mark.parametrize("name", [*CHOICES, *LEVELS])
def test_the_page_of_formulas_has_a_row_for_each(name: str) -> None:
    page = (ROOT / "docs" / "reference" / "formulas.md").read_text()
    assert f"\n| `{name}` | " in page


def test_names_are_found() -> None:
    text = "`tests/no/such.py::test_it`, [x](docs/a.md#b) and runs/docs/a.md"
    assert NAMED.findall(text) == ["tests/no/such.py", "docs/a.md"]
    assert BARE.findall("`tests/no/test_a.py`, `test_b.py`, `my_test_c.py`") == ["test_b.py"]


def test_rewards_of_trl_and_verl_run_as_the_page_shows() -> None:
    """The functions of the page, with rewards as their systems have them."""
    page = (ROOT / "docs" / "how_to" / "coming_from.md").read_text()
    theirs = {
        "trl_reward": lambda completions, answer: [
            float(one[0]["content"] == right)
            for one, right in zip(completions, answer, strict=True)
        ],
        "compute_score": lambda source, text, truth, extra: (
            {"score": float(text == truth), "acc": 1} if extra["dict"] else float(text == truth)
        ),
    }
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, theirs)
    texts = ["4", "5"]
    assert theirs["wrapped"](completions=texts, answer=["4", "4"]) == [1.0, 0.0]
    columns = {
        "data_source": ["sums"] * 2,
        "reward_model": [{"style": "rule", "ground_truth": "4"}] * 2,
        "ability": ["math"] * 2,
    }
    for kind in (True, False):
        extra = [{"dict": kind}] * 2
        assert theirs["scored"](completions=texts, extra_info=extra, **columns) == [1.0, 0.0]
