"""Environment variables of the processes that these tests start."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON_PATH = os.pathsep.join((str(HERE), str(ROOT)))
"""Where the rewards are, and the package under test. The interpreter's environment may have the
package of another checkout."""


def run_variables(*dropped: str) -> dict[str, str]:
    """The variables of this process, without those of its own Ray cluster. They lead to the package
    under test and not to the rewards, which a run finds in its working directory.

    Args:
        dropped: how the names of further variables begin that are left out.
    """
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("RAY_", *dropped))
    }
    return kept | {"PYTHONPATH": str(ROOT)}
