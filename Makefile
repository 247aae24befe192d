PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help run test quick lint types unit versions clean

# The oldest and the newest release of the range that pyproject.toml declares.
TORCHES ?= 2.13.0 2.15.0

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

run: $(VENV)/.installed  ## train the embedded digits with CABS and draw the run
	$(BIN)/cabs train digits --out runs/digits --force

test: lint types unit  ## lint, types, tests

quick: $(VENV)/.installed  ## the tests that take no time, in under a minute
	$(BIN)/python -m pytest -m 'not slow' -x -n auto

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

unit: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto

versions: $(TORCHES:%=.versions/%/.passed)  ## the tests on the oldest and the newest torch; an environment of some GB each

# Made anew each time: tests depend on every file. Every version is tried, with `make -k versions` also after a failure.
.versions/%/.passed: .versions/%/.installed FORCE
	.versions/$*/bin/python -c 'import platform, numpy, torch; \
	  print(f"python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}")'
	.versions/$*/bin/python -m pytest
	touch $@

.PRECIOUS: .versions/%/.installed
.versions/%/.installed: pyproject.toml
	test -x .versions/$*/bin/python || $(PYTHON) -m venv .versions/$*
	echo 'torch==$*' > .versions/$*/constraints.txt
	.versions/$*/bin/python -m pip install --quiet -c .versions/$*/constraints.txt -e '.[dev]'
	touch $@

FORCE:

# The environment is a function of these two files: touch either and it is brought up to date.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:  ## remove the environments and caches
	rm -rf $(VENV) .versions .mypy_cache .ruff_cache .pytest_cache build src/*.egg-info
