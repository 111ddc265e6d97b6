# Needs python3 (3.11 or newer) with pip, and make. Everything goes into .venv; delete it to start again.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo install test check test-all docs clean

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q -c constraints.txt
PYTEST = $(BIN)/python -m pytest

help: ## Print this help
	@echo "Usage: make TARGET [PYTHON=python3.12] [ARGS=…]"
	@echo
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) \
		| while IFS="$$(printf '\t')" read -r target text; do printf '  %-10s %s\n' "$$target" "$$text"; done

demo: $(VENV)/.installed ## Compare FedDD with three other methods (ARGS goes to `feddd run`)
	$(BIN)/feddd run $(ARGS)

install: $(VENV)/.installed-test ## Install the package and all that the tests need into .venv

test: $(VENV)/.installed-test ## Run the tests, without the slow ones (ARGS goes to pytest)
	$(PYTEST) -n $(WORKERS) -m "not slow" $(ARGS)

check: $(VENV)/.installed-test ## Check format, lint, types and the direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py -k imports

test-all: $(VENV)/.installed-test ## Run all tests, also the slow ones; a skipped test is a failure
	@# One more than there are cores: some of the slow ones mostly wait for processes of theirs.
	$(PYTEST) -n $$(($(WORKERS) + 1)) --no-skips $(ARGS)

docs: $(VENV)/.installed-test ## Build the documentation into build/docs; a warning is an error
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs

clean: ## Remove .venv and everything that was built; runs/ stays
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests examples tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "feddd needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12 …")'
	@echo "Making a virtual environment in $(VENV)"
	@# Some systems ship python3 and pip without what venv needs to bring a pip of its own: lend it ours.
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null && $(PYTHON) -m venv $(VENV) \
		|| { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $@ install -q pip; }

# An installation is repeated only when what is to be installed has changed.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing feddd and what it needs (a few minutes the first time)"
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt $(VENV)/.installed
	@echo "Installing what the tests need"
	@$(PIP_INSTALL) -e '.[test]'
	@touch $@
