"""`python -m asyncrl.sandbox`: print the levels that this machine supports, or serve a sandbox.

python -m asyncrl.sandbox                            the levels, and why others are missing
python -m asyncrl.sandbox serve --level landlock     HTTP service; needs ASYNCRL_SANDBOX_TOKEN
"""

from __future__ import annotations

import argparse
import sys

from asyncrl.sandbox.levels import Level, SandboxError
from asyncrl.sandbox.local import open_sandbox, probe
from asyncrl.sandbox.service import SandboxServer


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Exit codes: 0 success; 1 no sandbox here; 2 wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m asyncrl.sandbox",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=["levels", "serve"], default="levels")
    parser.add_argument("--python", help="Python interpreter for programs; default: this one")
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        help="folder that programs may read and import from; may be repeated",
    )
    parser.add_argument(
        "--level",
        choices=[Level.NAMESPACES, Level.LANDLOCK],
        default=Level.NAMESPACES,
        help="serve: lowest level to accept; default: namespaces",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="serve: address to listen on; default: only this machine",
    )
    parser.add_argument("--port", type=int, default=8700, help="serve: port; 0: a free one")
    known = parser.parse_args(arguments)
    if known.command == "levels":
        levels = probe(known.python, tuple(known.path))
        print(levels.text())
        print(f"level {'none' if levels.best is None else levels.best}")
        return 0 if levels.best else 1
    try:
        sandbox = open_sandbox(known.level, python=known.python, paths=known.path)
        server = SandboxServer(sandbox, known.host, known.port)
    except (SandboxError, ValueError, OSError) as error:
        print(f"asyncrl.sandbox: {error}", file=sys.stderr)
        return 1
    print(f"level {sandbox.level}; {server.url}", flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
