"""`python jobs/train.py CONFIG.yaml [--section.field value …]`: the same as `asyncrl train`, for `ray job submit`."""

import sys
from pathlib import Path

# The working directory that Ray uploads holds the package; it must win over an installed one, on the driver as on the workers.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from asyncrl.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
