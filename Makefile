# `make help` lists the targets. Everything is installed into .venv, once; nothing outside the checkout is changed.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Interpreter for .venv; empty means the first of python3.11, python3.12, python3 that fits.
PYTHON ?=
# Asked for the CPU build of torch when the pip configuration does not know it.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

RUN := .venv/bin/python
PACKAGES := trl_offpolicy $(wildcard lightning_module)
# What accelerate would take as defaults anyway, said so that it does not warn about them.
ONE_PROCESS := --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no
BENCHMARKS := $(sort $(filter-out benchmarks/allocator.py benchmarks/async_queue.py,$(wildcard benchmarks/*.py)))
MUTMUT := 3.8.1

export PYTHON TORCH_CPU_INDEX
# What DeepSpeed compiles is kept, not made again for every test.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.cache/torch_extensions
# No usage statistics from vLLM and the Hub client.
export DO_NOT_TRACK := 1

# Test processes side by side, as many as there are cores; `make test WORKERS=0` runs all tests in one.
WORKERS ?= auto
PYTEST := $(RUN) -m pytest -n $(WORKERS) --maxprocesses=8 --durations=10

.PHONY: help install quickstart test fast-tests test-integration test-all test-slow mutate lint docs notebooks learn bench model clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

quickstart: model  ## install, prepare the model, train with measured and corrected rollouts (CPU, 5 to 10 minutes in all)
	.venv/bin/accelerate launch $(ONE_PROCESS) recipes/grpo.py --config recipes/quickstart/config.yaml

test: .venv/.test-ready  ## lint, types, fast tests and docstring examples (7 to 11 minutes on two cores)
	@$(MAKE) --no-print-directory -j2 lint fast-tests

fast-tests: .venv/.test-ready
	$(PYTEST) --dist worksteal tests $(PACKAGES) --doctest-modules

test-integration: .venv/.test-ready  ## the tests that train, compile, or start processes or a vLLM engine
	$(PYTEST) --dist loadfile tests -m "integration and not slow and not gpu"

test-all: test test-integration  ## what CI runs

test-slow: .venv/.slow-ready model  ## the long tests (servers, sharded strategies, recipes; hours)
	PROPERTY_EXAMPLES=20 $(PYTEST) --dist worksteal tests/test_properties.py
	$(PYTEST) --dist loadfile tests -m "slow and not gpu" --timeout 1800

mutate: .venv/.test-ready  ## mutation testing of functional/ and correction/correction.py (an hour; goes on where it stopped)
	$(RUN) -m pip install --quiet mutmut==$(MUTMUT)
	OMP_NUM_THREADS=1 $(RUN) -m mutmut run --max-children 2
	$(RUN) scripts/mutation_report.py

lint: .venv/.test-ready  ## ruff and mypy --strict
	$(RUN) -m ruff check .
	$(RUN) -m mypy --strict $(PACKAGES)

docs: .venv/.test-ready  ## build the docs site into site/ (no network; open site/index.html)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

notebooks: .venv/.slow-ready model  ## what the notebooks of docs/notebooks need; then .venv is their kernel

learn: model  ## train until the reward rises, and show it
	$(RUN) recipes/quickstart/learn.py

bench: .venv/.cpu-ready  ## run every script in benchmarks/
	@test -n "$(BENCHMARKS)" || { echo "There is no script in benchmarks/."; exit 1; }
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(RUN) $$script; done

install: .venv/.cpu-ready  ## only install the pinned CPU environment into .venv

model: .venv/.cpu-ready
	@$(RUN) recipes/quickstart/prepare_model.py

.venv/.slow-ready: .venv/.test-ready constraints/slow.txt
	$(RUN) -m pip install --quiet --no-deps -r constraints/slow.txt
	@touch $@

clean:  ## remove .venv and caches (runs/ and the prepared model stay)
	rm -rf .venv site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# Stamps: an installation is repeated only when the list of packages changed or the last one did not finish.
.venv/.cpu-ready: constraints/cpu.txt pyproject.toml scripts/setup_cpu.sh
	@scripts/setup_cpu.sh cpu
	@touch $@

.venv/.test-ready: .venv/.cpu-ready constraints/test.txt constraints/docs.txt
	@scripts/setup_cpu.sh test
	@touch $@
