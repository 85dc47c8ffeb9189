# make demo: a GRPO run through veRL, off and on, compared.   make test: every test.   Both set up what they need.
PYTHON ?= python3
VENV ?= .venv
# Where torch's CPU build comes from if pip finds none in the indexes it is configured with.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints-cpu.txt)

.PHONY: demo test quality env clean
demo: env
	$(BIN)/python examples/verl/demo.py

test: env $(VENV)/newest
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder

quality: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

env: $(VENV)/.built

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

$(VENV)/.built: $(VENV)/.installed CMakeLists.txt $(wildcard csrc/*)
	$(PIP) --no-deps --no-build-isolation --force-reinstall -e .
	$(BIN)/das-adapter cpu-setup
	touch $@

clean:
	rm -rf $(VENV) build runs
