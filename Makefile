# Every target sets up .venv by itself. `make` alone lists them.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# A CPU build of torch is enough for everything here. Where the plain requirement brings a CUDA build of several
# gigabytes, point TORCH_INDEX at an index of CPU builds.
TORCH_SPEC ?= torch==2.13.0
TORCH_INDEX ?=
PYTEST_ARGS ?=

PY := .venv/bin/python
STAMP := .venv/.installed
EXECUTE := $(PY) -m nbconvert --to notebook --execute --ExecutePreprocessor.kernel_name=python3 \
	--ExecutePreprocessor.timeout=300 --output-dir build

# A python3 kernel that the person registered elsewhere must not be taken for the one in .venv.
export JUPYTER_PREFER_ENV_PATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help .venv demo notebooks test check fmt bench soak clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z.]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

.venv: $(STAMP) ## install the package and its tools in .venv

$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH_SPEC)"
	$(PY) -m pip install --quiet --editable ".[dev]"
	@touch $(STAMP)

demo: $(STAMP) ## run the quickstart notebook and print where the result is
	$(EXECUTE) --output 01_quickstart.executed.ipynb notebooks/01_quickstart.ipynb
	@echo "$(CURDIR)/build/01_quickstart.executed.ipynb"

notebooks: $(STAMP) ## run every notebook
	@set -e; for notebook in notebooks/*.ipynb; do \
		$(EXECUTE) --output "$$(basename "$$notebook" .ipynb).executed.ipynb" "$$notebook"; \
	done

test: $(STAMP) ## run the tests (PYTEST_ARGS="-k name" for some of them)
	$(PY) -m pytest --numprocesses=2 $(PYTEST_ARGS)

check: $(STAMP) ## lint, format, types and layers
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports --no-logo

fmt: $(STAMP) ## put the code into its usual form
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(STAMP) ## run every benchmark
	@set -e; for benchmark in benchmarks/[!_]*.py; do \
		echo "== $$benchmark"; $(PY) "$$benchmark"; \
	done

soak: $(STAMP) ## run the long repetitions
	$(PY) -m pytest -m soak --timeout=1800 $(PYTEST_ARGS)

clean: ## remove .venv and everything that was built
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
