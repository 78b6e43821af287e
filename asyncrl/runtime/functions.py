"""Functions of the user's own, named as `package.module:function`: found, called with what their
parameters name, and named in errors with file and line."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = [
    "FUNCTION",
    "FunctionError",
    "call_function",
    "chosen_arguments",
    "import_function",
    "place_of",
    "refuse_main",
    "short",
    "text_of",
    "where",
]

FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""What the name of a function looks like."""
MOST_CHARACTERS = 500
"""Of what a function raised, in a message."""


class FunctionError(ValueError):
    """A function of the user's own cannot be imported, raised, or broke its contract. The message
    names it, its file and its line."""


def import_function(kind: str, function: str) -> Callable[..., Any]:
    """The function that `package.module:function` names; `kind` is what the message calls it.

    Raises:
        FunctionError: it cannot be imported, or is not callable.
    """
    module, _, name = function.partition(":")
    refuse_main(kind, function)
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise FunctionError(
            f"{kind} {function!r} cannot be imported ({error}{_place_in_module(error)}); check its"
            " name and that its package is installed"
        ) from None
    except Exception as error:
        # Whatever a module raises while it is imported is reported under the function's name.
        said = f"{type(error).__name__}: {text_of(str, error)}{_place_in_module(error)}"
        raise FunctionError(
            f"{kind} {function!r} cannot be imported ({said}); repair its module"
        ) from None
    if not callable(found):
        raise FunctionError(f"{kind} {function!r} is a {type(found).__name__}; name a function")
    return found  # type: ignore[no-any-return]


def _place_in_module(error: BaseException) -> str:
    """Where in a module's own code its import failed; nothing where that did not begin, as for a
    syntax error."""
    ours = (__file__, importlib.__file__)
    return place_of(
        [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename not in ours and not frame.filename.startswith("<frozen ")
        ]
    )


def refuse_main(kind: str, function: str) -> None:
    """Raise FunctionError for a function of the script or notebook that runs: in every other
    process `__main__` is something else."""
    if function.startswith("__main__:"):
        raise FunctionError(
            f"{kind} {function!r} is in a script or notebook, which other processes do not"
            " have; put it into a module of its own"
        )


def chosen_arguments(
    function: Callable[..., Any], told: Mapping[str, Any], sources: str
) -> dict[str, Any]:
    """As much of `told` as the function's parameters take.

    Raises:
        TypeError: it needs something that is not there. `sources` says what nothing of it is.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C: nobody knows
        return dict(told)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(told)
    named = {parameter.name for parameter in parameters}
    needed = {
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
    }
    if missing := sorted(needed - told.keys()):
        there = ", ".join(sorted(told)) or "nothing"
        raise TypeError(f"it takes {', '.join(missing)}, which {sources}; there are {there}")
    return {name: value for name, value in told.items() if name in named}


def call_function(field: str, function: str, told: Mapping[str, Any]) -> tuple[Any, str]:
    """What the function that the setting `field` names gives for these arguments, as far as it
    takes them; and how an error calls it.

    Raises:
        FunctionError: it cannot be imported, or raised.
    """
    found = import_function(f"{field} =", function)
    name = f"{field} = {function!r} ({where(found)})"
    try:
        return found(**chosen_arguments(found, told, "it is not told")), name
    except Exception as error:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename != __file__
        ]
        raise FunctionError(
            f"{name} raised {type(error).__name__}: {text_of(str, error)}{place_of(frames)};"
            " repair it"
        ) from error


def where(function: Callable[..., Any]) -> str:
    """FILE:LINE of its definition."""
    try:
        code = inspect.unwrap(function).__code__
        return f"{code.co_filename}:{code.co_firstlineno}"
    except AttributeError:  # an object with __call__, or written in C
        return str(getattr(function, "__module__", None) or type(function).__module__)


def place_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """Where the innermost of these frames is; nothing without any."""
    return f" at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def short(text: str, most: int = MOST_CHARACTERS) -> str:
    """What fits a message and a column of text: no half characters, and not a megabyte."""
    text = text if len(text) <= most else f"{text[:most]}…"
    return text.encode("utf-8", "backslashreplace").decode()


def text_of(of: Callable[[Any], str], value: Any) -> str:
    """`str` or `repr` of what a function gave or raised, whose own code may raise."""
    try:
        return short(of(value))
    except Exception as error:
        return f"(a {type(value).__name__} whose text cannot be had: {type(error).__name__})"
