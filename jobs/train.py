"""`python -m jobs.train CONFIG.yaml [--section.field value …]`: the same as `asyncrl train`, for
`ray job submit`.

Ray uploads the working directory. `python -m` imports the package from there, before an installed
one."""

import sys

from asyncrl.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
