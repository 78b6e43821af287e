.PHONY: setup demo demo-seeds test test-all faults mutants lint types

PYTHON := .venv/bin/python
export PYTHONUNBUFFERED := 1

setup:
	@.ci/setup

demo: setup  ## the main job, end to end
	@$(PYTHON) jobs/quickstart.py

test: setup  ## the default tests, real vLLM and DeepSpeed included
	@$(PYTHON) -m pytest -q

test-all: setup  ## what is too slow for `make test`
	@$(PYTHON) -m pytest -q -m slow

demo-seeds: setup  ## the main job with three seeds, and once with shuffled rewards: about an hour
	@$(PYTHON) jobs/seeds.py

faults: setup  ## kill and stop the parts of real runs, and break the control code; prints how long each part took to recover: about an hour
	@$(PYTHON) -m pytest -q -m faults

mutants: setup  ## break the control code on purpose; the tests must notice
	@$(PYTHON) tests/control/mutants.py

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .

types: setup
	@.venv/bin/mypy
