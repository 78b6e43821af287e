"""`python -m jobs.train CONFIG.yaml [--section.field value …]`: the same as `asyncrl train`, for
`ray job submit`.

Ray uploads the working directory, and `python -m` prefers the package there to an installed one.
"""

import sys

from asyncrl.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
