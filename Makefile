# Each target does all of its own set-up: a fresh checkout needs only Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check chromium format third-party users clean

demo: .venv/demo.stamp  ## train two small networks, fit MCBN to both, write two figures to demo/
	$(BIN)/batchbayes demo --out demo

test: .venv/dev.stamp chromium  ## everything that CI checks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

check: test

# The browser test needs one; without it that test is skipped, and says so.
chromium:
	@command -v chromium >/dev/null || test "$$(id -u)" != 0 || \
		{ apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null 2>&1 || true

format: .venv/dev.stamp  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

third-party: .venv-third-party/stamp  ## MCBN on networks of timm and segmentation-models-pytorch
	OMP_NUM_THREADS=1 .venv-third-party/bin/python benchmarks/third_party.py

users: .venv-users/stamp  ## the seven users of examples/users, and pandas, MAPIE, Parquet and Zarr beside batchbayes
	OMP_NUM_THREADS=1 .venv-users/bin/pytest -n0 -m slow tests/test_users.py
	OMP_NUM_THREADS=1 .venv-users/bin/pytest -n auto tests/sklearn tests/data tests/assessment/test_parts.py
	OMP_NUM_THREADS=1 .venv-users/bin/pytest -n0 tests/methods/weights/test_third_party_networks.py

clean:
	rm -rf .venv .venv-third-party .venv-users demo .pytest_cache .ruff_cache .hypothesis

.venv/pyvenv.cfg:
	$(PYTHON) -m venv .venv

.venv/demo.stamp: .venv/pyvenv.cfg pyproject.toml constraints.txt
	$(INSTALL) -e '.[demo]'
	touch $@

.venv/dev.stamp: .venv/pyvenv.cfg pyproject.toml constraints.txt
	$(INSTALL) -e '.[dev]'
	touch $@ .venv/demo.stamp

# An environment of its own: the torchvision that these networks import breaks other packages.
.venv-third-party/stamp: pyproject.toml constraints.txt constraints-third-party.txt
	$(PYTHON) -m venv .venv-third-party
	.venv-third-party/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		-c constraints-third-party.txt -e . timm segmentation-models-pytorch
	touch $@

.venv-users/stamp: pyproject.toml constraints.txt constraints-third-party.txt
	$(PYTHON) -m venv .venv-users
	.venv-users/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		-c constraints-third-party.txt -e '.[dev]' timm segmentation-models-pytorch lightning transformers pandas \
		mapie pyarrow zarr
	touch $@
