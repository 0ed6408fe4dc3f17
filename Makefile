# `make help` lists the targets. Each one makes what it needs first, so any may be the first command typed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format lint types imports test-all bench attack notebooks clean

help:  ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | awk -F'\t' '{printf "  make %-10s %s\n", $$1, $$2}'

$(VENV)/core.stamp: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing vitral into $(VENV) (once; a few minutes)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/core.stamp
	@echo "installing the tools and oracles of the tests into $(VENV) (once; a few minutes)"
	@$(PIP) --editable ".[dev]"
	@touch $@

setup: $(VENV)/dev.stamp  ## Make .venv with everything that work on vitral needs.

demo: $(VENV)/core.stamp  ## Walk an image through the equations, then train on the digits; all goes to demo/.
	@MPLBACKEND=agg $(BIN)/python docs/notebooks/vit_step_by_step.py
	@printf '\nTraining on the embedded digits\n-------------------------------\n'
	@rm -rf demo/digits
	@$(BIN)/vitral train digits --out demo/digits

test: $(VENV)/dev.stamp  ## Run the tests, but for the slow ones.
	@$(BIN)/python -m pytest -n 2 -q -m "not slow"
	@echo "left out: tests marked slow (minutes each); make test-all runs them too"

test-all: $(VENV)/dev.stamp  ## Run every test.
	@$(BIN)/python -m pytest -n 2 -q

check: lint types imports test-all  ## All that CI runs: format, lint, types, import directions, every test.

format: $(VENV)/dev.stamp  ## Format the code, and bring docs/equations.md and docs/options.md up to date.
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/python scripts/equation_lines.py --write
	@$(BIN)/python scripts/options_page.py --write

lint: $(VENV)/dev.stamp
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(VENV)/dev.stamp
	@$(BIN)/pyright

imports: $(VENV)/dev.stamp
	@$(BIN)/lint-imports

bench: $(VENV)/dev.stamp  ## Measure speed beside timm and transformers; tables and JSON go to benchmarks/results/.
	@$(BIN)/python benchmarks/forward.py
	@$(BIN)/python benchmarks/startup.py
	@$(BIN)/python benchmarks/train_step.py
	@$(BIN)/python benchmarks/loader.py

attack: $(VENV)/dev.stamp  ## Kill, damage and flood everything at full size (about an hour); prints a table.
	@$(BIN)/python scripts/attack

notebooks: $(VENV)/dev.stamp  ## Turn docs/notebooks/*.py into executed .ipynb files beside them.
	@$(BIN)/jupytext --to ipynb --execute docs/notebooks/*.py

clean:  ## Remove .venv and everything that was made.
	@rm -rf $(VENV) demo dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache docs/notebooks/*.ipynb
