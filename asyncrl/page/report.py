"""Writes a run as one HTML file.

Everything is in the file: the page's own scripts and styles, the scripts of Vega that draw the
charts, and the run's values. A policy forbids the browser to load anything else, and to run any
other script. The values are compressed, because a page of many groups would be large.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from asyncrl.page.contents import contents
from asyncrl.rundir.reader import Run
from asyncrl.runtime.files.opening import replace_text

STATIC = Path(__file__).parent / "static"
MODULES = ("dom", "values", "charts", "tokens", "conversation", "groups", "views", "main")
"""The page's scripts, in the order in which they need one another."""
PART = re.compile(r"\{(policy|style|values|vega|script)\}")
IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
EXPORT = re.compile(r"^export (?=(async )?(function|const|class) )", re.MULTILINE)


def write_report(run: Run, target: Path) -> int:
    """Write the page of a run, whole or not at all. Returns its bytes.

    Raises:
        OSError: the file cannot be written.
        pyarrow.ArrowInvalid: a file of the run is damaged.
    """
    text = html(contents(run))
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_text(target, text)
    return len(text.encode())


def html(values: dict[str, Any]) -> str:
    """The page of these values (`contents.contents`). One with `live` asks its server for newer
    ones (`asyncrl.page.watch`)."""
    live = ["connect-src 'self'"] if values.get("live") else []
    scripts = [_vega(), script()]
    style = (STATIC / "page.css").read_text()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            "style-src 'unsafe-inline'",  # Vega makes styles of its own
            "img-src data:",
            *live,
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    parts = {
        "policy": policy,
        "style": style,
        "values": _packed(values),
        "vega": scripts[0],
        "script": scripts[1],
    }
    return PART.sub(lambda found: parts[found[1]], (STATIC / "page.html").read_text())


@cache
def script() -> str:
    """The page's modules as one script. Their names do not collide, which a test checks."""
    texts = [(STATIC / f"{name}.js").read_text() for name in MODULES]
    return "\n".join(EXPORT.sub("", IMPORT.sub("", text)) for text in texts)


@cache
def _vega() -> str:
    import vl_convert

    text: str = vl_convert.javascript_bundle()  # type: ignore[call-arg] # its stub has no default
    # The HTML parser would end the script there.
    return text.replace("</script", "<\\/script")


def _packed(values: dict[str, Any]) -> str:
    """JSON, compressed, in letters that HTML leaves alone."""
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode()


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
