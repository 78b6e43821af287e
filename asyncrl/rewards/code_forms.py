"""The tests of a code reward: the forms of public data sets, and what asserts nothing."""

from __future__ import annotations

import ast
import builtins
import json
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard


class TestsError(ValueError):
    """Tests that are not run, with the reason and the way out."""

    __test__ = False


@dataclass(frozen=True, slots=True)
class Cases:
    """Inputs with their expected outputs, compared outside the sandbox."""

    inputs: tuple[str, ...]
    """Standard input of each case; for a function, the JSON list of its arguments."""
    expected: tuple[object, ...]
    """Standard output of each case; for a function, its results."""
    function: str | None = None
    """The function, or the method of the class Solution, that each case calls."""


@dataclass(frozen=True, slots=True)
class Source:
    """Python source that asserts something about the program."""

    sources: tuple[str, ...]
    entry_point: str | None
    """What `check(candidate)` gets, and what the tests call by name: an expression."""
    calls_check: bool
    """Whether the tests define check(candidate) and leave its call to their runner."""
    needs_pytest: bool
    """Whether only pytest can run them: fixtures, marks, or an import of it."""
    imports: tuple[str, ...]
    """Packages that the tests import."""
    needs: tuple[str, ...]
    """Packages that the tests cannot do without: all imports except those in `try`."""


IN_WORDS = (
    "give Python source, a list of it, a list of {'input': text, 'output': text}, or"
    " {'inputs': […], 'outputs': […]} with or without fn_name"
)
PAIR_KEYS = {"input", "output"}
FUNCTION_KEYS = ("fn_name", "func_name", "function_name")
IGNORED_KEYS = {"id", "name", "explanation", "description", "type", "testtype"}
"""Keys of a case that do not change what it tests, or that say again which kind it is."""
CALLED = ("functional", "function_call", "call_based")
PRINTED = ("stdin", "stdin_stdout", "standard_input")
HEAD_COLUMNS = ("code_prompt", "starter_code")


def read_tests(tests: object, columns: Mapping[str, object] | None = None) -> Cases | Source:
    """Read the tests of one row.

    Args:
        columns: the row's other columns. `entry_point`, `fn_name`, `test_setup_code`,
            `test_imports` and `metadata` belong to the tests.

    Raises:
        TestsError: they have another form, or assert nothing.
    """
    row = columns or {}
    found = json_value(tests)
    if isinstance(found, Mapping):
        return _table(found, row)
    if isinstance(found, str):
        found = [found]
    if isinstance(found, Sequence) and found:
        if all(isinstance(test, str) for test in found):
            return _source([str(test) for test in found], row)
        if all(isinstance(test, Mapping) for test in found):
            return _cases(found, row)
    raise TestsError(f"column tests contains {str(tests)[:80]!r}; {IN_WORDS}")


