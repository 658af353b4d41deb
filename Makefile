# llmtool: `make test` and `make demo` do all the set-up by themselves.
PYTHON ?= python3.11

# One environment an interpreter: `make test PYTHON=python3.12` leaves the default one alone.
ifeq ($(PYTHON),python3.11)
VENV ?= .venv
else
VENV ?= .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
endif
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= auto
export JAX_PLATFORMS ?= cpu

.DEFAULT_GOAL := help
.PHONY: help venv demo matrix test test-slow lint types format clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS="$$(printf '\t')" read -r t d; do printf '  make %-10s %s\n' "$$t" "$$d"; done

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("llmtool needs Python 3.11 or newer, found " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV) with $$($(PYTHON) --version) (once; about a minute and 2 GB)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,dev]'
	@# TE's pure wheel, whose modules the tests run, lies apart: importable, it would look like a broken TE to peft.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/te-wheel 'transformer-engine>=2'
	@touch $@

venv: $(STAMP)  ## Make the environment; later runs use it until pyproject.toml changes

demo: $(STAMP)  ## Carry a real model through every layout and back, and prove that nothing changed
	@$(BIN)/python convert/demo.py

matrix: $(STAMP)  ## Every foreign sample into every layout and back, as a table (minutes)
	@$(BIN)/python -m tests.oracles

test: $(STAMP)  ## The fast tests
	@$(BIN)/python -m pytest -n $(WORKERS) -m 'not slow' -q

test-slow: $(STAMP)  ## Every test
	@$(BIN)/python -m pytest -n $(WORKERS) -q

lint: $(STAMP)  ## Style, and the direction of imports
	@$(BIN)/ruff check --quiet .
	@$(BIN)/lint-imports --no-logo

types: $(STAMP)  ## Static types
	@$(BIN)/mypy

format: $(STAMP)  ## Sort imports and mend what ruff can mend
	@$(BIN)/ruff check --quiet --fix .

clean:  ## Remove environments, caches and the demo's files
	rm -rf .venv .venv-* demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
