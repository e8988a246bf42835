PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: venv demo test test-all check lint bench docs mutants clean

venv: $(READY)

# constraints.txt pins every version that CI has seen; pyproject.toml says what is needed and why. Bytecode is made when a
# module is first imported, as most never are, and kept even where the shell says not to: without it every process
# compiles JAX and pandas anew, for seconds.
unexport PYTHONDONTWRITEBYTECODE
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(READY)
	$(BIN)/noisecast demo

# A file is one worker's: what a module sets up, and what is compiled for it, is done once. A worker is one core's: more
# threads of its linear algebra would wait for the other worker's.
test test-all: export OPENBLAS_NUM_THREADS ?= 1

test: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow"

test-all: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

check: lint
	$(BIN)/python -m pytest -q tests/test_layers.py

# Warnings are errors; no network is needed.
docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

bench: $(READY)
	$(BIN)/python -m benchmarks

# Planted bugs, and which check sees each.
mutants: $(READY)
	$(BIN)/python -m mutants

clean:
	rm -rf $(VENV) docs/_build .pytest_cache .ruff_cache noisecast-demo
