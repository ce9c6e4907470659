# Each target does all of its own set-up: a fresh checkout needs only Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
PROJECTS := pyproject.toml tables/pyproject.toml serve/pyproject.toml papers/pyproject.toml
# The variables hold for the environments too in which pip builds our packages; which one depends on its version.
INSTALL := PIP_CONSTRAINT=constraints-lock.txt PIP_BUILD_CONSTRAINT=constraints-lock.txt \
	$(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test docs release-check check chromium format lock third-party users clean

demo: .venv/demo.stamp  ## train two small networks, fit MCBN to both, write two figures to demo/
	$(BIN)/batchbayes demo --out demo

test: .venv/dev.stamp chromium  ## everything that CI checks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

docs: .venv/docs.stamp chromium  ## the documentation site, in docs/_build/html; warnings and dead links are errors
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	$(BIN)/python docs/tools/site_check.py docs/_build/html
	@echo "open docs/_build/html/index.html"

release-check:  ## build sdist and wheel, and use the wheel in empty environments; VERSIONS=--lowest for old packages
	$(PYTHON) .ci/release_check.py $(VERSIONS)

check: test

# The browser test needs one; without it that test is skipped, and says so.
chromium:
	@command -v chromium >/dev/null || test "$$(id -u)" != 0 || \
		{ apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null 2>&1 || true

format: .venv/dev.stamp  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# It keeps versions that still fit, for all systems and Pythons; CUDA is left out. UPGRADE=--upgrade takes the newest.
lock:  ## write constraints-lock.txt anew: constraints.txt, and the versions of all that is needed by it
	test -x .venv-lock/bin/uv || { $(PYTHON) -m venv .venv-lock && .venv-lock/bin/pip install --quiet uv; }
	printf '%s\n' '-e .[dev,docs]' '-e ./tables' '-e ./serve' '-e ./papers[rl]' hatchling build twine | .venv-lock/bin/uv pip compile --quiet \
		--universal --python-version 3.11 --no-annotate --custom-compile-command 'make lock' $(UPGRADE) \
		--no-emit-package batchbayes --no-emit-package batchbayes-papers \
		--no-emit-package batchbayes-tables --no-emit-package batchbayes-serve -c constraints.txt - -o constraints-lock.txt
	grep -vE '^(cuda|nvidia|triton)' constraints-lock.txt > .venv-lock/kept && mv .venv-lock/kept constraints-lock.txt

third-party: .venv-third-party/stamp  ## MCBN on networks of timm and segmentation-models-pytorch
	OMP_NUM_THREADS=1 .venv-third-party/bin/python benchmarks/third_party.py

users: .venv-users/stamp  ## the seven users of examples/users, and pandas, MAPIE, Parquet and Zarr beside batchbayes
	OMP_NUM_THREADS=1 .venv-users/bin/pytest -n0 -m slow tests/test_users.py
	OMP_NUM_THREADS=1 .venv-users/bin/pytest -n auto tables tests/report/read tests/report/test_parts.py
	OMP_NUM_THREADS=1 .venv-users/bin/pytest -n0 tests/methods/weights/test_third_party_networks.py

clean:
	rm -rf .venv .venv-lock .venv-release .venv-third-party .venv-users dist demo docs/_build docs/_generated docs/api
	rm -rf .pytest_cache .ruff_cache .hypothesis

.venv/pyvenv.cfg:
	$(PYTHON) -m venv .venv

.venv/demo.stamp: .venv/pyvenv.cfg $(PROJECTS) constraints-lock.txt
	$(INSTALL) -e '.[report]' -e tables -e serve -e 'papers[rl]'
	touch $@

.venv/dev.stamp: .venv/pyvenv.cfg $(PROJECTS) constraints-lock.txt
	$(INSTALL) -e '.[dev]' -e tables -e serve -e 'papers[rl]'
	touch $@ .venv/demo.stamp

.venv/docs.stamp: .venv/pyvenv.cfg $(PROJECTS) constraints-lock.txt
	$(INSTALL) -e '.[docs]' -e tables -e serve -e papers
	touch $@

# An environment of its own: the torchvision that these networks import breaks other packages.
.venv-third-party/stamp: pyproject.toml constraints.txt constraints-third-party.txt
	$(PYTHON) -m venv .venv-third-party
	.venv-third-party/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		-c constraints-third-party.txt -e . -e tables -e serve -e papers timm segmentation-models-pytorch
	touch $@

.venv-users/stamp: pyproject.toml constraints.txt constraints-third-party.txt
	$(PYTHON) -m venv .venv-users
	.venv-users/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		-c constraints-third-party.txt -e '.[dev]' -e tables -e serve -e papers timm segmentation-models-pytorch lightning transformers pandas \
		polars mapie pyarrow zarr
	touch $@
