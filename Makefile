# Each target except clean and help makes its own virtual environment, from requirements.txt, on a machine that has only python3
# and make.
#   make help       lists the targets
#   make run        trains a 2:4 Vision Transformer on digits, and shows it; make run CONFIG=configs/gpt_sste.py another
#   make test       the fast tests, on every core: about five minutes on two
#   make test-all   all tests, also those that interpret kernels, start processes or take long, with some of their cases: about half an hour on two
#   make test-every   all cases of all tests, and all notebooks. A workflow does this once a week
#   make test-docs  the tests of the site, which need Sphinx
#   make test-tpu   compiles for TPUs without a TPU, and compares bytes and memory with their limits. Downloads libtpu, 210 MB
#   make test-thirdparty  trains 2:4 layers of Tunix, MaxText and gemma; MiniLM. Needs Python 3.12; installs 410 MB
#   make bench      what pruning costs on this machine: of arrays, in copies; of models and runs, against dense ones
#   make gpu        nine minutes of what waits for a GPU, most valuable first; again goes on. Installs jax[cuda13]
#   make gallery    runs most config files that need no download, and makes one index of their reports (half an hour on two)
#   make notebooks  runs the notebooks again, and writes what they print and draw
#   make docs       builds the site into docs/_build/html. A warning is an error
#   make dist       builds the wheel, and installs it into an empty environment; TAG=v0.2.0 must be its version
#   make check-dist  checks a wheel in dist that is built already
#   make lint       formatting, lint, types, also of the snippets in pages, and the files of GitHub
#   make lint-types   the types only
#   make lint-snippets   the types of the snippets in README.md and docs/ only, as pyright and mypy see them
#   make lint-github  the files of GitHub only, and CITATION.cff
#   make format     formats all files, and mends what the linter can mend
#   make clean      removes the virtual environment
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= auto
CONFIG ?= configs/vit_24.py
export TAG := $(value TAG)
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

.DEFAULT_GOAL := run
.PHONY: help run test test-all test-every test-docs test-tpu test-thirdparty bench gpu gallery notebooks docs dist check-dist lint lint-types lint-snippets lint-github format clean

help:
	@sed -n 's/^#   //p' Makefile

run: $(VENV)/made
	$(BIN)/python launch.py --config=$(CONFIG)

test: $(VENV)/made
	$(PYTEST) -m "not (kernels or processes or notebooks or slow)"

test-all: $(VENV)/made
	$(PYTEST) -m "not rare"

test-every: $(VENV)/made
	$(PYTEST)

test-docs: $(VENV)/docs-made
	$(BIN)/python -m pytest -q tests/site_test.py

test-tpu: $(VENV)/tpu-made
	PYTHONPATH=$(VENV)/tpu JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q tests/tpu $(ARGS)

test-thirdparty: $(VENV)/thirdparty-made
	$(BIN)/python -m pytest -q tests/thirdparty $(ARGS)

bench: $(VENV)/made
	$(BIN)/python -m experiments.bench transforms
	$(BIN)/python -m experiments.bench delivery
	$(BIN)/python -m experiments.bench train

gpu: $(VENV)/gpu-made
	$(BIN)/python -m experiments.bench silicon --out silicon --minutes 9

gallery: $(VENV)/made
	$(BIN)/python -m experiments.gallery

notebooks: $(VENV)/made
	$(BIN)/python -m tests.notebooks_test

docs: $(VENV)/docs-made
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

dist: $(VENV)/made
	rm -rf build dist
	$(BIN)/python -m build --outdir dist
	$(MAKE) check-dist

check-dist: $(VENV)/made
	$(BIN)/python -m tests.wheel_test dist "$$TAG"

lint: lint-types lint-snippets lint-github
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

lint-types: $(VENV)/made
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/pyrefly check --config pyrefly-strict.toml --python-interpreter-path $(BIN)/python

lint-snippets: $(VENV)/made
	$(BIN)/python -m tests.snippets

lint-github: $(VENV)/made
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/idea.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --quiet --config .github/zizmor.yml .github/workflows

format: $(VENV)/made
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV)

$(VENV)/made: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/tpu-made: $(VENV)/made
	$(BIN)/python -c "import importlib.metadata as m; print(next(r.split(';')[0] for r in m.requires('jax') if r.startswith('libtpu')))" > $(VENV)/libtpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/tpu -r $(VENV)/libtpu.txt
	touch $@

$(VENV)/gpu-made: $(VENV)/made
	$(BIN)/python -c "import importlib.metadata as m; print('jax[cuda13]==' + m.version('jax'))" > $(VENV)/gpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(VENV)/gpu.txt
	touch $@

$(VENV)/thirdparty-made: tests/thirdparty/requirements.txt $(VENV)/made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/thirdparty/requirements.txt
	touch $@

$(VENV)/docs-made: $(VENV)/made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@