def json_value(value: object) -> object:
    """Lists and objects of JSON text as values; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, list) or (isinstance(found, dict) and found) else value


# -- cases -----------------------------------------------------------------------------------------


def _table(found: Mapping[str, object], row: Mapping[str, object]) -> Cases:
    """`{"inputs": […], "outputs": […], "fn_name": …}`, as APPS, TACO and CodeContests have it."""
    given = {key: value for key, value in found.items() if value is not None}
    names = ("inputs", "outputs") if "inputs" in given else ("input", "output")
    inputs, outputs = (given.pop(name, None) for name in names)
    function = _function(given, row)
    if left := sorted({*given} - {*FUNCTION_KEYS} - IGNORED_KEYS):
        raise TestsError(f"column tests has the keys {left}, which have no effect; {IN_WORDS}")
    if not (_is_list(inputs) and _is_list(outputs) and len(inputs) == len(outputs) > 0):
        raise TestsError(
            f"column tests contains {str(dict(found))[:80]!r}: {names[0]} and {names[1]} are not"
            f" lists of the same length above 0; {IN_WORDS}"
        )
    if function is None:
        return Cases(tuple(map(_text, inputs)), tuple(map(_text, outputs)))
    return Cases(tuple(map(_arguments, inputs)), tuple(map(_results, outputs)), function)


def _cases(found: Sequence[Mapping[str, object]], row: Mapping[str, object]) -> Cases:
    """A list of `{"input": …, "output": …}`, of standard input and output or of one function."""
    pairs: list[tuple[object, object]] = []
    functions = set[str | None]()
    for number, case in enumerate(found):
        given = {key: value for key, value in case.items() if value is not None}
        kind = str(given.get("testtype", given.get("type", ""))).lower()
        if missing := sorted(PAIR_KEYS - {*given}):
            raise TestsError(
                f"column tests contains {str(found)[:80]!r}: case {number} has no {missing[0]};"
                f" {IN_WORDS}"
            )
        if left := sorted({*given} - PAIR_KEYS - {*FUNCTION_KEYS} - IGNORED_KEYS):
            raise TestsError(
                f"column tests has the keys {left} in case {number}, which have no effect;"
                f" {IN_WORDS}"
            )
        function = None if kind in PRINTED else _function(given, row)
        if kind in CALLED and function is None:
            raise TestsError(
                f"column tests has case {number} of type {kind!r} and no name of the function; add"
                " the column fn_name"
            )
        functions.add(function)
        pairs.append((given["input"], given["output"]))
    if len(functions) > 1:
        raise TestsError("column tests mixes cases that print with cases that call functions")
    function = functions.pop()
    if function is None:
        return Cases(tuple(_text(i) for i, _ in pairs), tuple(_text(o) for _, o in pairs))
    return Cases(
        tuple(_arguments(i) for i, _ in pairs), tuple((_value(o),) for _, o in pairs), function
    )


def _function(given: Mapping[str, object], row: Mapping[str, object]) -> str | None:
    """The function's name, in the tests, in a column, or in LiveCodeBench's column metadata."""
    metadata = json_value(row.get("metadata"))
    for table in (given, row, metadata if isinstance(metadata, Mapping) else {}):
        for key in FUNCTION_KEYS:
            name = table.get(key)
            if name is not None and name != "":
                if not isinstance(name, str) or not name.isidentifier():
                    raise TestsError(f"{key} = {name!r} is not the name of a function")
                return name
    return None


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _text(value: object) -> str:
    """Standard input or output: a text, or its lines."""
    lines = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not all(isinstance(line, str | int | float) for line in lines):
        raise TestsError(f"column tests contains {str(value)[:80]!r}, which is no text; {IN_WORDS}")
    return "\n".join(map(str, lines))


def _arguments(value: object) -> str:
    """The JSON list of a call's arguments: of a list, or of a text with one JSON value a line."""
    try:
        if isinstance(value, str):
            return json.dumps([json.loads(line) for line in value.split("\n") if line.strip()])
        if _is_list(value):
            return json.dumps(value)
    except (ValueError, TypeError):
        pass
    raise TestsError(
        f"column tests contains the arguments {str(value)[:80]!r}; give a list, or one JSON value a"
        " line"
    )


def _value(value: object) -> object:
    """A result: JSON text is read, as LiveCodeBench has it."""
    if not isinstance(value, str):
        return value
    try:
        found: object = json.loads(value)
    except ValueError:
        return value
    return found


def _results(value: object) -> tuple[object, ...]:
    """The results that APPS accepts: the output, or the only item of its list."""
    return (value, value[0]) if isinstance(value, list) and len(value) == 1 else (value,)


# -- source ----------------------------------------------------------------------------------------

ASSERTS = re.compile(r"assert|expect|raises|warns|fail|check|verify", re.IGNORECASE)
"""Names of functions that are taken to assert something, where the tests do not define them."""
RUNNERS = ("unittest.main", "pytest.main")
EXITS = ("sys.exit", "exit", "quit", "os._exit", "SystemExit")
PER_TEST = re.compile(r"(setup|teardown)_?(function|method|class|module)?$")
"""pytest's functions and methods that run before and after tests."""
SKIPS = re.compile(r"\b(skip|expectedFailure)\b")
"""Decorators of tests that say nothing about the program."""
CATCHES = re.compile(r"\b(AssertionError|Exception|BaseException)\b")
"""Exceptions under which a failed assertion is lost."""
LIBRARIES = {"hypothesis", "mock", "numpy", "pandas", "pytest", "scipy", "torch"}
"""Packages with which tests compare values. They do not reach the program."""


