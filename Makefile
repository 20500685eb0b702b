# Two commands matter: `make demo` (see a model learn) and `make test` (everything that is checked).
# Both work in an empty environment: they make .venv, install what they need once, then run.

PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,\
	$(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt Makefile

.DEFAULT_GOAL := help
.PHONY: help demo demo-clean test lint format crash crash-fuse crash-repairs coverage faults callfaults kills realfaults damage mutation exactness bench import-real consumers clean python-check serve-soak serve-npm
.DELETE_ON_ERROR:

help: ## This list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## Train a small model on real text, kill it, resume it (TEXT=path for your own text)
	@$(BIN)/python -m tools.demo

demo-clean: $(VENV)/.installed ## Delete what `make demo` made
	@$(BIN)/python -m tools.demo --clean

test: lint ## Lint, types, then every test
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-test ## Lint, format and strict types, without changing anything
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/.installed-test ## Format the sources and mend what can be mended by itself
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

crash: $(VENV)/.installed-test ## Explore crashes at length (CRASH_ARGS for the command's own flags)
	@$(BIN)/python -m tools.crash $(CRASH_ARGS)

REPAIR_IMAGES ?= 12
crash-repairs: $(VENV)/.installed-test ## Crash repairs, and the repairs of those (REPAIR_IMAGES)
	@REPAIR_IMAGES=$(REPAIR_IMAGES) $(BIN)/python -m pytest -q -rP tests/crash/test_repair_crashes.py

coverage: $(VENV)/.installed-test ## Commit, recovery, gc, fsck, repair, leases: is every branch tested?
	@$(BIN)/python -m tools.coverage_gate

exactness: $(VENV)/.installed-test ## Compare every way of training with training in memory (EXACTNESS_ARGS)
	@$(BIN)/python -m tools.exactness $(EXACTNESS_ARGS)

SOAK_SECONDS ?= 180
serve-soak: $(VENV)/.installed-test ## Train and serve at once for minutes; every answer is checked
	@$(BIN)/python -m tools.serve_soak --seconds $(SOAK_SECONDS)

serve-npm: $(VENV)/.installed-test ## Run the npm client against the server (needs node and npm)
	@npm install --silent --no-save --prefix .cache/npm openai
	@NODE_PATH=$(CURDIR)/.cache/npm/node_modules $(BIN)/python -m pytest -q \
	  tests/integration/test_serve_openai_npm.py

faults: $(VENV)/.installed-test ## Fail every file operation of every verb with every error (FAULTS_ARGS)
	@$(BIN)/python -m tools.crash_faults $(FAULTS_ARGS)

callfaults: $(VENV)/.installed-test ## Fail system calls of a real train (needs strace; CALLFAULTS_ARGS)
	@$(BIN)/python -m tools.crash_calls $(CALLFAULTS_ARGS)

kills: $(VENV)/.installed-test ## Kill thousands of real processes at random moments (KILLS_ARGS)
	@$(BIN)/python -m tools.crash_kills $(KILLS_ARGS)

realfaults: $(VENV)/.installed-test ## Cut the power of real file systems, and fill them (needs root)
	@$(BIN)/python -m tools.crash_devices $(REALFAULTS_ARGS)

crash-fuse: $(VENV)/.installed-test ## Lose what is not synced under a trainer (needs root, libfuse, mfusepy)
	@$(BIN)/python -m tools.crash_fuse $(FUSE_ARGS)

DAMAGE_OFFSETS ?= 64
damage: $(VENV)/.installed-test ## Damage every kind of file at many places (DAMAGE_OFFSETS, DAMAGE_SEED)
	@DAMAGE_OFFSETS=$(DAMAGE_OFFSETS) $(BIN)/python -m pytest -q tests/damage

mutation: $(VENV)/.installed-test ## Plant faults in a copy of the engine; the tests must fail
	@$(BIN)/python -m tools.mutation $(MUTATION_ARGS)

BENCH_DIR ?= /tmp
bench: $(VENV)/.installed-test ## Measure the store beside its peers (BENCH_DIR: the disk to measure)
	@$(BIN)/python -m tools.bench.store_commit --dir $(BENCH_DIR)
	@$(BIN)/python -m tools.bench.store_read --dir $(BENCH_DIR)
	@$(BIN)/python -m tools.bench.store_copy --source $(BENCH_DIR) --target $(BENCH_DIR)
	@$(BIN)/python -m tools.bench.long_history --dir $(BENCH_DIR)
	@$(BIN)/python -m tools.bench.engine_overhead
	@$(BIN)/python -m tools.bench.serve_resident

import-real: $(VENV)/.installed-test ## Import real models and compare (SHARDB_DATA: corpora and models)
	@$(BIN)/python -m tools.import_real $(IMPORT_ARGS)

consumers: $(VENV)/.installed-test ## Load our packages with transformers 4 and 5, vLLM, llama.cpp (CONSUMERS_ARGS)
	@$(BIN)/python -m tools.consumers $(CONSUMERS_ARGS)

clean: ## Delete .venv and every cache; runs and stores are not touched
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

python-check:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none is on the PATH." \
	  "Install one, or name it: make demo PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	  "Name a newer one: make demo PYTHON=/path/to/python3.11"; exit 2; }

$(BIN)/python: | python-check
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "could not make $(VENV): Python's venv module is needed (Debian: python3-venv)"; exit 2; }

$(VENV)/.installed: $(INPUTS) | $(BIN)/python
	@echo "installing the package into $(VENV): once, a few minutes"
	@$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-test: $(INPUTS) | $(BIN)/python
	@echo "installing the package and its test tools into $(VENV): once, a few minutes"
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $(VENV)/.installed $@
