# Everything runs from .venv, which `make setup` creates from the tested versions in constraints.txt.
# CONSTRAINTS=/dev/null takes the newest versions that pyproject.toml allows, CONSTRAINTS=tests/oldest.txt the oldest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test pytest kernels test-slow test-faults test-gpu test-integrations docs dist lint types bench bench-setup bench-long clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install dssl with what its tests need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dssl needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing dssl and its dependencies into $(VENV): about 2 minutes, more over a slow network"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

demo: $(STAMP) ## run the main job on built-in data
	@echo "training three runs on built-in images: a few minutes on two idle cores"
	@$(BIN)/dssl demo

test: $(STAMP) lint ## lint, types and the test suite (at most 8 minutes on two cores)
	@$(MAKE) --no-print-directory -j2 types kernels
	@$(MAKE) --no-print-directory pytest

pytest: $(STAMP) kernels # the tests alone
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not faults and not gpu"

test-slow: $(STAMP) ## tests that take minutes each
	$(BIN)/python -m pytest -m "slow and not gpu"

test-faults: $(STAMP) ## the long fault injections, with counts: tried, survived, lost (half an hour on two idle cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m faults

test-gpu: $(STAMP) ## what only GPUs can show, with a table to paste (10 minutes on two GPUs)
	$(BIN)/python -m pytest tests/gpu -m gpu

# it sees the packages of .venv, so that everybody runs on the same torch
INTEGRATIONS := .venv-integrations
INTEGRATED := lightning transformers accelerate datasets wandb mlflow trackio huggingface_hub lightly ipykernel

$(INTEGRATIONS)/.installed: $(STAMP) tests/integrations/constraints.txt
	test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	$(BIN)/python -c "import sys; print(*(path for path in sys.path if path.endswith('site-packages')), sep='\n')" \
	  > "$$($(INTEGRATIONS)/bin/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")/main.pth"
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check -c tests/integrations/constraints.txt $(INTEGRATED)
	@touch $@

test-integrations: $(INTEGRATIONS)/.installed ## Lightning, Hugging Face, trackers and lightly, in an environment of their own
	$(INTEGRATIONS)/bin/python -m pytest tests/integrations tests/test_notebook.py tests/data/test_objects.py

$(DOCS_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@

docs: $(DOCS_STAMP) ## the documentation site, into docs/_build (warnings are errors)
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html docs docs/_build
	@echo "open docs/_build/index.html"

dist: $(STAMP) ## sdist and wheel, installed into a new environment and tried there (5 minutes)
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv dist/.venv
	dist/.venv/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) dist/*.whl
	cd dist && .venv/bin/python ../tests/installed.py

lint: $(STAMP) ## ruff (errors, imports, format) and the words of the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/style.py

types: $(STAMP) ## mypy --strict
	$(BIN)/mypy

kernels: $(STAMP) # compiled while mypy runs, so that no test waits for them
	@$(BIN)/python -c "from dssl.augment.kernels.program import load_kernels; load_kernels(); from dssl.data.shapes import Shapes; Shapes(1)"

BENCH = $(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY)) $(if $(PHOTOS),--photos $(PHOTOS)) $(if $(CIFAR10),--cifar10 $(CIFAR10))

bench-setup: $(STAMP) ## the peers for the benchmarks, into benchmarks/.venv
	$(BIN)/python -m benchmarks.setup

bench: $(STAMP) ## side-by-side measurements, half an hour (ONLY=views, PHOTOS=folder, CIFAR10=folder)
	$(BENCH)

bench-long: $(STAMP) ## growth, memory and shards, 20 minutes
	$(BENCH) --long

clean: ## remove .venv and caches
	rm -rf $(VENV) $(INTEGRATIONS) .mypy_cache .ruff_cache .pytest_cache .hypothesis build docs/_build docs/reference/generated *.egg-info
