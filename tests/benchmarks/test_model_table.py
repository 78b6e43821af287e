"""docs/reference/models.md agrees with the families, and the measurements of its table work."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from small_config import small_config

from asyncrl.generation.served import NOT_SERVED_ON_CPU
from asyncrl.models.supported import support
from asyncrl.preflight.resources.model_limits import refusal
from benchmarks.families import FAMILIES, family
from benchmarks.model_table import (
    BEGIN,
    END,
    ENGINES,
    PAGE,
    UNSERVED,
    Row,
    in_engines,
    learner_row,
    table,
)

MODES = {"rows": "packed", "none": "one at a time", None: "refused"}


def rows_of_the_page() -> dict[str, list[str]]:
    """Title of a family → its other cells."""
    made = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in made.splitlines()
        if line.startswith("|")
    ]
    return {title: rest for title, *rest in cells[2:]}


def test_the_page_has_every_family_as_the_code_trains_it() -> None:
    page = rows_of_the_page()
    assert set(page) == {made.title for made in FAMILIES.values()} and len(page) >= 35
    for made in FAMILIES.values():
        model_type, trained, *numbers = page[made.title]
        assert model_type == f"`{made.model_type}`"
        assert re.sub(r" \(\d+\)$", "", trained) == MODES[support(made.config().to_dict()).packing]
        assert all(numbers[:4]), f"{made.title} was not measured"


def test_the_page_has_the_families_that_went_through_vllm() -> None:
    page = rows_of_the_page()
    asked = {name: page[FAMILIES[name].title][-1] for name in ENGINES}
    assert all(re.fullmatch(r"[0-9.e-]+ nats", cell) for cell in asked.values()), asked
    assert (
        len(ENGINES) >= 8
        and {"qwen3_moe", "mixtral", "gpt_oss"} <= set(ENGINES)
        and not set(ENGINES) & set(UNSERVED)
    )
    known = {made.model_type for made in FAMILIES.values()}
    assert {FAMILIES[name].model_type for name in UNSERVED} >= set(NOT_SERVED_ON_CPU) & known


@pytest.mark.parametrize("name", [name for name in UNSERVED if name not in ("cohere2", "gemma3")])
def test_a_family_that_vllm_does_not_serve_is_refused_before_the_start(name: str) -> None:
    assert refusal(family(name).config().to_dict(), small_config())


def test_no_other_family_is_refused() -> None:
    assert not {
        name: reason
        for name in ENGINES
        if (reason := refusal(family(name).config().to_dict(), small_config()))
    }


def test_the_page_has_why_vllm_does_not_serve() -> None:
    page = rows_of_the_page()
    for name, reason in UNSERVED.items():
        assert page[FAMILIES[name].title][-1] == reason


def test_a_row_that_misses_its_bar_says_which() -> None:
    good = Row(
        "llama", "Llama", "packed", plain=1e-6, gradient=1e-6, train=0.0, names=3, engine=1e-6
    )
    assert good.missed() == ""
    assert (
        Row("llama", "Llama", "packed", plain=1e-3, train=0.1).missed()
        == "plain 1.0e-03, train 1.0e-01"
    )
    assert Row("llama", "Llama", "packed", plain=float("nan")).missed() == "plain nan"
    assert "| Llama | `llama` | packed | 1e-06 nats | 1e-06 | 0 nats | 3 | 1e-06 nats |" in table(
        [good]
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("mixtral", "lfm2") else pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_a_family_trains_and_publishes_what_transformers_has(name: str, tmp_path: Path) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    row = learner_row(family(name), family(name).save(tmp_path))
    assert row.missed() == "" and row.names and row.plain is not None


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_vllm_agrees_after_an_update_of_every_parameter(
    engine_starts: list[str], tmp_path: Path
) -> None:
    engine_starts.append("families")
    for name in ENGINES:
        family(name).save(tmp_path / name)
    rows = in_engines(
        [Row(name, family(name).title, "packed") for name in ENGINES], ENGINES, tmp_path
    )
    assert {row.name: row.missed() for row in rows} == dict.fromkeys(ENGINES, "")
    assert all(row.engine is not None for row in rows)
