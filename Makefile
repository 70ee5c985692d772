# Everything a contributor or CI does. `make` alone lists it. Needs Python 3.11 or newer, make, and,
# for the real Collector and Jaeger that `make test` builds once, Go.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# A virtual environment is made again only when what it is made from has changed.
READY  := $(VENV)/.ready
LOWEST := .venv-lowest
WHEEL  := .venv-wheel

# Tests that need neither torch nor the built Collector and Jaeger: what the lowest versions must pass.
LIGHT_TESTS := tests/unit tests/detectors tests/architecture --ignore=tests/unit/instrument \
               --ignore=tests/unit/stack -m "not multiproc and not gpu"

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo stack test lint format types imports semconv semconv-check docs check \
        wheel-test lowest verdicts robustness accuracy accuracy-quick bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with the package, torch and every tool, at the versions CI tests (5 GB)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
	  --editable '.[service,instruments]' --group dev
	touch $@

demo: setup ## train on this machine with one slow rank, and have it found
	$(BIN)/argus demo

stack: setup ## build the Collector and Jaeger (7 minutes once; kept in ~/.cache/argus-otel/stack)
	$(BIN)/argus stack build

test: setup stack ## every test: the quick ones first, then those with a real Collector and Jaeger
	$(BIN)/python -m pytest

lint: setup ## style, format, spelling, YAML, pyproject, declared dependencies
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/yamllint --strict .
	$(BIN)/codespell
	$(BIN)/validate-pyproject pyproject.toml
	$(BIN)/deptry src

format: setup ## put the code into the house format
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

types: setup ## mypy, strict
	$(BIN)/mypy

imports: setup ## who may import whom
	$(BIN)/lint-imports

semconv: setup ## make names.py and the reference pages from the registry and the settings
	$(BIN)/python -m argus_otel.semconv.generate docs/reference/telemetry.md
	$(BIN)/python -m argus_otel.settings > docs/reference/settings.md
	$(BIN)/python -m argus_otel.cli.reference > docs/reference/cli.md
	$(BIN)/python -m argus_otel.detect.pages docs/reference/causes

semconv-check: setup ## are both up to date?
	$(BIN)/python -m pytest -q tests/architecture/test_registry.py tests/contract/test_cause_pages.py

docs: setup ## build the documentation into site/; a broken link fails
	$(BIN)/zensical build --clean --strict

# The wheel is built from the source distribution, so a file that either lacks shows here. It runs
# from /, so that nothing of the checkout can help it.
wheel-test: setup ## build sdist and wheel, install the wheel in an empty environment, run it from there
	rm -rf dist $(WHEEL)
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(WHEEL)/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd / && $(CURDIR)/$(WHEEL)/bin/python $(CURDIR)/tests/wheel.py

lowest: $(LOWEST)/.ready ## the tests that need no torch and no Collector, at the lowest versions we allow
	$(LOWEST)/bin/python -m pytest $(LIGHT_TESTS)

$(LOWEST)/.ready: pyproject.toml constraints-lowest.txt
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --constraint constraints-lowest.txt --upgrade pip
	$(LOWEST)/bin/python -m pip install --quiet --constraint constraints-lowest.txt \
	  --editable '.[service]' --group test
	touch $@

verdicts: setup ## 8 real jobs, healthy and with a slow rank: is the verdict right? (4 minutes)
	$(BIN)/python bench/verdicts.py --quick --again

robustness: setup ## real jobs with a slow rank, input, GC, compilation, a slow link (root, iproute2), and healthy twins (10 minutes)
	$(BIN)/python bench/robustness.py --again

accuracy: setup ## how often the detectors are right, on 2,600 simulated jobs (an hour; QUICK=1: 3 minutes)
	$(BIN)/python bench/accuracy $(if $(QUICK),--quick)

accuracy-quick: setup
	$(BIN)/python bench/accuracy --quick

check: lint types imports semconv-check docs wheel-test lowest test verdicts accuracy-quick ## all that CI runs

bench: setup ## the measurements that the documentation quotes, into bench/results (leave the machine idle)
	$(BIN)/python bench/all.py
	$(BIN)/python bench/page.py

clean: ## remove what was built, and the small environments; .venv and the Go builds stay
	rm -rf build dist site $(LOWEST) $(WHEEL) .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .import_linter_cache .benchmarks
	find src tests detectors -name __pycache__ -type d -prune -exec rm -rf {} +
