# What a person runs: `make demo`, `make test`. Everything goes into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# More arguments for pip. On x86-64 the default build of torch carries CUDA (several GB); PyTorch's install page
# names an index of CPU-only builds: make demo PIP_ARGS='--extra-index-url URL'
PIP_ARGS ?=
STAMP  := $(VENV)/.installed-$(shell cksum pyproject.toml | cut -d' ' -f1)

.PHONY: demo test check static install clean

demo: install
	$(BIN)/dflash-console demo

test: install
	$(BIN)/python -m pytest

check: static test

static: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "error: $$($(PYTHON) --version) found, 3.11 to 3.13 needed; try: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[engine,dev]'
	@rm -f $(VENV)/.installed-*
	@touch $(STAMP)

clean:
	rm -rf $(VENV)