def _source(tests: Sequence[str], row: Mapping[str, object]) -> Source:
    entry = row.get("entry_point") or None
    if not isinstance(entry, str | None):
        raise TestsError(f"column entry_point contains {entry!r}; give an expression as text")
    before = [text for name in ("test_imports", "test_setup_code") for text in _texts(row, name)]
    sources = [_without_runner(text) for text in tests]
    trees = [_parsed(text) for text in (*before, *sources)]
    found = _Executed(trees)
    calls_check = "check" in found.uncalled
    if calls_check and entry is None:
        raise TestsError(
            "column tests defines check(candidate), which nothing calls; add the column"
            " entry_point with the name of the function to check"
        )
    found.refuse_what_asserts_nothing(str(tests[0]))
    _refuse_own_entry_point(trees, entry)
    own = {"solution", "__future__"}
    imports_others = found.needs - {*sys.stdlib_module_names} - LIBRARIES
    if not (calls_check or imports_others or "solution" in "".join(sources)):
        _refuse_what_is_not_about_the_program(trees, entry)
    return Source(
        (*before, *sources),
        entry,
        calls_check,
        found.needs_pytest,
        tuple(sorted(found.imports - own)),
        tuple(sorted(found.needs - own)),
    )


def _refuse_own_entry_point(trees: Sequence[ast.Module], entry: str | None) -> None:
    """Raise TestsError if the tests define the function that they test: the program's is not
    called."""
    name = re.match(r"\w*", entry or "")
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for node in (node for tree in trees for node in _flat(tree.body)):
        if isinstance(node, kinds) and name and node.name == name.group():
            raise TestsError(
                f"column tests defines {node.name} itself, which entry_point names: the program's"
                " would not be tested; remove the definition"
            )


BY_TEXT = {"__import__", "eval", "exec", "globals", "open", "vars"}
"""Builtins with which tests reach the program by a text."""


def _refuse_what_is_not_about_the_program(trees: Sequence[ast.Module], entry: str | None) -> None:
    """Raise TestsError if every name in the tests is their own or Python's."""
    used, bound = set[str](), set[str]()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    python = {*dir(builtins)} - BY_TEXT
    if used - bound - python or entry in used:
        return
    raise TestsError(
        "column tests uses no name of the program; name what it tests, or give a function with the"
        " name of one of Python's own in the column entry_point"
    )


def _texts(row: Mapping[str, object], name: str) -> list[str]:
    value = json_value(row.get(name))
    texts = value if _is_list(value) else [value or ""]
    if not all(isinstance(text, str) for text in texts):
        raise TestsError(f"column {name} contains {str(value)[:80]!r}; give Python source")
    return [text for text in map(str, texts) if text.strip()]


def _parsed(text: str) -> ast.Module:
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TestsError(
            f"column tests contains {text[:80]!r}, which is not Python source ({error}); {IN_WORDS}"
        ) from None


def _without_runner(text: str) -> str:
    """The source with `pass` for its calls of unittest.main and pytest.main, and without a last
    exit with code 0: the tests run anyway, and their end would hide the verdict."""
    tree = _parsed(text)
    statements = list(_flat(tree.body))
    lines = text.split("\n")
    runners = [*RUNNERS]
    for node in statements:
        if isinstance(node, ast.ImportFrom) and node.module in ("unittest", "pytest"):
            runners += [one.asname or one.name for one in node.names if one.name == "main"]
    for node in statements:
        call = node.value if isinstance(node, ast.Expr) else None
        last = node is statements[-1]
        if _calls(call, runners) or (
            _calls(call, EXITS)
            and isinstance(call, ast.Call)
            and (any(_calls(value, runners) for value in call.args) or (last and _is_zero(call)))
        ):
            assert node.end_lineno is not None and node.end_col_offset is not None
            first, end = node.lineno - 1, node.end_lineno - 1
            head = lines[first].encode()[: node.col_offset].decode()
            rest = lines[end].encode()[node.end_col_offset :].decode()
            lines[first : end + 1] = [head + "pass" + rest, *[""] * (end - first)]
    return "\n".join(lines)


