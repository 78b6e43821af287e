"""The program that grades a completion inside the sandbox, as `main.py`.

`asyncrl.rewards.code` sends its text. It imports only the standard library, and runs on Python 3.9
or later. It finds these files beside it:

    solution.py   the completion's program
    begin.json    what is needed before the program runs; contains neither tests nor secrets

Two forms of tests:

    cases   each runs in a process of its own, in an emptied folder. The outputs go to the caller,
            which compares them. The expected ones are not in the sandbox.
    source  judge ─fork─► the process that runs the program, and then the tests
            The judge never runs the program, and only it knows the word that means "passed".
"""

from __future__ import annotations
import __future__

import ast
import asyncio
import builtins
import contextlib
import importlib
import inspect
import json
import operator
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import types
import unittest
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

WORD = 32
"""Bytes of the word with which the tests' process answers the judge."""
MOST_REASON = 2000
PATCHABLE = ("print", "input", "open")
"""Builtins that ordinary programs replace, such as `builtins.input`."""
EQUAL = ("Equal", "Equals")
"""Ends of the names of unittest's methods that compare."""
ALWAYS_CHECKED = ("ast", "builtins", "importlib", "inspect", "json", "os", "unittest")


def main() -> None:
    with open("begin.json") as file:
        begin = json.load(file)
    if "cases" in begin["form"]:
        run_cases(begin)
    else:
        judge(begin)


# -- cases -----------------------------------------------------------------------------------------


def run_cases(begin: dict[str, Any]) -> None:
    """Print [exit code, standard output] of each case, up to the first that fails."""
    job = json.load(sys.stdin)
    with open("solution.py", encoding="utf-8") as file:
        files = {"solution.py": file.read()}
    if "call" in begin:
        with open("main.py", encoding="utf-8") as file:
            files["call.py"] = file.read().rpartition("\nif __name__")[0] + "\ncall_once()\n"
        files["begin.json"] = json.dumps(begin)
    outputs = []
    for case in job["inputs"]:
        empty_folder()
        for name, text in files.items():
            with open(name, "w", encoding="utf-8", newline="") as file:
                file.write(text)
        outputs.append(run_case("call.py" if "call" in begin else "solution.py", case))
        if begin["ends_others"]:
            end_others()
        if outputs[-1][0]:
            break
    empty_folder()
    print(json.dumps(outputs))


def run_case(script: str, case: str) -> list[Any]:
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
        given.write(case.encode(errors="surrogatepass"))
        given.seek(0)
        done = subprocess.Popen(
            [sys.executable, "-s", "-B", script],
            stdin=given,
            stdout=printed,
            stderr=subprocess.DEVNULL,
        ).wait()
        # Not until the end of a pipe: what the case left running may keep that open.
        printed.seek(0)
        return [done, printed.read().decode(errors="replace")]


