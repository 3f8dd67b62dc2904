# make run         train the default federation (other settings: make run ARGS="--set federation.clients=40")
# make test        run the tests, in two processes (in one, as --pdb needs it: make test WORKERS=0)
# make test-fast   those that are not marked slow, in under two minutes
# make check       lint, formatting, types and layers
# make docs        the documentation, into site/: open site/index.html
# make bench       the CPU figures of docs/measured/cpu.md
PYTHON ?= python3
ARGS ?=
WORKERS ?= 2
VENV := .venv
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs

.PHONY: run test test-fast check docs bench clean

$(VENV): $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,text]'
	@touch $(VENV) $@

run: $(STAMP)
	$(VENV)/bin/cyber0 run $(ARGS)

test: $(STAMP)
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-fast: $(STAMP)
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not mnist" $(ARGS)

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --strict src
	$(VENV)/bin/lint-imports --no-logo

$(DOCS_STAMP): $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

bench: $(STAMP)
	$(VENV)/bin/python benchmarks/cpu.py $(ARGS)

clean:
	rm -rf $(VENV) site build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
