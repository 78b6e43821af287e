"""Docs pages generated from the code: settings, metrics, command line and Python API."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from prometheus_client.parser import text_string_to_metric_families
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from asyncrl.cli import _parser
from asyncrl.config import Config, OfflineConfig, RunSettings
from asyncrl.config.aliases import other_names
from asyncrl.config.fields import described, section_of
from asyncrl.contracts.section import Section, kinds_of, name_of
from asyncrl.observe.alarms import Range
from asyncrl.observe.metric_catalog import Metric, metric_tables
from asyncrl.serving.metrics import HttpStatus, Traffic, exposition
from asyncrl.testing.generators import fake_status

ROOT = Path(__file__).parents[1]
WIDTH = 80
"""Characters of a signature on one line."""
NAMES_HERE = "<!-- names of settings -->"
"""Where a page shows the tables of other systems' settings."""
OTHERWISE = "otherwise"
"""Label of the alternative without a key of its own."""
LINK = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)(?:#[^)]*)?\)")
"""A relative link: text, target."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "reference/settings.md": settings_page(),
        "reference/offline_settings.md": offline_settings_page(),
        "reference/metrics.md": metrics_page(),
        "reference/command_line.md": command_line_page(),
        "reference/python_api.md": python_api_page(),
    }
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Show files outside docs/ as text, since the site lacks them, let quoted messages wrap, and
    add the tables of other systems' settings."""
    folder = PurePosixPath("docs", page.file.src_uri).parent

    def shown(link: re.Match[str]) -> str:
        target = _joined(folder, link[2])
        outside = not target.startswith("docs/") and (ROOT / target).exists()
        return f"{link[1]} (`{target}`)" if outside else link[0]

    text = LINK.sub(shown, markdown).replace("```text\n", "```{ .text .wrap }\n")
    return text.replace(NAMES_HERE, names_elsewhere()) if NAMES_HERE in text else text


def names_elsewhere() -> str:
    """Settings of other systems: their names here, in runs of both kinds, and those that do not
    exist here."""
    names = other_names()
    tables = (
        ("Runs with generators", "here", names.renamed),
        ("SFT, DPO and reward models", "here", names.offline_renamed),
        (
            "Not implemented",
            "why, and what to do",
            {**names.not_implemented, **names.offline_not_implemented},
        ),
    )
    return "\n\n".join(
        "\n".join(
            [
                f"### {title}",
                "",
                f"| setting | {column} |",
                "|---|---|",
                *(f"| `{name}` | {_cell(here)} |" for name, here in sorted(table.items())),
            ]
        )
        for title, column, table in tables
    )


def _joined(folder: PurePosixPath, target: str) -> str:
    return Path(ROOT, folder, target).resolve().relative_to(ROOT).as_posix()


def settings_page() -> str:
    """Every setting by section: its type, default and meaning."""
    parts = [
        "# Settings",
        "Write settings in YAML, section by section. The command line accepts each one as"
        " `--SECTION.NAME VALUE`; the value `null` restores the default. Where the default is"
        " *none, or derived*, `asyncrl plan CONFIG` prints the value and its reason.",
        "A choice, such as `algorithm.loss`, has alternatives with settings of their own. Write"
        " `loss: gspo`, or `loss: {name: gspo, eps_clip: 3.0e-4}`. A setting of another alternative"
        " is refused. Some alternatives have no name, but a key that only they have, such as"
        " `generator.attach`. On the command line, this key also leaves out the file's settings of"
        " the other alternatives.",
    ]
    parts += ["## Top level", _table("", _plain(described(Config)))]
    for name, field in described(Config).items():
        parts += _field_parts(name, field)
    return "\n\n".join(parts) + "\n"


def offline_settings_page() -> str:
    """The settings of runs on a dataset. Shared sections are on the settings page."""
    shared = RunSettings.model_fields.keys()
    own = {name: field for name, field in described(OfflineConfig).items() if name not in shared}
    links = ", ".join(
        f"[`{name}`](settings.md#{name})" if section_of(field.annotation) else f"`{name}`"
        for name, field in RunSettings.model_fields.items()
    )
    parts = [
        "# Settings of SFT, DPO and reward models",
        "`asyncrl sft CONFIG`, `asyncrl dpo CONFIG` and `asyncrl reward_model CONFIG` train on a"
        f" dataset without generators. The settings {links} are those of"
        " [every run](settings.md#top-level).",
        "## Top level of SFT, DPO and reward models",
        _table("", _plain(own)),
    ]
    for name, field in own.items():
        parts += _field_parts(name, field)
    return "\n\n".join(parts) + "\n"


def _plain(fields: Mapping[str, FieldInfo]) -> dict[str, FieldInfo]:
    """Those that are no section. A choice is one of them."""
    return {name: field for name, field in fields.items() if not section_of(field.annotation)}


def _field_parts(name: str, field: FieldInfo) -> list[str]:
    """The section or the alternatives of a setting, if it has any. Its name is dotted."""
    kinds = sorted(kinds_of(field.annotation), key=lambda kind: _label(kind) != OTHERWISE)
    heading = f"{'###' if '.' in name else '##'} {name}"
    if len(kinds) == 1:
        texts = [field.description if field.default is None else None, _meaning(kinds[0])]
        below = _settings_parts(f"{name}.", described(kinds[0]))
        return [heading, *filter(None, texts), *below]
    common = {
        key: one
        for key, one in (described(kinds[0]) if kinds else {}).items()
        if key not in _own_settings(kinds[0], kinds) and key != "name"
    }
    parts = [heading, *_settings_parts(f"{name}.", common)] if common else []
    alike: dict[tuple[str, ...], list[type[Section]]] = {}
    for kind in kinds:
        shown = tuple(_settings_parts(f"{name}.", _own_settings(kind, kinds)))
        alike.setdefault(shown, []).append(kind)
    for shown, some in alike.items():
        if shown:
            meaning = [_meaning(some[0])] if len(some) == 1 else []
            parts += [f"### {_title(name, some, kinds)}", *meaning, *shown]
    return parts


def _settings_parts(prefix: str, fields: Mapping[str, FieldInfo]) -> list[str]:
    """The table of these settings, and the sections and alternatives below them."""
    plain = _plain(fields)
    parts = [_table(prefix, plain)] if plain else []
    for name, field in fields.items():
        parts += _field_parts(f"{prefix}{name}", field)
    return parts


def _title(name: str, some: Sequence[type[Section]], kinds: Sequence[type[Section]]) -> str:
    labels = [_label(kind) for kind in some]
    others = [_label(kind) for kind in kinds if kind not in some]
    without = f"{name} without {', '.join(others)}"
    return without if labels == [OTHERWISE] else f"{name}: {', '.join(labels)}"


def _own_settings(kind: type[Section], kinds: Sequence[type[Section]]) -> dict[str, FieldInfo]:
    """The settings of an alternative that not every alternative has in the same form."""

    def shared(name: str) -> bool:
        found = [described(one)[name] for one in kinds if name in one.model_fields]
        return len(found) == len(kinds) and len({_row("", one) for one in found}) == 1

    return {
        name: field
        for name, field in described(kind).items()
        if name != "name" and not shared(name)
    }


def _label(kind: type[Section]) -> str:
    """What tells an alternative from the others: its name, or the key that only it has."""
    without = "your own" if "name" in kind.model_fields else OTHERWISE
    return name_of(kind) or str(getattr(kind, "KEY", "")) or without


def _meaning(kind: type[Section]) -> str:
    return " ".join((kind.__doc__ or "").split())


def _table(prefix: str, fields: Mapping[str, FieldInfo]) -> str:
    rows = [_row(f"{prefix}{name}", field) for name, field in fields.items()]
    return "\n".join(["| setting | meaning |", "|---|---|", *rows])


def _row(name: str, field: FieldInfo) -> str:
    meaning = _kind(field, " ".join((field.description or "").split()))
    default = _default(field)
    note = f"<br>**Default:** {default}" if default else ""
    return f"| `{name}` | {_cell(meaning + note + _alternatives(field))} |"


def _alternatives(field: FieldInfo) -> str:
    """The alternatives of a choice, in a line each."""
    kinds = kinds_of(field.annotation)
    lines = [f"<br>`{_label(kind)}`: {_meaning(kind)}" for kind in kinds if len(kinds) > 1]
    return "".join(lines).replace(f"`{OTHERWISE}`", OTHERWISE)


def _kind(field: FieldInfo, meaning: str) -> str:
    shown = str(field.annotation)
    if "Literal" not in shown or field.metadata:  # with metadata, more than the choices is allowed
        return meaning
    choices = re.findall(r"'([^']+)'", shown)
    return f"{meaning} Choices: {', '.join(f'`{one}`' for one in choices)}." if choices else meaning


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "none; required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "*none, or derived*"
    if isinstance(value, Section):
        label = _label(type(value))
        return "" if label == OTHERWISE else f"`{label}`"
    return "" if value is PydanticUndefined else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def metrics_page() -> str:
    """Every metric by event, and those of a standing endpoint."""
    parts = [
        "# Metrics",
        "Each line of `metrics.jsonl` is one event. It has `schema`, `event`, `attempt`, `step`"
        " (steps attempted), `version` (policy version), `time` (Unix seconds) and the metrics"
        " below. [Read the metrics](../how_to/metrics.md) says where to look first.",
        "r is π_learner / π_behavior of one token: the learner's probability now over that of the"
        " generator that sampled it. Outside a healthy range marked *alarm*, the run"
        " raises an alarm.",
    ]
    for table in metric_tables():
        events = ", ".join(f"`{event}`" for event in table.event.split(", "))
        parts += [f"## {table.title}", f"Events: {events}.", _metric_table(table.metrics)]
    rows = [f"| `{name}` | {_cell(text)} |" for name, text in _endpoint_metrics()]
    parts += [
        "## `/metrics` of a standing endpoint",
        "In Prometheus' text format, with the bearer key. One scrape covers every replica that"
        " answers; the label `replica` tells them apart.",
        "\n".join(["| name | meaning |", "|---|---|", *rows]),
    ]
    return "\n\n".join(parts) + "\n"


def _metric_table(metrics: Sequence[Metric]) -> str:
    rows = [f"| {_names(metric)} | {_cell(_explained(metric))} |" for metric in metrics]
    return "\n".join(["| metric | meaning |", "|---|---|", *rows])


def _names(metric: Metric) -> str:
    return "<br>".join(f"`{name}`" for name in metric.names.split(", "))


def _explained(metric: Metric) -> str:
    limits = metric.alarm()
    healthy = f"{_range(limits)} (alarm)" if limits else metric.healthy
    advice = limits.advice if limits else metric.advice
    notes = {"Healthy": healthy, "Otherwise": advice}
    return metric.meaning + "".join(
        f"<br>**{title}:** {note}" for title, note in notes.items() if note
    )


def _range(limits: Range) -> str:
    if limits.low == -math.inf:
        return f"at most {limits.high:g}"
    if limits.high == math.inf:
        return f"at least {limits.low:g}"
    return f"{limits.low:g}" if limits.low == limits.high else f"{limits.low:g} to {limits.high:g}"


def _endpoint_metrics() -> list[tuple[str, str]]:
    text = exposition("model", [HttpStatus(fake_status("replica"), Traffic())]).decode()
    return [
        (one.name + "_total" * (one.type == "counter"), one.documentation)
        for one in text_string_to_metric_families(text)
    ]


def command_line_page() -> str:
    """The help of each command."""
    parser, commands = _parser()
    parts = ["# Command line", f"```\n{parser.format_help()}```"]
    for name, command in commands.items():
        parts += [f"## asyncrl {name}", f"```\n{command.format_help()}```"]
    return "\n\n".join(parts) + "\n"


def python_api_page() -> str:
    """Signature and docstring of every name that the package and its folders export."""
    parts = [
        "# Python API",
        "These names are the public surface. A test holds the list; anything else may change"
        " without notice.",
    ]
    for init in sorted((ROOT / "asyncrl").rglob("__init__.py")):
        package = ".".join(init.parent.relative_to(ROOT).parts)
        homes = _exports(ast.parse(init.read_text()), package)
        if homes:
            parts.append(f"## {package}")
            parts += [_definition(home, name) for name, home in homes.items()]
    return "\n\n".join(parts) + "\n"


def _exports(tree: ast.Module, package: str) -> dict[str, str]:
    """Exported name → module, from `lazy_exports` or from plain imports."""
    plain = {
        alias.name: str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("asyncrl.")
        for alias in node.names
        if alias.name != "lazy_exports"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_exports":
            return {
                str(one.arg): f"{package}.{ast.literal_eval(one.value)}"
                for one in node.keywords
                if one.arg
            }
    return dict(sorted(plain.items()))


def _definition(module: str, name: str) -> str:
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(source.read_text()).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return _described(name, _signature(node), ast.get_docstring(node))
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _described(name, f"class {name}", ast.get_docstring(node))
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in ast.unparse(node).split("=")[0]:
            note = after.value if isinstance(after, ast.Expr) else None
            text = str(note.value) if isinstance(note, ast.Constant) else None
            return _described(name, ast.unparse(node), text)
    return _described(name, name, None)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """One line, or one line for each argument if that is too long."""
    start = f"{'async ' * isinstance(node, ast.AsyncFunctionDef)}def {node.name}("
    end = f") -> {ast.unparse(node.returns)}" if node.returns else ")"
    whole = start + ast.unparse(node.args) + end
    if len(whole) <= WIDTH:
        return whole
    arguments = [*node.args.posonlyargs, *node.args.args]
    given = [None] * (len(arguments) - len(node.args.defaults)) + list(node.args.defaults)
    lines = [
        ast.unparse(one) + (f" = {ast.unparse(value)}" if value else "")
        for one, value in zip(arguments, given, strict=True)
    ]
    if node.args.vararg or node.args.kwonlyargs or node.args.kwarg:
        rest = ast.arguments(
            [],
            [],
            node.args.vararg,
            node.args.kwonlyargs,
            node.args.kw_defaults,
            node.args.kwarg,
            [],
        )
        lines.append(ast.unparse(rest))
    return start + "".join(f"\n    {line}," for line in lines) + "\n" + end


def _described(name: str, signature: str, docstring: str | None) -> str:
    return f"### {name}\n\n```python\n{signature}\n```\n\n{_text(docstring)}"


def _text(docstring: str | None) -> str:
    """A docstring as Markdown: sections become bold, their entries a list."""
    lines = []
    for line in (docstring or "").splitlines():
        if re.fullmatch(r"(Args|Returns|Raises):", line):
            lines += ["", f"**{line[:-1]}**", ""]
        elif re.match(r"    \w[\w, ]*: ", line):
            name, _, rest = line.strip().partition(": ")
            lines.append(f"- `{name}`: {rest}")
        else:
            lines.append(line.strip() if line.startswith("    ") else line)
    return "\n".join(lines).replace("<", "&lt;")
