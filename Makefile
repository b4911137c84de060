# Two commands that do all the set-up on a machine that has only Python >= 3.10 and make:
#   make demo   runs the main job (Flow-GRPO teaches a small FLUX to spell)
#   make test   passes every check
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build is enough for both; users with GPUs install flowkit into their own environment.
TORCH ?= torch==2.13.0

.PHONY: demo test lint types imports pytest mutants install
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

demo: install
	$(BIN)/flowkit grpo --preset tiny-ocr

test: lint types imports pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

pytest: install
	$(BIN)/coverage erase
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered

mutants: install
	$(BIN)/python tests/mutants.py