def _flat(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module that always run as a script."""
    for node in statements:
        if isinstance(node, ast.If) and "__main__" in ast.dump(node.test):
            yield from _flat(node.body)
        else:
            yield node


def _calls(node: ast.AST | None, names: Sequence[str]) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in names


def _is_zero(call: ast.Call) -> bool:
    return not call.args or (
        isinstance(call.args[0], ast.Constant) and call.args[0].value in (0, None)
    )


class _Executed:
    """What the tests run, as far as their text shows: the statements of the modules, test functions
    and classes, and every function that one of these mentions."""

    def __init__(self, trees: Sequence[ast.Module]) -> None:
        self.nodes: list[tuple[ast.AST, bool, bool]] = []
        """(node, whether an exception there is expected or caught, whether a failed assertion there
        is lost)."""
        self.imports, tried = set[str](), set[str]()
        self.needs_pytest = False
        self._functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    self._functions.setdefault(node.name, []).append(node)
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    self.imports |= _packages(node)
                elif isinstance(node, ast.Try):
                    inner = [part for child in node.body for part in ast.walk(child)]
                    for part in inner:
                        tried |= _packages(part)
        self.needs = self.imports - tried
        self._defined = {*self._functions}
        self._cases: dict[str, bool] = {}
        """The tests' own subclasses of TestCase → whether they run asynchronous tests."""
        self.statements = [node for tree in trees for node in _flat(tree.body)]
        self.needs_pytest = "pytest" in self.imports
        for node in self.statements:
            self._visit(node)
        # The functions that the module's own statements do not reach.
        self.uncalled = {
            node.name
            for node in self.statements
            if isinstance(node, ast.FunctionDef) and node.name in self._functions
        }
        self._has_tests = False
        for node in self.statements:
            self._visit_test(node)
        self.needs_pytest &= self._has_tests

    def _visit(self, node: ast.AST, caught: bool = False, lost: bool = False) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in (*node.decorator_list, *node.args.defaults):
                self._visit(part, caught, lost)
            return
        self.nodes.append((node, caught, lost))
        name = getattr(node, "id", getattr(node, "attr", None))
        for function in self._functions.pop(name, ()) if isinstance(name, str) else ():
            self._body(function)
        inner = caught or isinstance(node, ast.With | ast.AsyncWith | ast.Try)
        body = getattr(node, "body", []) if self._loses(node) else []
        never = node.body if isinstance(node, ast.If) and _is_false(node.test) else []
        for child in ast.iter_child_nodes(node):
            if child not in never:
                self._visit(child, inner, lost or child in body)

    def _body(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for node in function.body:
            self._visit(node)

    def _loses(self, node: ast.AST) -> bool:
        """Whether an assertion that fails in the statement's body fails nothing."""
        if isinstance(node, ast.With | ast.AsyncWith):
            managers = [ast.unparse(item.context_expr) for item in node.items]
            return any("suppress(" in text and CATCHES.search(text) for text in managers)
        if not isinstance(node, ast.Try):
            return False
        return any(
            (handler.type is None or CATCHES.search(ast.unparse(handler.type)))
            and not any(self._asserts(part) or _calls(part, EXITS) for part in ast.walk(handler))
            for handler in node.handlers
        )

    def _visit_test(self, node: ast.stmt) -> None:
        """Visit what a runner of tests would run."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if _is_skipped(node):
                return
            if node.name == "check" and node.name in self.uncalled:
                self._body(node)
            elif node.name.startswith("test"):
                self._has_tests = True
                _refuse_unrun(node)
                self._body(node)
                self.needs_pytest |= bool(_needed(node.args)) and not node.decorator_list
            elif PER_TEST.match(node.name) or _is_fixture(node):
                self._body(node)
                self.needs_pytest = self.needs_pytest or node.name not in (
                    "setUpModule",
                    "tearDownModule",
                )
        elif isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            is_case = any("Test" in base or base in self._cases for base in bases)
            if is_case:
                runs_async = any("Async" in base or self._cases.get(base) for base in bases)
                self._cases[node.name] = runs_async
            if (not is_case and not node.name.startswith("Test")) or _is_skipped(node):
                return
            methods = [
                m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            for method in methods:
                is_test = method.name.startswith("test") or (is_case and method.name == "runTest")
                if is_test and not _is_skipped(method):
                    self._has_tests = True
                    _refuse_unrun(method, not is_case or self._cases[node.name])
                    self._body(method)
                if not is_case:
                    self.needs_pytest |= bool(PER_TEST.match(method.name)) or (
                        is_test and len(_needed(method.args)) > 1 and not method.decorator_list
                    )

    def refuse_what_asserts_nothing(self, text: str) -> None:
        """Raise TestsError if nothing is asserted, or if a statement only looks like it."""
        way_out = "write `assert …`"
        for statement in self.statements:
            if ast.unparse(statement).removeprefix("raise ").partition("(")[0] in EXITS:
                raise TestsError(
                    f"column tests ends its own process on line {statement.lineno}:"
                    f" `{ast.unparse(statement)[:80]}`; remove it"
                )
        for node, caught, _ in self.nodes:
            if isinstance(node, ast.Assert) and _is_display(node.test):
                raise TestsError(
                    f"column tests asserts nothing on line {node.lineno}:"
                    f" `{ast.unparse(node)[:80]}` is always true; write `assert condition, message`"
                )
            if isinstance(node, ast.Expr) and not caught and self._is_lost(node.value):
                raise TestsError(
                    f"column tests asserts nothing on line {node.lineno}:"
                    f" `{ast.unparse(node)[:80]}` is an expression whose value is lost; {way_out}"
                )
        if not any(self._asserts(node) and not lost for node, _, lost in self.nodes):
            for node, _, lost in self.nodes:
                if lost and self._asserts(node) and isinstance(node, ast.stmt | ast.expr):
                    raise TestsError(
                        f"column tests asserts nothing on line {node.lineno}:"
                        f" `{ast.unparse(node)[:80]}` is in a block that catches its failure; let"
                        " it fail"
                    )
            uncalled = sorted(name for name in self._functions if name != "check")
            why = f": nothing calls {', '.join(uncalled[:3])}" if uncalled else ""
            raise TestsError(f"column tests asserts nothing{why} ({text[:80]!r}); {way_out}")

    def _is_lost(self, node: ast.expr) -> bool:
        """Whether the statement computes a value and drops it; docstrings and `...` are none."""
        if isinstance(node, ast.Constant):
            return not isinstance(node.value, str) and node.value is not Ellipsis
        kinds = ast.Call | ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr | ast.ListComp
        return not isinstance(node, kinds) and not any(map(self._asserts, ast.walk(node)))

    def _asserts(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Assert):
            return not isinstance(node.test, ast.Constant) or not node.test.value
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            return name not in self._defined and bool(ASSERTS.search(name))
        return isinstance(node, ast.Raise)


def _packages(node: ast.AST) -> set[str]:
    """Top-level packages of an import statement."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {node.module.partition(".")[0]}
    return set()


def _needed(arguments: ast.arguments) -> list[ast.arg]:
    """Parameters without a default."""
    return [*arguments.posonlyargs, *arguments.args][
        : len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    ]


def _is_fixture(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list)


def _is_skipped(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(SKIPS.search(ast.unparse(decorator)) for decorator in node.decorator_list)


def _refuse_unrun(test: ast.FunctionDef | ast.AsyncFunctionDef, runs_async: bool = True) -> None:
    """Raise TestsError for a test that its runner calls without running its body."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    waiting: list[ast.AST] = [*test.body]
    is_generator = False
    while waiting and not is_generator:
        node = waiting.pop()
        is_generator = isinstance(node, ast.Yield | ast.YieldFrom)
        waiting += [] if isinstance(node, functions) else ast.iter_child_nodes(node)
    if is_generator:
        raise TestsError(
            f"column tests asserts nothing in {test.name}, which contains yield: no runner runs it;"
            " write a loop that asserts"
        )
    if isinstance(test, ast.AsyncFunctionDef) and not runs_async:
        raise TestsError(
            f"column tests asserts nothing in {test.name}: unittest.TestCase runs no asynchronous"
            " test; use unittest.IsolatedAsyncioTestCase"
        )


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _is_display(node: ast.expr) -> bool:
    """A tuple, list, … with items, or a choice of such a value: always true."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        return any(
            _is_display(value) or (isinstance(value, ast.Constant) and bool(value.value))
            for value in node.values
        )
    items = getattr(node, "elts", getattr(node, "keys", ()))
    return bool(items) or isinstance(node, ast.Lambda | ast.GeneratorExp)


# -- what stands before the program ---------------------------------------------------------------

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def heads_of(row: Mapping[str, object]) -> tuple[str, ...]:
    """Source that a data set shows the model before its answer: the columns `code_prompt` and
    `starter_code`, and with `entry_point` the prompt or its fenced block, if it contains code."""
    texts = [text for name in HEAD_COLUMNS for text in _texts(row, name)]
    if row.get("entry_point"):
        messages, prompt = row.get("messages"), row.get("prompts")
        last = messages[-1] if isinstance(messages, Sequence) and messages else {}
        asked = last.get("content") if isinstance(last, Mapping) else None
        for text in (asked, prompt):
            if isinstance(text, str):
                texts += [text, *FENCED.findall(text)]
    return tuple(
        dict.fromkeys(text for text in texts if _has_code(f"{text.rstrip()}\n    pass\n", text))
    )


def _has_code(*texts: str) -> bool:
    for text in texts:
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        kinds = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
        if any(isinstance(node, kinds) for node in body):
            return True
    return False
