# Each target does all of its own set-up: a fresh checkout needs only Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check format clean

demo: .venv/demo.stamp  ## train two small networks, fit MCBN to both, write two figures to demo/
	$(BIN)/batchbayes demo --out demo

test: .venv/dev.stamp  ## everything that CI checks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

check: test

format: .venv/dev.stamp  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv demo .pytest_cache .ruff_cache .hypothesis

.venv/pyvenv.cfg:
	$(PYTHON) -m venv .venv

.venv/demo.stamp: .venv/pyvenv.cfg pyproject.toml constraints.txt
	$(INSTALL) -e '.[demo]'
	touch $@

.venv/dev.stamp: .venv/pyvenv.cfg pyproject.toml constraints.txt
	$(INSTALL) -e '.[dev]'
	touch $@ .venv/demo.stamp
