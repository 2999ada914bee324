# Every target uses the Python of the environment it is called from: activate one, or `make check PYTHON=path/to/python`.
PYTHON ?= python
# For example `make test PYTEST_FLAGS="-n 4 -m 'not slow'"`.
PYTEST_FLAGS ?=
# Where `make test-vllm` keeps its own environment.
VLLM_VENV ?= .venv-vllm

.PHONY: help install check lint types spelling test test-vllm format

help:
	@echo "install   this package, editable, with what its tests need"
	@echo "check     everything CI checks: lint, types, spelling, the whole test suite"
	@echo "test      the whole test suite, slow tests included"
	@echo "test-vllm what needs vLLM, on its CPU backend, in an environment of its own"
	@echo "format    rewrite the code in the house style"

install:
	$(PYTHON) -m pip install -e '.[dev,alfworld,scienceworld,tau2,webshop,openenv,peft,deepspeed]'

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

test-vllm:
	$(PYTHON) tests/vllm_engine/install.py $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm_engine $(PYTEST_FLAGS)

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
