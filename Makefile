# Every target makes its own environment when it is missing or out of date; python3 (3.11 or later) with pip is enough.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made-from-this-checkout
RUNS ?= runs

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint docs check events clean

help:
	@echo "make demo    start the reference engine on this machine and show the verdict"
	@echo "make test    run the tests"
	@echo "make check   ruff, mypy, import-linter, docs and tests"
	@echo "make lint    ruff, mypy and import-linter"
	@echo "make docs    build the documentation into docs/_build/html"
	@echo "make events  write docs/events.md again from the event classes"
	@echo "make clean   remove what these targets made"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12 ...")'
	@echo "making $(VENV) (torch is large; this is done once)" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/startup-fsm demo --runs $(RUNS)

test: $(STAMP)
	$(BIN)/python -m pytest -n auto

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports --no-logo

docs: $(STAMP)
	$(BIN)/sphinx-build -W --keep-going --quiet -b html docs docs/_build/html
	@echo "docs/_build/html/index.html" >&2

check: lint docs test

events: $(STAMP)
	$(BIN)/python docs/generate_events.py

clean:
	rm -rf $(VENV) build dist docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find startup_fsm tests docs examples -name __pycache__ -type d -prune -exec rm -rf {} +
