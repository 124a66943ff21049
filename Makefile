# SPDX-License-Identifier: Apache-2.0
# `make` lists the targets. Set-up happens by itself and only once.

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MADE_VENV := $(VENV)/.made-venv
MADE_TORCH := $(VENV)/.made-torch-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
MADE_PACKAGES := $(VENV)/.made-packages
MADE_HOROVOD := $(VENV)/.made-horovod

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test check format doctor build bench-resize clean

help: ## List the targets
	@echo 'make TARGET [PYTHON=python3.12] [TORCH=torch==2.13.0] [ARGS=...]'
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' Makefile | expand -t 18

venv: $(MADE_HOROVOD) ## Set up .venv with torch, Horowatt and Horovod (first time: 5 to 10 minutes)

demo: venv ## Run the demo: three tenants, four GPUs, real Horovod (up to 5 minutes)
	@$(BIN)/horowatt demo $(ARGS)

test: venv ## Run all tests, those with real Horovod processes last (up to 25 minutes)
	@echo 'running the tests in tests/: fast ones first, then those with real Horovod processes'
	@$(BIN)/python -m pytest --verbose --durations=10 $(ARGS)

check: venv ## Lint, formatting, types and layers (about a minute)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## Format the sources and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

doctor: venv ## Say what works on this machine, and what to do about what does not
	@$(BIN)/horowatt doctor $(ARGS)

build: venv ## Build the wheel into dist/
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

bench-resize: venv ## Measure pauses of resizes beside stock Horovod, commits, idle cost, a soak (25 minutes; ARGS=--quick: 5)
	@$(BIN)/python bench/resize.py $(ARGS)

clean: ## Remove .venv and everything made here; built Horovod wheels stay in their cache
	rm -rf $(VENV) dist build demo-out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(MADE_VENV):
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo 'error: $(PYTHON) not found; install Python 3.11 to 3.13 (Debian: apt-get install python3) or set PYTHON=' >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	  echo "error: Horowatt needs Python 3.11 to 3.13, $(PYTHON) is $$('$(PYTHON)' -V 2>&1); try: make PYTHON=python3.12" >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo 'error: $(PYTHON) cannot make virtual environments; Debian: apt-get install python3-venv' >&2; exit 1; }
	@echo '[1/4] virtual environment in .venv (seconds)'
	@'$(PYTHON)' -m venv $(VENV)
	@PYTHONPATH=runtime $(BIN)/python -c 'from horowatt.horovod_build.toolchain import main; main()'
	@$(PIP) install --quiet 'pip>=25.1'
	@touch $@

$(MADE_TORCH): $(MADE_VENV)
	@echo '[2/4] $(TORCH) (a download of 0.2 GB for CPUs, of about 3 GB with CUDA: minutes)'
	@$(PIP) install '$(TORCH)'
	@rm -f $(VENV)/.made-torch-*
	@touch $@

$(MADE_PACKAGES): $(MADE_TORCH) pyproject.toml
	@echo '[3/4] Horowatt and what it, its tests and its examples need (about a minute)'
	@$(PIP) install --quiet --editable '.[head]' --group dev --group examples
	@touch $@

$(MADE_HOROVOD): $(MADE_PACKAGES) $(wildcard runtime/horowatt/horovod_build/*.py)
	@echo '[4/4] Horovod for this torch (about 4 minutes the first time, seconds when it is in the cache)'
	@$(BIN)/horowatt build-horovod >/dev/null
	@touch $@
