# Everything runs inside .venv, which the first target that needs it creates. A fresh machine needs Python 3.11
# or later, pip and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Extras to install beside the package itself: the type checker and the tests look at every part of it.
EXTRAS := all,dev

.DEFAULT_GOAL := help
.PHONY: help setup demo digits test lint types fast slow gpu format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The stamp is older than its two inputs exactly when the installation may be out of date.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
		f"ocnopt needs Python 3.11 or later; $(PYTHON) is {v.major}.{v.minor}. Try: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

setup: $(STAMP) ## create .venv and install the package with its tools

demo: $(STAMP) ## compare OCNOpt with other optimizers on two small datasets; prints tables, writes an HTML report
	$(BIN)/ocnopt demo

digits: $(STAMP) ## the example: accuracy on the digits data against the learning rate; saves a plot
	$(BIN)/python examples/digits.py --out out/digits.png

test: lint types fast ## everything that must pass before a change is merged

# One process a core, one thread a process: the tests are many and small.
fast: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not gpu"

lint: $(STAMP) ## style and formatting (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## type checker (mypy, strict)
	$(BIN)/mypy

slow: $(STAMP) ## the tests that `make test` leaves out because they take long
	$(BIN)/python -m pytest -m "slow and not gpu"

gpu: $(STAMP) ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

format: $(STAMP) ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and everything that was generated
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
