# Everything starts from a fresh clone: the targets make the environment they need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# A released PyTorch by exact version, before anything that depends on it.
TORCH  ?= torch==2.13.0
# The oldest and the newest Triton that pyproject.toml allows; the oldest runs with PyTorch 2.11.
OLDEST_TRITON ?= 3.6.0
NEWEST_TRITON ?= 3.9.0
TRITONS := $(patsubst %,$(VENV)/triton-%/.installed,$(OLDEST_TRITON) $(NEWEST_TRITON))
# The tests of `make test`, which need no GPU.
GATE   := not gpu and not install and not full
PYTEST := $(BIN)/python -m pytest -m "$(GATE)" --ignore tests/gpu
# Everything else in the versions that were tested together. `make newest` has no constraints.
CONSTRAINTS ?= -c constraints.txt
INSTALL = $(BIN)/python tools/install.py $(CONSTRAINTS)
NEWEST_TORCH ?= $(shell sed -n 's/^  "\(torch>.*\)",$$/\1/p' pyproject.toml)

.PHONY: demo serve test collect test-full attack fault-table test-install lint types contracts
.PHONY: docs check newest tritons compile-oldest compile-newest sbom constraints clean

demo: $(VENV)/.demo   ## start the built-in model, chat with thinking, call a tool, stop
	$(BIN)/python examples/demo.py

serve: $(VENV)/.demo  ## serve the built-in model on http://127.0.0.1:8000
	$(BIN)/negamax serve nano $(ARGS)

# Four workers keep two cores busy, because tests also wait. Failed tests run once more alone.
# Those that pass only then are defects all the same, and build/second-run.json lists them.
test: $(VENV)/.dev $(TRITONS)  ## run the tests that need no GPU
	@rm -f build/second-run.json
	$(PYTEST) -n 4 --dist loadfile --no-loadscope-reorder || { mkdir -p build; \
	  cp .pytest_cache/v/cache/lastfailed build/second-run.json; \
	  $(PYTEST) --last-failed --last-failed-no-failures none; }

collect: $(VENV)/.dev  ## compile the tests once, so that the workers of `make test` need not
	$(PYTEST) --collect-only -qq > /dev/null

test-full: $(VENV)/.ray  ## the tests that the gate leaves out (tests/full.txt, the mark `full`)
	$(BIN)/python -m pytest -m full -n 4 --dist worksteal

fault-table: $(VENV)/.dev  ## kill and stop each part of a server, and measure what clients see
	$(BIN)/python tests/attacks/fault_table.py

attack: $(VENV)/.dev  ## hostile requests and dying parts at full size, against servers of its own
	$(BIN)/python -m pytest -m "attacks" tests/attacks

test-install: $(VENV)/.dev  ## the wheel alone in an empty environment: commands, server, hub ids
	$(BIN)/python -m pytest -p no:cacheprovider -m install tests/install

newest:               ## the same tests with the newest releases that pyproject.toml allows
	rm -rf build/newest
	$(MAKE) build/newest/.dev VENV=build/newest CONSTRAINTS= TORCH="$(NEWEST_TORCH)"
	build/newest/bin/python -m pip freeze --exclude-editable
	$(MAKE) test VENV=build/newest

compile-oldest: TRITON := $(OLDEST_TRITON)
compile-newest: TRITON := $(NEWEST_TRITON)
compile-oldest compile-newest: $(VENV)/.dev $(TRITONS)  ## GPU kernels, by that Triton
	PYTHONPATH=$(VENV)/triton-$(TRITON) \
	  $(BIN)/python tests/cpu/compile_kernels.py --quiet $(or $(ARGS),sm_90 gfx942)

tritons: $(TRITONS)

$(VENV)/triton-%/.installed: | $(VENV)/.torch
	$(BIN)/python tools/install.py --quiet --no-deps --target $(@D) triton==$*
	@touch $@

lint: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

contracts: $(VENV)/.dev
	$(BIN)/lint-imports

docs: $(VENV)/.docs   ## the rendered documentation, in build/site; every link is checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

check: lint types contracts docs test-install test

sbom:                 ## the components of the wheel's environment, CycloneDX, in build/
	rm -rf build/sbom
	$(PYTHON) -m venv build/sbom/tool && $(PYTHON) -m venv build/sbom/wheel
	build/sbom/tool/bin/python -m pip install --quiet build "cyclonedx-bom>=7,<8"
	build/sbom/tool/bin/python -m build --wheel --outdir build/sbom/dist .
	build/sbom/wheel/bin/python tools/install.py --torch "$(TORCH)"
	build/sbom/wheel/bin/python -m pip install --quiet -c constraints.txt build/sbom/dist/*.whl
	# a local path:
	rm build/sbom/wheel/lib/python*/site-packages/negamax-*.dist-info/direct_url.json
	build/sbom/wheel/bin/python -m pip uninstall --quiet --yes pip
	build/sbom/tool/bin/cyclonedx-py environment build/sbom/wheel --output-reproducible --validate \
	  --output-file build/negamax.cdx.json

constraints:          ## write down the versions that a fresh environment gets, to be tested
	rm -rf build/constraints
	$(PYTHON) -m venv build/constraints
	build/constraints/bin/python tools/install.py --torch "$(TORCH)"
	build/constraints/bin/python -m pip install --quiet -e ".[dev,docs,plot,ray,uvloop]"
	{ sed -n '/^#/p' constraints.txt; \
	  build/constraints/bin/python -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } \
	  > build/constraints.txt
	mv build/constraints.txt constraints.txt

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; say which: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: $(BIN)/python
	-$(BIN)/python -m pip install --disable-pip-version-check --quiet $(CONSTRAINTS) uv
	$(BIN)/python tools/install.py --torch "$(TORCH)"
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "Installing Negamax and what it needs: about 150 MB, once."
	$(INSTALL) -e . openai
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "Installing Negamax with its tests and linters: about 200 MB, once."
	$(INSTALL) -e ".[dev]"
	@touch $@ $(VENV)/.demo

$(VENV)/.ray: $(VENV)/.dev
	@echo "Installing Ray: about 75 MB, once."
	$(INSTALL) -e ".[ray]"
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(INSTALL) -e ".[docs]"
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
