"""Finds the column that a reward function looked up without success."""

from __future__ import annotations

import ast
import linecache
import traceback
from collections.abc import Collection, Iterator, Mapping
from types import TracebackType


def missing_column(
    error: BaseException, columns: Mapping[str, object], names: Collection[str]
) -> str | None:
    """The key that the error, or its cause, did not find among the function's arguments, in a dict
    with some of them, or in a dict that is a column's value; None if there is none.

    Args:
        columns: the columns of the group.
        names: all arguments that the function may get.
    """
    for one in _causes(error):
        if isinstance(one, KeyError) and one.args and isinstance(one.args[0], str):
            for found in _searched(one.__traceback__):
                of_column = any(found is value for value in columns.values())
                if one.args[0] not in found and (of_column or found.keys() & {*names}):
                    return one.args[0]
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _searched(trace: TracebackType | None) -> Iterator[dict[object, object]]:
    """The dicts that the failed expression names, as `row` in `row["x"]`, or `self.row`."""
    if trace is None:
        return
    while trace.tb_next is not None:
        trace = trace.tb_next
    (frame,) = traceback.extract_tb(trace)
    numbers = range(frame.lineno or 0, (frame.end_lineno or 0) + 1)
    lines = [linecache.getline(frame.filename, number).encode() for number in numbers] or [b""]
    lines[-1] = lines[-1][: frame.end_colno]
    lines[0] = lines[0][frame.colno :]
    try:
        expression: ast.AST = ast.parse(f"({b''.join(lines).decode()})", mode="eval").body
    except (SyntaxError, ValueError):
        return
    if isinstance(expression, ast.Subscript):
        expression = expression.value
    local = trace.tb_frame.f_locals
    for node in ast.walk(expression):
        found: object = local.get(node.id) if isinstance(node, ast.Name) else None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found = getattr(local.get(node.value.id), "__dict__", {}).get(node.attr)
        if isinstance(found, dict):
            yield found