def end_others() -> None:
    """End what a case left running. Signals reach only this sandbox's processes."""
    try:
        os.kill(-1, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def empty_folder() -> None:
    for name in os.listdir("."):
        with contextlib.suppress(OSError):  # what has been killed may still be at work
            if os.path.isdir(name) and not os.path.islink(name):
                os.chmod(name, 0o700)
                shutil.rmtree(name, ignore_errors=True)
            else:
                os.unlink(name)


def call_once() -> NoReturn:
    """Call the program's function with the arguments on standard input, and print its result as
    JSON. What the program prints goes nowhere."""
    with open("begin.json") as file:
        begin = json.load(file)
    arguments = json.load(sys.stdin)
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    program = load(begin["heads"]).__dict__
    name = begin["call"]
    function = program[name] if name in program else getattr(program["Solution"](), name)
    result = json.dumps(plain(function(*arguments))).encode()
    while result:
        result = result[os.write(out, result) :]
    os._exit(0)


def plain(value: Any) -> Any:
    """Sequences and numbers of numpy as JSON can contain them."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


# -- source ----------------------------------------------------------------------------------------


def judge(begin: dict[str, Any]) -> NoReturn:
    """Start the tests' process, and print the caller's secret if it answers with the word."""
    tests, answer = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        # Standard input still contains the tests and the secret. Nothing of it has been read.
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(tests[1])
        os.close(answer[0])
        try:
            run_tests(begin, tests[0], answer[1])
        except BaseException as error:
            report(answer[1], error)
        finally:
            os._exit(1)
    os.close(tests[0])
    os.close(answer[1])
    job = json.load(sys.stdin)
    word = secrets.token_bytes(WORD)
    try:
        with open(tests[1], "wb") as pipe:
            payload = json.dumps(job["tests"]).encode()
            pipe.write(len(payload).to_bytes(8, "big") + payload + word)
    except BrokenPipeError:
        pass
    os.waitpid(child, 0)
    os.set_blocking(answer[0], False)
    try:
        found = os.read(answer[0], WORD + 8 * MOST_REASON)
    except BlockingIOError:
        found = b""
    reason = json.dumps(found.decode(errors="replace"))
    verdict = "passed" if found == word else f"failed {reason}"
    os.write(1, f"\n{job['secret']} {verdict}\n".encode())
    os._exit(0)


def report(answer: int, error: BaseException) -> None:
    """Tell the judge why the tests did not pass."""
    line = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name != __file__ and name.startswith(("test", "solution", os.path.abspath("solution"))):
            line = f" ({os.path.basename(name)}, line {trace.tb_lineno})"
        trace = trace.tb_next
    os.write(answer, f"{type(error).__name__}: {error}"[:MOST_REASON].encode() + line.encode())


def run_tests(begin: dict[str, Any], tests: int, answer: int) -> NoReturn:
    """Run the program, then its tests, and answer with the word if all of them passed.

    The word stays in the pipe until then, and the tests until the program is loaded.
    """
    process, exit_now = os.getpid(), os._exit
    for name in begin["imports"]:
        try:
            importlib.import_module(name)
        except Exception:
            continue  # the test that imports it then fails with the reason
    pristine = dict(vars(builtins))
    for name in dir(unittest.TestCase):
        if name == "assertIn" or (name.startswith("assert") and name.endswith(EQUAL)):
            setattr(unittest.TestCase, name, checked(name, getattr(unittest.TestCase, name)))
    before = functions_of({*ALWAYS_CHECKED, *begin["imports"]})
    program = load(begin["heads"])
    if os.getpid() != process:
        exit_now(1)  # a copy that the program forked
    job = json.loads(read_all(tests, int.from_bytes(read_all(tests, 8), "big")))
    if any("ANY" in source for source in job["sources"]):
        USED.add("unittest.mock")
    if begin["form"] == "pytest":
        passed, total, reason = run_pytest(job["sources"])
    else:
        passed, total, reason = run_source(job, program, pristine)
    if os.getpid() != process:
        exit_now(1)
    own = {name for source in job["sources"] for name in assigned(ast.parse(source))}
    changed = [
        name
        for name, (get, value) in before.items()
        if get() is not value and name.rpartition(".")[2] not in own
    ]
    if changed:
        reason = f"the program replaced {changed[0]}"
    elif total and passed == total:
        os.write(answer, read_all(tests, WORD))
        exit_now(0)
    os.write(answer, f"{passed} of {total} tests passed; {reason}"[:MOST_REASON].encode())
    exit_now(1)


def assigned(tree: ast.AST) -> Iterator[str]:
    """Attributes that tests set, such as `time.sleep = ...`: they may replace functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def read_all(descriptor: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, size - len(parts))
        if not part:
            raise EOFError("the judge has ended")
        parts += part
    return bytes(parts)


def functions_of(names: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    """Every function and class of the modules, of their submodules, and of unittest's classes:
    name → (how to look it up, what it is)."""
    found: dict[str, tuple[Any, Any]] = {}

    def add(owner: Any, title: str) -> None:
        for name, value in list(vars(owner).items()):
            if callable(value) and not (owner is builtins and name in PATCHABLE):
                found[f"{title}.{name}"] = (lambda o=owner, n=name: vars(o).get(n), value)

    for title, module in list(sys.modules.items()):
        if module is not None and title.partition(".")[0] in {n.partition(".")[0] for n in names}:
            found[title] = (lambda t=title: sys.modules.get(t), module)
            add(module, title)
            if title.startswith("unittest"):
                for name, value in list(vars(module).items()):
                    if isinstance(value, type) and value.__module__ == title:
                        add(value, f"{title}.{name}")
    return found


class Guards(ast.NodeTransformer):
    """Lets the program go on when what it does only as a script fails, such as reading input."""

    def visit_If(self, node: ast.If) -> ast.AST:
        names = {getattr(part, "id", getattr(part, "value", None)) for part in ast.walk(node.test)}
        if not {"__name__", "__main__"} <= names:
            return node
        node.body, node.orelse = [tried(node.body)], [tried(node.orelse or [ast.Pass()])]
        return node

    def visit_FunctionDef(self, node: Any) -> Any:
        return node

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef


def tried(body: list[ast.stmt]) -> ast.Try:
    handler = ast.ExceptHandler(type=None, name=None, body=[ast.Pass()])
    return ast.Try(body=body, handlers=[handler], orelse=[], finalbody=[])


def load(heads: list[str]) -> types.ModuleType:
    """Run the program as Python runs a file. It is also importable as `solution`."""
    path = os.path.abspath("solution.py")
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = sys.modules["solution"] = module
    sys.argv = ["solution.py"]
    for head in heads:
        with contextlib.suppress(Exception):  # a later error names what is then missing
            exec(compile(head, "head", "exec", dont_inherit=True), module.__dict__)
    with open(path, encoding="utf-8-sig") as file:
        tree = Guards().visit(ast.parse(file.read(), path))
    exec(compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True), module.__dict__)
    return module


class Names(dict[str, Any]):
    """Where a test looks for a name that it does not define: first Python's builtins, as they were
    before the program, then the program's names."""

    def __init__(self, builtin: dict[str, Any], program: dict[str, Any]) -> None:
        super().__init__(builtin)
        self.program = program

    def __missing__(self, name: str) -> Any:
        return self.program[name]


class Compared(ast.NodeTransformer):
    """Turns `a == b`, `a != b`, `a in b` and chains of these into calls of `compared`."""

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        names = [type(operation).__name__ for operation in node.ops]
        if not {*names} <= {*COMPARISONS}:
            return node
        call = ast.Call(
            func=ast.Name(id="__compared__", ctx=ast.Load()),
            args=[ast.Constant(value=" ".join(names)), node.left, *node.comparators],
            keywords=[],
        )
        return ast.copy_location(call, node)


def compared(names: str, *values: Any) -> Any:
    """The result of a chain of comparisons."""
    found: Any = True
    for name, first, second in zip(names.split(), values, values[1:]):  # noqa: B905
        found = COMPARISONS[name](first, second)
        if len(values) > 2 and not found:
            break
    return found


def checked(name: str, original: Any) -> Any:
    """A method of unittest that compares, and also fails for an object that equals too much."""
    is_equal = not any(part in name for part in ("Not", "Almost", "Count", "In"))

    def compare(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        values = (*given[:2], *named.values())
        for value in values:
            refuse_equal_to_all(value)
        if is_equal and len(given) > 1:
            refuse_equal_to_others(given[0], given[1])

    return compare


def equal(first: Any, second: Any) -> Any:
    found = first == second
    if found is True:
        refuse_equal_to_all(first)
        refuse_equal_to_all(second)
        refuse_equal_to_others(first, second)
    return found


def unequal(first: Any, second: Any) -> Any:
    found = first != second
    if found is False and equal(first, second) is not True:
        raise AssertionError(f"{type(first).__name__}: neither == nor != is true")
    return found


def contained(item: Any, collection: Any) -> bool:
    found = operator.contains(collection, item)
    if found:
        refuse_equal_to_all(item)
        if type(collection) in (list, tuple) and compares_itself(type(item)):
            for other in collection:
                if item == other:
                    refuse_equal_to_others(item, other)
        own = hasattr(getattr(type(collection), "__contains__", None), "__code__")
        if own and is_equal_to_any(object(), operator.contains, collection):
            raise AssertionError(f"an object of {type(collection).__name__} contains anything")
    return found


COMPARISONS = {"Eq": equal, "NotEq": unequal, "In": contained}
CHECKED = {"__compared__": compared}
PLAIN = (int, float, complex, str, bytes, bool, type(None), range)
MOST_LOOKED_AT = 10_000


def refuse_equal_to_all(value: Any) -> None:
    """Raise AssertionError if an object in the value equals things of which it cannot know.

    Looks at no object of `unittest.mock` if the tests themselves use its ANY.
    """
    waiting = [value]
    for _ in range(MOST_LOOKED_AT):
        if not waiting:
            return
        value = waiting.pop()
        kind = type(value)
        if kind in (list, tuple, set, frozenset):
            waiting += value
        elif kind is dict:
            waiting += [*value, *value.values()]
        elif kind not in PLAIN and kind.__module__ not in USED and is_equal_to_all(value):
            raise AssertionError(f"an object of {kind.__name__} equals anything")


USED: set[str] = set()


def is_equal_to_all(value: Any) -> bool:
    if isinstance(type(value).__eq__, type(object.__eq__)) or is_of_tests(type(value)):
        return False  # written in C, or by the author of the tests
    # A number modulo another one equals some of these, but not all.
    numbers = [int.from_bytes(os.urandom(16), "big") for _ in range(16)]
    number = numbers[0]
    others = (object(), str(number), [number], {number: number})
    return any(is_equal_to_any(other, operator.eq, value) for other in others) or any(
        all(is_equal_to_any(kind(one), operator.eq, value) for one in numbers)
        for kind in (int, float)
    )


def is_of_tests(kind: type) -> bool:
    file = getattr(getattr(kind.__eq__, "__code__", None), "co_filename", "")
    return os.path.basename(file).startswith("test")


def is_equal_to_any(other: Any, compare: Any, value: Any) -> bool:
    try:
        return compare(value, other) is True
    except Exception:
        return False


def refuse_equal_to_others(first: Any, second: Any) -> None:
    """Raise AssertionError if the program's object, which equals a plain value, also equals values
    like that one. They are compared in random order, as an object may count its comparisons."""
    waiting = [(first, second)]
    for _ in range(MOST_LOOKED_AT):
        if not waiting:
            return
        one, other = waiting.pop()
        if type(one) in PLAIN and type(other) in PLAIN:
            continue
        if type(one) is type(other) and type(one) in (list, tuple):
            waiting += zip(one, other)  # noqa: B905 (Python 3.9 has no `strict`)
        elif type(one) is type(other) is dict:
            waiting += [(one[key], other[key]) for key in one if key in other]
        for own, given in ((one, other), (other, one)):
            if compares_itself(type(own)) and (unlike := others_like(given)):
                tries = sorted([(given, True), *((o, False) for o in unlike)], key=random_order)
                if any(is_equal_to_any(o, operator.eq, own) is not same for o, same in tries):
                    raise AssertionError(f"an object of {type(own).__name__} equals other values")


def random_order(_: object) -> bytes:
    return os.urandom(8)


def compares_itself(kind: type) -> bool:
    """Whether the class has an `__eq__` in Python, and is neither the tests' nor a package's."""
    if kind in PLAIN or isinstance(kind.__eq__, type(object.__eq__)):
        return False
    of_package = kind.__module__ not in ("__main__", "solution", "builtins")
    found = getattr(sys.modules.get(kind.__module__), kind.__name__, None)
    return not is_of_tests(kind) and not (of_package and found is kind)


def others_like(value: Any) -> list[Any]:
    """Values of the same type that a plain value does not equal."""
    kind = type(value)
    if value is None or kind is bool:
        return [not value, "" if value is None else None]
    if kind is int:
        return [value - 1, value + 1]
    if kind in (float, complex):
        return [value + max(1.0, abs(value))]
    if kind in (str, bytes):
        return [value + (b"a" if kind is bytes else "a"), *([value[1:]] if value else [])]
    if kind in (list, tuple):
        return [kind([*value, object()])] + ([value[1:]] if value else [])
    if kind in (set, frozenset):
        return [value | {object()}]
    return [{**value, object(): 0}] if kind is dict else []


def definitions(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Names of the functions and classes that the statements define, also below `if` and `try`."""
    for node in statements:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        for block in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from definitions(getattr(node, block, ()))


def future_flags(tree: ast.Module) -> int:
    flags = 0
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            for alias in node.names:
                flags |= getattr(__future__, alias.name).compiler_flag
    return flags


def run_source(
    job: dict[str, Any], program: types.ModuleType, pristine: dict[str, Any]
) -> tuple[int, int, str]:
    """(passed, total, the first failure) of test statements, check(candidate), test functions and
    unittest classes."""
    names = program.__dict__
    pristine["globals"] = lambda: {**names, **space}
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": Names(pristine, names)}
    space.update(CHECKED)
    shared, defined = set[str](), dict[str, None]()
    entry = job["entry_point"]
    candidate = eval(entry, names) if entry else None
    if entry and entry.isidentifier():
        space[entry] = candidate
    for number, source in enumerate(job["sources"]):
        tree = ast.parse(source, f"test {number}")
        flags = future_flags(tree)
        defined.update(dict.fromkeys(definitions(tree.body)))
        for node in tree.body:
            block = ast.fix_missing_locations(Compared().visit(ast.Module([node], [])))
            exec(compile(block, f"test {number}", "exec", flags, dont_inherit=True), space)
            share(space, names, shared)
    total = passed = len(job["sources"])
    if job["calls_check"]:
        total += 1
        space["check"](candidate)
        passed += 1
    for name in defined:
        value = space.get(name)
        if isinstance(value, types.FunctionType) and name.startswith("test"):
            total += 1
            finished(value())
            passed += 1
        elif isinstance(value, type) and issubclass(value, unittest.TestCase):
            continue
        elif isinstance(value, type) and name.startswith("Test"):
            for method in [method for method in dir(value) if method.startswith("test")]:
                total += 1
                finished(getattr(value(), method)())
                passed += 1
    holder = types.ModuleType("tests")
    vars(holder).update({name: space[name] for name in defined if name in space})
    suite = unittest.TestLoader().loadTestsFromModule(holder)
    result = Counted()
    total += sum(not skipped_by_itself(test) for test in flattened(suite))
    suite.run(result)
    failures = [text for _, text in (*result.errors, *result.failures)]
    return passed + result.passed, total, (failures or ["a test was skipped"])[0][-MOST_REASON:]


def share(space: dict[str, Any], program: dict[str, Any], shared: set[str]) -> None:
    """Show the program what the tests define, where it has no such name: a class that they give
    it, or a function that they replace."""
    for name, value in space.items():
        if not name.startswith("__") and (name in shared or name not in program):
            shared.add(name)
            program[name] = value


def finished(value: object) -> None:
    """Run an asynchronous test to its end."""
    if inspect.iscoroutine(value):
        asyncio.run(value)


class Counted(unittest.TestResult):
    passed = 0

    def addSuccess(self, test: Any) -> None:
        super().addSuccess(test)
        self.passed += 1

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        super().addExpectedFailure(test, err)
        self.passed += 1


def flattened(suite: Any) -> Iterator[Any]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from flattened(test)
        else:
            yield test


def skipped_by_itself(test: Any) -> bool:
    """Whether a decorator of the tests skips it. A program could raise SkipTest."""
    method = getattr(test, getattr(test, "_testMethodName", ""), None)
    return getattr(test, "__unittest_skip__", False) or getattr(method, "__unittest_skip__", False)


def run_pytest(sources: list[str]) -> tuple[int, int, str]:
    """(passed, total, the first failure) by pytest, which the sandbox has."""
    import pytest

    class Plugin:
        passed = total = 0
        reason = "pytest ran no test"

        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call(self, pyfuncitem: Any) -> Any:
            if not inspect.iscoroutinefunction(pyfuncitem.obj):
                return None
            given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
            asyncio.run(pyfuncitem.obj(**given))
            return True

        def pytest_collection_finish(self, session: Any) -> None:
            self.total = len(session.items)
            self.marked = {
                item.nodeid: {mark.name for mark in item.iter_markers()} for item in session.items
            }

        def pytest_collectreport(self, report: Any) -> None:
            if not report.passed:
                self.reason = f"{report.longrepr}"[-MOST_REASON:]

        def pytest_runtest_logreport(self, report: Any) -> None:
            marks = self.marked.get(report.nodeid, set())
            if report.when == "setup" and report.skipped and marks & {"skip", "skipif"}:
                self.total -= 1
            elif report.when == "call" and (
                report.passed or (hasattr(report, "wasxfail") and "xfail" in marks)
            ):
                self.passed += 1
            elif report.failed:
                self.passed -= report.when == "teardown"
                self.reason = f"{report.longrepr}"[-MOST_REASON:]

    vars(builtins).update(CHECKED)
    for number, source in enumerate(sources):
        tree = Compared().visit(ast.parse(source))
        if "solution" not in imported(tree):
            # The program's names, but not instead of Python's own.
            lines = ast.parse("from solution import *\nfrom builtins import *").body
            future = [isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body]
            first = len(future) - future[::-1].index(True) if True in future else 0
            tree.body[first:first] = lines
        with open(f"test_{number}.py", "w", encoding="utf-8") as file:
            file.write(ast.unparse(ast.fix_missing_locations(tree)))
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    plugin = Plugin()
    options = ["-q", "-x", "--noconftest", "-c", os.devnull, "--rootdir", ".", "--import-mode"]
    options += ["importlib", "-p", "no:cacheprovider"]
    files = [f"test_{number}.py" for number in range(len(sources))]
    pytest.main([*options, *files], plugins=[plugin])
    return plugin.passed, plugin.total, plugin.reason


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level packages that a module's code imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)


if __name__ == "__main__":
    main()
