"""Tasks of reasoning-gym whose scorers run the model's text as code. They are refused."""

from __future__ import annotations

EVALUATED = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Tasks whose scorers evaluate the answer as Python code, also through sympy. A model could run
anything with them."""


def why_not_scored(task: str, fix: str) -> str | None:
    """One line that names the task and how to go on. None: the task's scorer evaluates nothing.

    Args:
        fix: what to do, besides another task.
    """
    if task not in EVALUATED:
        return None
    return (
        f"reasoning-gym's scorer of {task!r} evaluates the model's answer as Python code; choose"
        f" another task, or {fix}"
    )
