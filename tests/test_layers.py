"""The import rules, checked in the source. Imports inside functions count too."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "asyncrl"
LAYERS = (
    ("contracts", "sandbox"),
    ("runtime",),
    ("charts", "text", "web"),
    ("algorithms", "sessions"),
    ("config", "api"),
    ("models",),
    ("control",),
    (
        "data",
        "rollout",
        "agents",
        "environments",
        "rewards",
        "weights",
        "learning",
        "generation",
        "serving",
    ),
    ("rundir",),
    ("observe", "page"),
    ("preflight",),
    ("run",),
    ("cli", "commands"),
)
"""Folders from the bottom up. A folder imports only from those below it; `testing` is free."""
STATIONS = LAYERS[7]
BETWEEN_STATIONS = {
    ("environments", "rewards"),
    ("generation", "weights"),
    ("learning", "weights"),
    ("rollout", "agents"),
    ("rollout", "environments"),
    ("serving", "generation"),
}
"""(importer, imported): the only stations that import another."""
TAKE_CONFIG = ("config", "rundir", "preflight", "run", "commands", "testing")
"""Folders that may take a whole `Config`."""
WHOLE_CONFIG = {
    "asyncrl.config.Config",
    "asyncrl.config.config.Config",
    "asyncrl.config.settings.Settings",
}
"""Importing one of these gives access to the class of a whole config."""
HOMES = {
    "altair": ["charts"],
    "vllm": ["generation", "weights"],
    "deepspeed": ["learning", "run.export"],
    "ray.serve": [
        "generation",
        "serving.building",
        "serving.proxies",
        "serving.reward_model",
        "serving.standing",
        "weights.push",
        "runtime.ray.serve_calls",
        "run.cluster.attach",
    ],
    "fastapi": ["agents", "serving"],
    "ray.data": ["runtime.ray.stream"],
    "ray._private": ["run.cluster"],
    "ray._common": ["run.cluster.cluster_address"],
    "starlette": ["api", "page.watch", "serving", "web"],
}
"""Library → the folders and modules that import it; each of them does."""
NO_FILES = {"io", "os", "pathlib", "shutil", "tempfile"}
FILE_MODULES = {"runtime.files"}


@cache
def modules() -> tuple[tuple[str, Path], ...]:
    """Name and file of each module."""
    paths = sorted(PACKAGE.rglob("*.py"))
    names = (".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in paths)
    return tuple(
        (name.removesuffix("__init__").rstrip("."), path)
        for name, path in zip(names, paths, strict=True)
    )


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


@pytest.fixture(scope="module", autouse=True)
def forget_nodes() -> Iterator[None]:
    """Garbage collection would visit the nodes during all later tests of the process."""
    yield
    nodes_of.cache_clear()


@cache
def imports(path: Path) -> tuple[str, ...]:
    return tuple(imports_of(path.read_text(), path))


def imports_of(source: str, path: Path) -> Iterator[str]:
    """Absolute names of what the source of a file imports: modules, and names in modules.
    `from asyncrl.text import stops` imports `asyncrl.text.stops`, and not the package's exports."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node, path)
            names = [f"{module}.{alias.name}" for alias in node.names]
            yield from names if all(map(is_module, names)) else [module, *names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


@cache
def is_module(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    return place.is_dir() or place.with_name(f"{place.name}.py").is_file()


def absolute(node: ast.ImportFrom, path: Path) -> str:
    """The module of `from … import`, also if it is relative."""
    if not node.level:
        return node.module or ""
    package = path.relative_to(ROOT).parts[: -node.level]
    return ".".join([*package, *filter(None, [node.module])])


def takes_whole_config(source: str, path: Path) -> bool:
    """Imports the class of a whole config, or its package: `import asyncrl.config`."""
    nodes = nodes_of(source)
    packages = {
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    }
    packages |= {
        f"{absolute(node, path)}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    whole = {
        "asyncrl.config",
        "asyncrl.config.*",
        "asyncrl.config.config",
        "asyncrl.config.settings",
    }
    return bool(packages & whole or WHOLE_CONFIG & set(imports_of(source, path)))


def touches_files(source: str, path: Path) -> list[str]:
    """What a source imports or calls to read or write files."""
    found = [name for name in imports_of(source, path) if name.split(".")[0] in NO_FILES]
    found += [
        name
        for name in imports_of(source, path)
        if is_in(name.removeprefix("asyncrl."), sorted(FILE_MODULES))
    ]
    calls = [node for node in nodes_of(source) if isinstance(node, ast.Call)]
    called = {ast.unparse(node.func).rpartition(".")[2] for node in calls}
    return found + sorted(called & {"open", "read_text", "write_text", "read_bytes", "write_bytes"})


def folder(name: str) -> str:
    return name.partition(".")[0]


def layer(name: str) -> int:
    return next(number for number, folders in enumerate(LAYERS) if folder(name) in folders)


@cache
def ours(path: Path) -> frozenset[str]:
    """The modules of the package that a file imports."""
    known = {name for name, _ in modules()}
    named = {module.removeprefix("asyncrl.") for module in imports(path) if "asyncrl." in module}
    return frozenset(named & known) - {""}


def is_in(name: str, homes: list[str]) -> bool:
    return any(name == home or name.startswith(home + ".") for home in homes)


FOLDERS = ["", *sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))]
SCRIPTS = sorted(
    path.relative_to(ROOT) for top in ("jobs", "benchmarks") for path in (ROOT / top).rglob("*.py")
)
PLACED = [
    pytest.param(name, path, id=name)
    for name, path in modules()
    if folder(name) not in ("", "testing")
]


