"""The user's functions, named as `package.module:function`. They are imported, called with the
arguments that their parameters name, and reported in errors with file and line."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

from asyncrl.runtime.imports import current_folder, import_path

FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""Pattern of a function's name."""
NEAR, LONG = 0.75, 4
"""Likeness of a name to one that is meant, and characters of a name that may be a part of it."""
MOST_CHARACTERS = 500
"""Characters of an exception's text that a message quotes, at most."""


class FunctionError(ValueError):
    """A user's function cannot be imported, raised an exception, or broke its contract. The message
    names the function, its file and its line."""


def import_function(kind: str, function: str) -> Callable[..., object]:
    """Import the function `package.module:function`. Messages call it `kind`.

    Raises:
        FunctionError: the function cannot be imported, or is not callable.
    """
    module, _, name = function.partition(":")
    refuse_main(kind, function)
    sys.path[:] = import_path()  # Ray's workers do not have the user's folder
    try:
        loaded = importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        missing = isinstance(error, ModuleNotFoundError) and module.startswith(str(error.name))
        raise FunctionError(
            f"{kind} {function!r} cannot be imported ({error}{_location_in_module(error)});"
            f" {_hidden(module) or 'check its name and that its package is installed'}"
            f"{near_module(str(error.name)) if missing else ''}"
        ) from None
    except Exception as error:
        # A module may raise anything while it is imported.
        text = " ".join(text_of(str, error).split())
        cause = f"{type(error).__name__}: {text}{_location_in_module(error)}"
        raise FunctionError(
            f"{kind} {function!r} cannot be imported ({cause}); repair its module"
        ) from None
    try:
        found: object = getattr(loaded, name)
    except AttributeError as error:
        names = [one for one in getattr(loaded, "__all__", dir(loaded)) if one[:1] != "_"]
        raise FunctionError(
            f"{kind} {function!r} cannot be imported ({error});"
            f" {_hidden(module) or f'check its name{did_you_mean(name, names)}'}"
        ) from None
    if not callable(found):
        raise FunctionError(
            f"{kind} {function!r} is of type {type(found).__name__}; name a function"
        )
    return found


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is not known: the most similar known name. Empty
    if no known name is similar."""
    names = [*known]
    near = difflib.get_close_matches(name, names, 1, NEAR)
    near = near or [one for one in names if len(name) >= LONG and name.lower() in one.lower()]
    return f"; did you mean {near[0]!r}?" if near else ""


def near_module(module: str) -> str:
    """The end of a message about a module that does not exist: the most similar module of its
    package, or of the folder in which the command started."""
    package, _, last = module.rpartition(".")
    try:
        folders = importlib.import_module(package).__path__ if package else ["."]
        names = [f"{package}.{one.name}".lstrip(".") for one in pkgutil.iter_modules(folders)]
    except Exception:  # the package may raise anything, and the message is about its module
        return ""
    return did_you_mean(f"{package}.{last}".lstrip("."), names)


def _hidden(module: str) -> str:
    """The way out if a library's module hides the one in the user's folder. "" if no module hides
    it."""
    name, folder = module.partition(".")[0], current_folder()
    if folder is None or name not in sys.modules:
        return ""
    own = [path for path in (Path(folder, f"{name}.py"), Path(folder, name)) if path.exists()]
    found = getattr(sys.modules[name], "__file__", None) or "part of Python"
    if not own or Path(found).is_relative_to(own[0]):
        return ""
    return f"{own[0]} is not used, because module {name!r} is {found}; rename yours"


def is_async(function: object) -> TypeGuard[Callable[..., Awaitable[object]]]:
    """Whether a function, or the `__call__` of an object, is defined with `async`."""
    method = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def _location_in_module(error: BaseException) -> str:
    """The line of the module where its import failed; "" if no code ran, as after a syntax
    error."""
    ours = (__file__, importlib.__file__)
    return location_of(
        [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename not in ours and not frame.filename.startswith("<frozen ")
        ]
    )


def refuse_main(kind: str, function: str) -> None:
    """Raise FunctionError for a function of the running script or notebook. Other processes have
    another `__main__`."""
    if function.startswith("__main__:"):
        raise FunctionError(
            f"{kind} {function!r} is in a script or notebook, which other processes cannot"
            " import; move it to a module"
        )


def chosen_arguments(
    function: Callable[..., object], available: Mapping[str, object], sources: str
) -> dict[str, object]:
    """The available arguments that the function's parameters name.

    Args:
        sources: end of the message about a missing argument, after "which".

    Raises:
        TypeError: a required argument is not available.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return dict(available)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(available)
    named = {parameter.name for parameter in parameters}
    needed = {
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
    }
    if missing := sorted(needed - available.keys()):
        names = ", ".join(sorted(available)) or "nothing"
        near = did_you_mean(missing[0], available)
        raise TypeError(f"it takes {', '.join(missing)}, which {sources}{near}; available: {names}")
    return {name: value for name, value in available.items() if name in named}


def parameter_names(function: Callable[..., object]) -> set[str]:
    """The names of a function's parameters; empty if it has no signature."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # written in C
        return set()


def call_function(
    field: str,
    function: str,
    available: Mapping[str, object],
    arguments: Mapping[str, object] = {},
) -> tuple[object, str]:
    """Call the function that the setting `field` names, with the available arguments that it takes.

    Args:
        arguments: those of the user. The function must take each of them.

    Returns:
        The result, and the function's name for error messages.

    Raises:
        FunctionError: the function cannot be imported, or raised an exception.
    """
    found = import_function(f"{field} =", function)
    name = f"{field} = {function!r} ({where(found)})"
    try:
        taken = chosen_arguments(found, {**available, **arguments}, "asyncrl does not provide")
        if unused := sorted(arguments.keys() - taken.keys()):
            near = did_you_mean(unused[0], parameter_names(found))
            raise TypeError(f"it takes no {', '.join(unused)} of its arguments{near}")
        if twice := sorted(arguments.keys() & available.keys()):
            raise TypeError(f"asyncrl provides {', '.join(twice)}, so its arguments cannot")
        return found(**taken), name
    except Exception as error:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename != __file__
        ]
        raise FunctionError(
            f"{name} raised {type(error).__name__}: {text_of(str, error)}{location_of(frames)};"
            " repair it"
        ) from error


def where(function: Callable[..., object]) -> str:
    """FILE:LINE of the function's definition, or its module."""
    try:
        code = inspect.unwrap(function).__code__
        return f"{code.co_filename}:{code.co_firstlineno}"
    except AttributeError:  # an object with __call__, or written in C
        return str(getattr(function, "__module__", None) or type(function).__module__)


def location_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """The location of the innermost frame that has a file; "" if there are no frames."""
    frames = [one for one in frames if not one.filename.startswith("<frozen ")] or frames
    return f" at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def one_line(text: str) -> str:
    """The text without control characters on one line, and `short`."""
    plain = "".join(one if one.isprintable() else " " for one in short(text))
    return " ".join(plain.split())


def short(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text, cut to `most` characters and valid as UTF-8."""
    text = text if len(text) <= most else f"{text[:most]}…"
    return text.encode("utf-8", "backslashreplace").decode()


def text_of(of: Callable[[object], str], value: object) -> str:
    """`str` or `repr` of a user's value or exception. Its own code may raise in turn."""
    try:
        return short(of(value))
    except Exception as error:
        return f"(a {type(value).__name__} without a text: {type(error).__name__})"
