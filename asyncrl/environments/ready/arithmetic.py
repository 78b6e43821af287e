"""An environment whose model has a calculator."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.environments.ready.graded import Grade, first_messages, graded
from asyncrl.environments.tools import run_tools
from asyncrl.text.chat_messages import Schema

MOST_CHARACTERS = 400
"""Characters of an expression."""
MOST_BITS = 4096
"""Bits of a whole number in any step: about 1,200 digits."""
CALCULATE: Schema = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Calculate an arithmetic expression with numbers, + - * / // % ** and ().",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": 'Such as "(3 + 4) * 2.5".'}
            },
            "required": ["expression"],
        },
    },
}
Number = int | float


class CalculationError(ValueError):
    """An expression cannot be calculated. The message is one line and says why."""


async def calculator(
    task: Mapping[str, Any],
    model: Any,
    grade: Grade = "math",
    system: str | None = None,
    most_turns: int = 8,
) -> dict[str, float]:
    """A task whose model may call `calculate(expression)`. An answer without a call is the final
    one. The reward is 1.0 if it agrees with the column `answer`, else 0.0.

    Args:
        grade: how it is compared: "math", "exact" or "none".
        system: text of a system message.
        most_turns: turns after which there is no answer, so the reward is 0.0.
    """
    done = await run_tools(
        model, first_messages(task, system), {"calculate": (CALCULATE, _calculated)}, most_turns
    )
    return done.parts() | await graded(task, done.answer, grade, not done.cut)


async def _calculated(expression: str) -> str:
    return calculate(expression)


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, as text. Nothing is evaluated as Python code, and size
    and time are bounded.

    Raises:
        CalculationError: it is no such expression, is too long, or has no finite value.
    """
    if not isinstance(expression, str):
        raise CalculationError(f"the expression is a {type(expression).__name__}, not a text")
    if len(expression) > MOST_CHARACTERS:
        raise CalculationError(f"the expression has more than {MOST_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError):
        raise CalculationError("this is no arithmetic expression") from None
    except ZeroDivisionError:
        raise CalculationError("a division by zero") from None
    except OverflowError:
        raise CalculationError("a number is too large") from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as value):
            return _checked(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return _checked(OPERATIONS[type(op)](_value(left), _value(right)))
        case ast.BinOp(op=ast.BitXor()):
            raise CalculationError("^ is no operation; write ** for powers")
    raise CalculationError("use only numbers, + - * / // % ** and ()")


def _power(base: Number, exponent: Number) -> Number:
    """Raises CalculationError before a power that would be too large is calculated."""
    if base < 0 and not float(exponent).is_integer():
        raise CalculationError("a root of a negative number")
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        bits = base.bit_length() * exponent
        if bits > MOST_BITS:
            raise CalculationError("a number is too large")
    power: Number = base**exponent
    return power


def _checked(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise CalculationError("a number is too large")
    if isinstance(value, float) and not math.isfinite(value):
        raise CalculationError("the value is not a finite number")
    return value


OPERATIONS: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
