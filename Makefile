PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help run test quick lint types unit clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

run: $(VENV)/.installed  ## train the embedded digits with CABS and draw the run
	$(BIN)/cabs train digits --out runs/digits --force

test: lint types unit  ## lint, types, tests

quick: $(VENV)/.installed  ## the tests that take no time, in under a minute
	$(BIN)/python -m pytest -m 'not slow' -x

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

unit: $(VENV)/.installed
	$(BIN)/python -m pytest

# The environment is a function of these two files: touch either and it is brought up to date.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:  ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build src/*.egg-info
