# Everything starts from a fresh clone: the targets make the environment they need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# A released PyTorch by exact version, before anything that depends on it.
TORCH  ?= torch==2.13.0

.PHONY: demo serve test lint types contracts check clean

demo: $(VENV)/.demo   ## start the embedded model, chat with thinking, call a tool, stop
	$(BIN)/python examples/demo.py

serve: $(VENV)/.demo  ## serve the embedded model on http://127.0.0.1:8000
	$(BIN)/negamax serve nano

test: $(VENV)/.dev    ## everything that runs without a GPU
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

contracts: $(VENV)/.dev
	$(BIN)/lint-imports

check: lint types contracts test

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e . openai
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
