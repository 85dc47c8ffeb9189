# make help lists the targets. Each sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
# Where torch's CPU build comes from if pip finds none in the indexes it is configured with.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints-cpu.txt)

CPP := $(wildcard csrc/*.cpp csrc/*.hpp tests/native/*.cpp)

.PHONY: help demo test check quality format env clean
help:  # print this list
	@sed -n 's/^\([a-z]*\):.*  # \(.*\)/make \1	\2/p' Makefile | expand -t 16

demo: env  # run GRPO through veRL with speculation off and on, and compare
	$(BIN)/python examples/verl/demo.py

test: quality $(VENV)/newest  # run the quality checks and every test
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder

check: quality  # run the quality checks and the unit tests, in a minute or two
	$(BIN)/python -m pytest tests/unit -n 2

quality: env  # check formatting, lint, types and import rules, without a test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: env  # format Python and C++
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

env: $(VENV)/.built  # set up the environment in $(VENV)

$(VENV)/.installed: constraints-cpu.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "das-adapter needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)" -c constraints-cpu.txt 2>/dev/null || $(PIP) "$(TORCH)" --index-url $(TORCH_CPU_INDEX)
	$(PIP) -c constraints-cpu.txt $$($(BIN)/python tools/requirements.py verl-cpu dev)
	touch $@

# The newest vLLM CPU build, for the contract tests.
$(VENV)/newest: constraints-newest.txt | $(VENV)/.built
	$(PIP) --no-deps --target $@ --upgrade -r constraints-newest.txt
	PYTHONPATH=$@ $(BIN)/das-adapter cpu-setup
	touch $@

$(VENV)/.built: $(VENV)/.installed CMakeLists.txt das_adapter/__init__.py $(wildcard csrc/*)
	$(PIP) --no-deps --no-build-isolation --force-reinstall -e .
	$(BIN)/das-adapter cpu-setup
	touch $@

clean:  # remove the environment, builds and runs
	rm -rf $(VENV) build runs
