"""Try the built-in code reward on the data before a run: read the tests of many rows, and grade a
right, a wrong and an empty program where a row has a solution."""

from __future__ import annotations

import ast
import asyncio
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config import Config, ConfigError
from asyncrl.contracts.rows import Prompt
from asyncrl.data.prompts import first_prompts
from asyncrl.preflight.specs import data_spec
from asyncrl.rewards.code import (
    Verdict,
    configured_sandbox,
    grade,
    refuse_missing_packages,
    share_settings,
    with_heads,
)
from asyncrl.rewards.code_blocks import code_block
from asyncrl.rewards.code_forms import Cases, Source, heads_of, json_value, read_tests
from asyncrl.sandbox import SandboxError

ROWS = 1000
"""Rows whose tests are read."""
TRIED = 3
"""Rows whose programs run."""
SOLUTIONS = (
    "canonical_solution",
    "reference_solution",
    "solution",
    "solutions",
    "gold_solution",
    "code",
)
"""Columns in which public data sets keep a right program."""
WRONG = "a wrong answer of asyncrl plan"


@dataclass(frozen=True, slots=True)
class _Row:
    number: int
    columns: Mapping[str, object]
    tests: Cases | Source
    solution: str | None


def try_code(config: Config) -> str | None:
    """A section of the plan; None if no reward is `code_tests`.

    Raises:
        ConfigError: the tests of a row are not run, an empty program passes, every wrong program
            passes, or no right program passes.
    """
    found = [reward for reward in config.reward.functions.values() if reward.runs_code]
    if not found:
        return None
    share_settings(config.reward.sandbox)
    prompts = first_prompts(data_spec(config), ROWS)
    try:
        rows = [_read(prompt, found[0].arguments) for prompt in prompts]
        return asyncio.run(_trial(rows))
    except (ValueError, SandboxError) as error:
        raise ConfigError(f"code_tests on data.train: {error}") from None


def _read(prompt: Prompt, arguments: Mapping[str, object]) -> _Row:
    columns = {**prompt.columns, "prompts": prompt.text, **arguments}
    if "tests" not in columns:
        raise ValueError(
            f"there is no column tests; the columns are {', '.join(sorted(prompt.columns))}. Rename"
            " the one with the tests"
        )
    try:
        return _Row(
            prompt.ordinal, columns, read_tests(columns["tests"], columns), _solution(columns)
        )
    except ValueError as error:
        raise ValueError(f"row {prompt.ordinal}: {error}") from None


def _solution(columns: Mapping[str, object]) -> str | None:
    """The right program of a row, without its fence; None if the row has none."""
    for name in SOLUTIONS:
        value = json_value(columns.get(name))
        if isinstance(value, Mapping):
            value = value.get("solution", value.get("code"))
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = next(iter(value), None)
        if isinstance(value, str) and value.strip():
            return code_block(value) or value
    return None


async def _trial(rows: Sequence[_Row]) -> str:
    sandbox, limits = configured_sandbox()
    refuse_missing_packages(sandbox, [row.tests for row in rows])
    title = f"# code_tests\n  tests of the first {len(rows)} rows: all can be run"

    async def graded(row: _Row, program: str) -> Verdict:
        heads = heads_of(row.columns)
        return await grade(sandbox, limits, program, row.tests, heads)

    for row in rows[:TRIED]:
        if (await graded(row, "")).passed:
            raise ValueError(
                f"row {row.number}: an empty program passes the tests"
                f" {str(row.columns['tests'])[:80]!r}; they assert nothing about the program"
            )
    solved = [row for row in rows if row.solution][:TRIED]
    if not solved:
        return (
            f"{title}\n  no right program could be tried: no row has a column of {SOLUTIONS};"
            " an empty program gets 0.0"
        )
    right = [await graded(row, row.solution or "") for row in solved]
    if not any(verdict.passed for verdict in right):
        reason = "".join(filter(str.isprintable, right[0].reason))[:300]
        raise ValueError(
            f"the solution of row {solved[0].number} gets 0.0 ({reason}), as do the others tried;"
            " correct the tests, or reward.sandbox"
        )
    wrong = [await graded(row, _wrong(row)) for row in solved]
    if all(verdict.passed for verdict in wrong):
        raise ValueError(
            f"row {solved[0].number}: a program that returns and prints {WRONG!r} passes the tests,"
            " as it does for the others tried; they assert nothing about its answers"
        )
    return (
        f"{title}\n  rewards of programs for {len(solved)} rows: right"
        f" {_scores(right)}, wrong {_scores(wrong)}, empty 0.0"
    )


def _scores(verdicts: Sequence[Verdict]) -> str:
    return " ".join(f"{float(verdict.passed)}" for verdict in verdicts)


def _wrong(row: _Row) -> str:
    """The solution with another text for all that it returns and prints."""
    entry = row.tests.entry_point if isinstance(row.tests, Source) else row.tests.function
    program, _ = with_heads(row.solution or "", entry, heads_of(row.columns))
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = _Wrong().visit(ast.parse(program))
    except SyntaxError:
        return ""  # the solution is not Python: it fails, too
    return ast.unparse(ast.fix_missing_locations(tree))


class _Wrong(ast.NodeTransformer):
    def visit_Return(self, node: ast.Return) -> ast.Return:
        return ast.Return(ast.Constant(WRONG))

    def visit_Call(self, node: ast.Call) -> ast.Call:
        if ast.unparse(node.func) in ("print", "sys.stdout.write"):
            return ast.Call(node.func, [ast.Constant(WRONG)], [])
        self.generic_visit(node)
        return node
