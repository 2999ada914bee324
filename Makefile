# Every target uses the Python of the environment it is called from: activate one, or `make check PYTHON=path/to/python`.
PYTHON ?= python
# For example `make test PYTEST_FLAGS="-n 4 -m 'not slow'"`.
PYTEST_FLAGS ?=

.PHONY: help install check lint types spelling test format

help:
	@echo "install   this package, editable, with what its tests need"
	@echo "check     everything CI checks: lint, types, spelling, the whole test suite"
	@echo "test      the whole test suite, slow tests included"
	@echo "format    rewrite the code in the house style"

install:
	$(PYTHON) -m pip install -e '.[dev,alfworld,scienceworld,tau2,webshop,peft]'

# The tests come last: their closing lines are the last thing a reader of the log sees.
check:
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory spelling
	@$(MAKE) --no-print-directory test

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

spelling:
	$(PYTHON) -m codespell_lib .

test:
	$(PYTHON) -m pytest $(PYTEST_FLAGS)

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