@pytest.mark.parametrize(("name", "path"), PLACED)
def test_imports_go_downward(name: str, path: Path) -> None:
    higher = sorted(other for other in ours(path) if layer(other) > layer(name))
    assert not higher, f"{name} (layer {layer(name)}) imports {higher}"


def test_stations_do_not_import_one_another() -> None:
    arrows = {
        (name, other)
        for name, path in modules()
        for other in ours(path)
        if folder(name) in STATIONS and folder(other) in STATIONS
        if folder(name) != folder(other)
        if (folder(name), folder(other)) not in BETWEEN_STATIONS
    }
    assert not arrows


def test_folders_import_one_another_one_way() -> None:
    """Neither folders nor modules import one another in a cycle."""
    arrows: dict[str, set[str]] = {name: ours(path) - {name} for name, path in modules()}
    for graph in (_by_folder(arrows), arrows):
        while leaves := [name for name, targets in graph.items() if not targets & set(graph)]:
            for leaf in leaves:
                del graph[leaf]
        assert not graph, f"cycles among {sorted(graph)}"


def _by_folder(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for name, targets in arrows.items():
        if folder(name) not in ("", "testing"):
            graph.setdefault(folder(name), set()).update(
                {folder(target) for target in targets} - {folder(name)}
            )
    return graph


def test_only_some_folders_take_a_whole_config() -> None:
    """A station takes its own small spec, which `preflight.specs` makes."""
    takers = {
        name
        for name, path in modules()
        if folder(name) not in TAKE_CONFIG
        if takes_whole_config(path.read_text(), path)
    }
    assert not takers


@pytest.mark.parametrize(
    "line",
    [
        "from asyncrl.config import Config",
        "from asyncrl.config.config import Config",
        "from asyncrl.config import config",
        "from asyncrl.config import *",
        "import asyncrl.config",
        "import asyncrl.config.config",
        "from asyncrl import config",
        "from asyncrl.config import settings",
        "from asyncrl.config.settings import Settings",
        "from ..config import Config",
        "from .. import config",
    ],
)
def test_every_way_to_a_whole_config_is_found(line: str) -> None:
    path = PACKAGE / "learning" / "rank.py"
    assert takes_whole_config(line, path)
    assert not takes_whole_config("from asyncrl.config.schema import DataConfig", path)
    assert not takes_whole_config("from asyncrl.config import DataConfig, completion_room", path)


SURFACE = {
    "": "open_run train",
    "algorithms": (
        "CHUNK_ELEMENTS LIVE_CHUNKS chunk_elements supervised_loss token_logprobs token_weights"
    ),
    "charts": "Axis Chart compared curves picture themed",
    "config": (
        "AgentCommand AgentFunction AlgorithmConfig CheckpointConfig Config ConfigError DataConfig "
        "DistillationConfig DpoConfig EnvironmentConfig EvalConfig EvalSet FunctionEnvironment "
        "GeneratorConfig HUB_CACHE LearnerConfig LoraConfig ModelConfig ObserveConfig "
        "OfflineConfig OfflineDataConfig PolicyGradient RewardConfig RewardFunction "
        "RewardModelConfig RolloutConfig RunSettings SandboxConfig Section SftConfig Source "
        "Sources StalenessConfig WarmStartConfig WeightsConfig completion_room explain "
        "field_names is_hub_data is_hub_name load_any load_config load_offline sources_of"
    ),
    "contracts": "Completion ConfigError GenerateRequest Prompt Scored State VersionSpan",
    "control": "Buffer Concurrency Coordinator Frontier Parts Schedule Staleness",
    "data": "TokenFile open_token_file ROWS_PER_BLOCK RowsByNumber read_prompts",
    "generation": (
        "Engine Generator GeneratorApp ServeGenerate begin_generators draw_in_blocks "
        "engine_environment start_engine wait_for_generators"
    ),
    "environments": (
        "AgentFailedError ContextTooLongError EnvironmentPool RewardFailedError ToolsRun "
        "TurnsExceededError run_tools"
    ),
    "learning": (
        "DeviceShifts RayLearner LearnerRank Meeting examples_with pack pack_blocks pack_rows "
        "pack_shared pairs_of start_rank start_reference"
    ),
    "models": (
        "head_settings segment_attention "
        "Example MicroBatch Policy Segments check_isolation checkpoint_activations load_policy "
        "packing_units micro_batch register_attention support token_example"
    ),
    "observe": (
        "MemoryPeak MemorySampler cpu_seconds cpu_seconds_between descendants process_name"
    ),
    "preflight": (
        "estimate "
        "HEAD_GRADIENTS data_spec learner_spec make_plan model_context offline_learner_spec "
        "offline_reference_spec scoring_spec "
        "ToolTurns tool_turns worker_spec"
    ),
    "rewards": "GroupCall RayScores RewardError call_reward",
    "rollout": "Player start_rollouts",
    "run": (
        "AcrossAttempts Replayed RunFailedError Summary command_name concurrency_of "
        "launch_stations ray_cluster replay_sessions run_training score_rows shut_down_ray "
        "start_local_ray"
    ),
    "rundir": "Run RunDirectory RunNotFoundError open_run",
    "sandbox": (
        "Level Levels Limits LocalSandbox Program Result Sandbox SandboxError "
        "SandboxUnavailableError open_sandbox probe run run_async"
    ),
    "sessions": "ChatRequest Sampled Session SessionTemplate TurnRequest",
    "serving": "build_reward_app build_standing_app",
    "testing": (
        "DeadlockError FakeAgentSession FakeAgentSessions FakeChatSession FakeCheckpoints "
        "FakeEngine FakeGenerate FakeLearner FakeLogprobCheck "
        "FakePrompts FakeRecorder FakeReferencePolicy FakeReplicas FakeRollouts FakeSandbox "
        "FakeScores FakeServed FakeSink FakeTurnGenerator FakeWeightSync FakeTokenizer"
        " SeededGenerator VirtualTimeLoop tool_call"
    ),
    "text": "ResponseReader decode load_stops load_tokenizer text_before",
    "weights": (
        "gather_buckets weight_layout "
        "BACKEND CannotPublishError TOKENIZER_MODE bucket_checksum expected_tensors fetch_version "
        "plan_buckets Staged version_table"
    ),
}
"""What each folder exports."""


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_exports_what_it_promises(name: str) -> None:
    package = importlib.import_module(f"asyncrl.{name}" if name else "asyncrl")
    exported = getattr(package, "__all__", None) or exported_once(Path(str(package.__file__)))
    assert sorted(exported) == sorted(SURFACE.get(name, "").split())
    for attribute in exported:
        assert getattr(package, attribute) is not None


def exported_once(path: Path) -> list[str]:
    """The names that a package without `__all__` imports for others: `A as A`."""
    imports = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    names = [alias for node in imports for alias in node.names]
    return [alias.name for alias in names if alias.asname == alias.name]


LAZY = [
    path
    for name, path in modules()
    if name != "runtime.exports" and "lazy_exports(" in path.read_text()
]


def typed_names(tree: ast.Module) -> dict[str, str]:
    """Name → module, of the imports for type checkers. Strict ones export only `A as A`."""
    return {
        alias.asname or "": node.module or ""
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }


def lazy_names(tree: ast.Module, package: str) -> dict[str, str]:
    """Name → module, of the call of `lazy_exports`."""
    (call,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_exports"
    ]
    return {word.arg or "": f"{package}.{ast.literal_eval(word.value)}" for word in call.keywords}


def test_packages_with_lazy_exports_are_found() -> None:
    assert len(LAZY) >= 14 and all(path.name == "__init__.py" for path in LAZY)


@pytest.mark.parametrize("path", LAZY, ids=lambda path: path.parent.name)
def test_type_checkers_see_what_a_folder_loads_lazily(path: Path) -> None:
    tree = ast.parse(path.read_text())
    package = ".".join(path.parent.relative_to(ROOT).parts)
    assert typed_names(tree) == lazy_names(tree, package)


@pytest.mark.parametrize("path", SCRIPTS, ids=str)
def test_jobs_and_benchmarks_use_the_public_surface_alone(path: Path) -> None:
    source = (ROOT / path).read_text()
    assert "sys.path" not in source
    for module in imports(ROOT / path):
        if module.startswith("asyncrl."):
            depth = module.removeprefix("asyncrl.").split(".")
            folder_name, *rest = depth
            # Settings name the ready environments, so they are public.
            free = folder_name in ("testing", "cli") or depth[:2] == ["environments", "ready"]
            assert free or not rest or rest[0] in SURFACE[folder_name].split(), module


def test_ray_shuts_down_while_no_garbage_is_collected() -> None:
    files = [ROOT / path for path in SCRIPTS] + [path for _, path in modules()]
    callers = {path.name for path in files if "ray.shutdown(" in path.read_text()}
    assert callers == {"shutdown.py"}


def test_nothing_is_computed_with_the_wall_clock() -> None:
    """The wall clock can be set, so deadlines and intervals use the monotonic clock. Only records
    contain the time of day. The age of a file is the difference to it."""
    wall = ("time.time", "datetime.now", "datetime.datetime.now")
    readers = {
        name
        for name, path in modules()
        for node in nodes_of(path.read_text())
        if isinstance(node, ast.Attribute) and ast.unparse(node) in wall
    }
    readers |= {name for name, path in modules() if "time.time" in imports(path)}
    records = {"runtime.clock", "rundir.record", "serving.http", "serving.score_routes"}
    records |= {"rollout.lost_requests", "rewards.score"}
    ages = {"weights.staging"}
    assert {name for name in readers if folder(name) != "testing"} <= records | ages


@pytest.mark.parametrize("library", HOMES)
def test_heavy_libraries_have_one_home(library: str) -> None:
    users = {
        name
        for name, path in modules()
        if any(m == library or m.startswith(library + ".") for m in imports(path))
    }
    assert not {name for name in users if not is_in(name, HOMES[library])}
    unused = {home for home in HOMES[library] if not any(is_in(name, [home]) for name in users)}
    assert not unused, f"remove {unused} from HOMES and docs/development/architecture.md"


def test_control_touches_no_files_and_imports_no_heavy_library() -> None:
    heavy = {"ray", "vllm", "deepspeed", "torch"}
    for name, path in modules():
        if folder(name) == "control":
            assert not {module.split(".")[0] for module in imports(path)} & heavy, name
            assert not touches_files(path.read_text(), path), name


@pytest.mark.parametrize(
    "line",
    [
        "from pathlib import Path",
        "import io",
        "import os.path",
        "open(place)",
        "place.open()",
        "place.write_text('x')",
        "from asyncrl.runtime.files.opening import write",
        "from asyncrl.runtime.files import parquet",
        "from ..runtime.files import merging",
        "import asyncrl.runtime.files.temporary",
    ],
)
def test_every_way_to_a_file_is_found(line: str) -> None:
    path = PACKAGE / "control" / "buffer.py"
    assert touches_files(line, path)
    assert not touches_files("from asyncrl.runtime.failures import unforeseen", path)


def test_relative_imports_are_made_absolute() -> None:
    path = PACKAGE / "rewards" / "pool.py"
    assert list(imports_of("from . import score", path)) == ["asyncrl.rewards.score"]
    assert "asyncrl.data.prompts" in list(imports_of("from ..data.prompts import x", path))
    init = PACKAGE / "rewards" / "__init__.py"
    assert "asyncrl.rewards.pool" in list(imports_of("from .pool import x", init))


def test_the_sandbox_needs_the_standard_library_alone() -> None:
    """Its supervisor runs without site-packages, and starts before every program."""
    for name, path in modules():
        if folder(name) == "sandbox":
            others = {
                module.split(".")[0]
                for module in imports(path)
                if not module.startswith("asyncrl.sandbox")
            }
            assert others <= sys.stdlib_module_names, name


def test_the_driver_imports_neither_torch_nor_vllm_nor_deepspeed() -> None:
    """The driver only starts and watches other processes. Each of these imports would cost it, and
    every reward process, seconds and hundreds of MiB."""
    script = (
        "import sys, asyncrl.run.train\n"
        "print([name for name in ('torch', 'vllm', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
