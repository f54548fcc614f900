# Two commands on a bare machine: `make serve` and `make test`. Needs python3 with venv and pip.
PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8080
MODEL  ?= demo
BIN     = $(VENV)/bin

.PHONY: install serve test lint format bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --quiet --editable '.[dev]'
	touch $@

serve: install
	exec $(BIN)/lmi serve $(MODEL) --port $(PORT)

test: install
	$(BIN)/pytest

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/python bench/run.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
