.PHONY: setup setup-run demo demo-agent demo-real demo-seeds pictures test test-all hostile faults mutants lint types docs resolve sizes

PYTHON := .venv/bin/python
export PYTHONUNBUFFERED := 1
# Tests start hundreds of processes, and each would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

setup:
	@.ci/setup

setup-run:  ## what a run on CPU needs, without tests, notebooks and docs
	@.ci/setup run

demo: setup-run  ## the main job, end to end; ARGS="--placement colocate" changes settings
	@$(PYTHON) -m jobs.quickstart $(ARGS)

test: setup  ## the default tests, real vLLM and DeepSpeed included
	@$(PYTHON) -m pytest -q -n 2

test-all: setup  ## what is too slow for `make test`
	@$(PYTHON) -m pytest -q -m slow -n 2

hostile: setup  ## machines that are not ours, imitated with namespaces, limits and variables: about four minutes; most need root
	@$(PYTHON) -m pytest -q -m hostile -rs

demo-agent: setup-run  ## a model learns a game of several turns with a tool; ARGS="--max_steps 20" changes settings
	@$(PYTHON) -m jobs.guess $(ARGS)

demo-real: setup-run  ## a pretrained model of 135 M parameters from the package index learns to follow instructions; ARGS="--max_steps 20" changes settings
	@$(PYTHON) -m jobs.smollm $(ARGS)

demo-seeds: setup-run  ## the main job with three seeds, and once with shuffled rewards: about an hour
	@$(PYTHON) -m jobs.quickstart.seeds

pictures: setup-run  ## draw the docs' pictures from finished runs of `make demo-real` and its seeds; RUNS=FOLDER, default: runs
	@$(PYTHON) -m jobs.smollm.pictures $(or $(RUNS),runs) docs/how_to

faults: setup  ## the longest runs, most with killed or stopped parts, and broken control code; prints how long each part took to recover: about 105 minutes
	@$(PYTHON) -m pytest -q -m faults

mutants: setup  ## break the control code on purpose; the tests must notice
	@$(PYTHON) tests/control/mutants.py

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .

types: setup
	@.venv/bin/mypy

sizes: setup  ## how large the code and its docs are; no limits
	@$(PYTHON) -m benchmarks.sizes

docs: setup  ## build the docs into site/; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet && echo "docs: site/index.html"

resolve: setup  ## whether the pinned packages go together on every supported Python
	@for version in 3.11 3.12 3.13; do for extras in "--extra test --extra notebook --extra docs" "--extra gpu"; do \
		.venv/bin/uv pip compile --quiet --python-version $$version $$extras pyproject.toml --output-file .venv/resolved.txt \
		|| { echo "the packages do not go together on Python $$version with $$extras" >&2; exit 1; }; done; done
