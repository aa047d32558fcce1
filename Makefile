# the two commands of the README are `make demo` and `make test`; both make .venv when it is not there
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types unit docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/linrec demo --out runs/demo

test: lint types unit

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

# a worker for each core and a thread for each worker: with more threads than cores it takes three times as long
unit: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadgroup

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site runs/demo

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("linrec needs Python 3.10 or newer, got " + sys.version) if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)

# torch first and pinned: an unpinned one, pulled in by another package, may be a different build
$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@
