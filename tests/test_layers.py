"""Imports go downward only, and heavy libraries have one home each: read from the source, import statements inside functions included."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "asyncrl"
LAYERS = {
    0: [
        "clock",
        "config",
        "contracts",
        "confined",
        "contracts",
        "derived",
        "environment",
        "names",
        "redact",
        "rules",
        "runtime",
        "sandbox",
        "text",
        "types",
    ],
    1: [
        "algorithms",
        "data.balance",
        "data.blocks",
        "data.mixture",
        "data.packing",
        "data.truncation",
        "control.staleness",
    ],
    2: ["control", "generation.protocol"],
    3: ["stacks", "data", "generation", "serving", "rollout", "rewards", "learning", "weights"],
    4: [
        "embedded",
        "launch",
        "run",
        "cli",
        "observe",
        "plan",
        "preflight",
        "placement",
        "room",
        "holders",
        "directory",
        "resume",
        "rundir",
        "audit",
        "evaluation",
        "reading",
        "snapshot",
    ],
}
FREE = {
    "testing",
    "testing.clock",
    "testing.control",
    "testing.engine",
    "testing.generators",
    "testing.sandbox",
    "",
}
HOMES = {
    "vllm": ["generation", "weights"],
    "deepspeed": ["learning", "weights.gather"],
    "ray.serve": ["generation", "weights.push"],
    "ray.data": ["data", "rewards"],
}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = (
            ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            .removesuffix("__init__")
            .rstrip(".")
        )
        yield name, path


def layer(name):
    fitting = [
        (len(prefix), number)
        for number, prefixes in LAYERS.items()
        for prefix in prefixes
        if name == prefix or name.startswith(prefix + ".")
    ]
    return max(fitting)[1]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        pytest.param(name, path, id=name or "asyncrl")
        for name, path in modules()
        if name not in FREE
    ],
)
def test_imports_go_downward(name, path):
    ours = {
        module.removeprefix("asyncrl.") for module in imports(path) if module.startswith("asyncrl.")
    }
    known = {other for other, _ in modules()}
    higher = sorted(other for other in ours & known if layer(other) > layer(name))
    assert not higher, f"{name} (layer {layer(name)}) imports {higher}"


def test_nothing_is_computed_with_the_wall_clock():
    """Somebody may set it: deadlines and intervals are counted on the monotonic clock. Only records have the time of day."""
    wall = ("time.time", "datetime.now", "datetime.datetime.now")
    readers = {
        name
        for name, path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if ast.unparse(node) in wall
    }
    readers |= {name for name, path in modules() if "time.time" in imports(path)}
    assert readers <= {"clock", "generation.http", "rollout.lost", "rewards.score", *FREE}


@pytest.mark.parametrize("library", HOMES)
def test_heavy_libraries_have_one_home(library):
    users = {
        name
        for name, path in modules()
        if any(m == library or m.startswith(library + ".") for m in imports(path))
    }
    strangers = {
        name
        for name in users
        if not any(name == home or name.startswith(home + ".") for home in HOMES[library])
    }
    assert not strangers


def test_control_imports_neither_ray_nor_torch():
    for name, path in modules():
        if name.startswith("control"):
            assert not {module.split(".")[0] for module in imports(path)} & {
                "ray",
                "vllm",
                "deepspeed",
                "torch",
            }, name


def test_the_sandbox_needs_the_standard_library_alone():
    """Its supervisor starts without site-packages, and in front of every program."""
    for name, path in modules():
        if name.startswith("sandbox"):
            others = {
                module.split(".")[0]
                for module in imports(path)
                if not module.startswith("asyncrl.sandbox")
            }
            assert others <= sys.stdlib_module_names, name


def test_the_driver_imports_neither_torch_nor_vllm_nor_deepspeed():
    """A process that only starts and watches others: each of these would cost it, and every reward process, seconds and hundreds of MiB."""
    script = "import sys, asyncrl.run; print([name for name in ('torch', 'vllm', 'deepspeed') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
