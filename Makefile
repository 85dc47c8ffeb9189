# make help lists the targets. Each sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
# Where torch's CPU build comes from if pip finds none in the indexes it is configured with.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

# A checkout of NeMo-RL, which is in no package registry. Without one its tests are skipped.
NEMO_RL ?=

# Results of benchmarks/results that "make figures" makes anew; TRACES is a directory of recorded rollouts, where they need it.
RESULTS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q
ON_GPU := VLLM_USE_V2_MODEL_RUNNER=0 DAS_TEST_DTYPE=bfloat16 $(PYTHON) -m pytest -m ""
WITH_NEMO_RL := $(if $(NEMO_RL),PYTHONPATH=$(abspath $(NEMO_RL)):$(abspath $(VENV)/nemo_rl))
PYTEST := $(WITH_NEMO_RL) $(BIN)/python -m pytest
NEWER := $(if $(shell sed -n 's/^vllm==//p' constraints/newer.txt),$(VENV)/newer)
TESTED := $(VENV)/newest $(NEWER) $(VENV)/speculators $(VENV)/hosts $(if $(NEMO_RL),$(VENV)/nemo_rl)
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints/cpu.txt)

# A few tests of vLLM's V2 runner, for a release that has no CPU build. make matrix runs all of them on it.
ON_NEWER := tests/contract/test_v2_kernels.py::test_kernels_equal_their_reference_in_the_interpreter \
  "tests/contract/test_v2_losslessness.py::test_tokens_and_logprobs_are_stock_vllms[history]" \
  "tests/contract/test_v2_copy.py::test_tokens_are_stock_vllms_and_the_copy_follows_the_policy[self]" \
  "tests/contract/test_v2_copy.py::test_no_pass_is_made_for_drafts_that_no_request_can_use" \
  "tests/contract/test_v2_neural.py::test_tokens_do_not_depend_on_a_controlled_drafter[history+eagle3]" \
  "tests/contract/test_survival.py::test_nothing_is_learned_from_the_rehearsal[V2-history]"

CPP := $(wildcard csrc/*.cpp csrc/*.hpp tests/native/*.cpp)

.PHONY: help demo gpu gputests figures test long hosts matrix mutants check quality format docs wheel env clean
help:  # print this list
	@sed -n 's/^\([a-z]*\):.*  # \(.*\)/make \1	\2/p' Makefile | expand -t 16

demo: env  # run GRPO through veRL with speculation off and on, and compare
	$(BIN)/python examples/verl/demo.py

gpu:  # measure on a GPU, in the environment of PYTHON (das-adapter, vLLM): at most 25 minutes
	$(PYTHON) -P -m das_adapter.bench --out benchmarks/results

gputests:  # run contract tests on a GPU, in the environment of PYTHON (with pytest); test_ranks.py needs two, of 8.9 or newer
	$(ON_GPU) tests/contract/test_on_gpu.py
	$(ON_GPU) tests/contract/test_distribution.py tests/contract/test_neural.py \
	  -k "default and follow_the_softmax and not ngram and not self and not stock"
	VLLM_BATCH_INVARIANT=1 $(ON_GPU) tests/contract/test_losslessness.py \
	  -k "default and (plain and (failing or history and not self) or every-parameter and chunks or failing_drafter or collapsed)"
	VLLM_BATCH_INVARIANT=1 $(ON_GPU) tests/contract/test_neural.py -k "default and every_step and draft_model"
	VLLM_BATCH_INVARIANT=1 DAS_TEST_COPY=fp8 $(ON_GPU) tests/contract/test_ranks.py -k default

figures: env  # list the results of which the measured code has changed since; RESULTS="A.json B.json" makes these anew
	$(WITH_NEMO_RL) $(BIN)/python benchmarks/stale.py $(RESULTS)

test: quality $(TESTED)  # run the quality checks and every test; NeMo-RL's with NEMO_RL=CHECKOUT
	$(PYTEST) -n 2 --no-loadscope-reorder
	$(if $(NEWER),DAS_TEST_NEWEST=$(NEWER) $(BIN)/python -m pytest -n 2 $(ON_NEWER))

long: $(TESTED) $(VENV)/vision  # run the tests that make test leaves out: minutes each, on the other vLLM build, or with new random examples
	$(PYTEST) -m long --ignore tests/e2e -n 2 --no-loadscope-reorder
	$(PYTEST) -m long tests/e2e
	$(BIN)/python -m pytest tests/unit -n 2 --hypothesis-profile=long

hosts: $(VENV)/hosts $(VENV)/newest  # run the tests of trainers on plain vLLM engines, some minutes each
	PYTHONPATH=$< $(BIN)/python -m pytest -m hosts

matrix: env $(NEWER)  # check the symbols of several versions of vLLM, and run the contract tests on their CPU builds
	$(BIN)/python scripts/matrix.py --run

mutants: env $(VENV)/newest  # change the package in many small ways, and see whether the tests notice: half an hour
	$(WITH_NEMO_RL) $(BIN)/python benchmarks/mutation.py --out benchmarks/results/mutants.json

check: quality $(VENV)/speculators  # run the quality checks and the unit tests, in a minute or two
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

docs: env  # write the documentation to build/docs; warnings and broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

wheel: env  # build sdist and wheel in dist/, and try the wheel where there is no compiler
	$(BIN)/python -m pytest tests/wheel -m wheel --wheel-dir dist

env: $(VENV)/.built  # set up the environment in $(VENV)

$(VENV)/.installed: constraints/cpu.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13) and "veRL, with which the tests run, needs Python 3.11 or 3.12: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)" -c constraints/cpu.txt 2>/dev/null || $(PIP) "$(TORCH)" --index-url $(TORCH_CPU_INDEX)
	$(PIP) -c constraints/cpu.txt $$($(BIN)/python scripts/requirements.py verl-cpu dev docs)
	touch $@

# The newest vLLM CPU build, for the contract tests.
$(VENV)/newest: constraints/newest.txt | $(VENV)/.built
	$(PIP) --no-deps --target $@ --upgrade -r constraints/newest.txt
	PYTHONPATH=$@ $(BIN)/das-adapter cpu-setup
	touch $@

# The newest release, while it has no CPU build: its Python over the libraries of the newest CPU build.
$(VENV)/newer: constraints/newer.txt constraints/newest.txt scripts/newer.py | $(VENV)/newest
	$(BIN)/python scripts/newer.py --newest $(VENV)/newest --out $@
	PYTHONPATH=$@ $(BIN)/das-adapter cpu-setup
	touch $@

# What NeMo-RL's driver imports.
$(VENV)/nemo_rl: constraints/nemo-rl.txt | $(VENV)/.built
	$(PIP) --no-deps --target $@ --upgrade -r constraints/nemo-rl.txt
	touch $@

# What trains drafters on exported histories.
$(VENV)/speculators: constraints/speculators.txt | $(VENV)/.built
	$(PIP) --no-deps --target $@ --upgrade -r constraints/speculators.txt
	touch $@

# What vLLM's Qwen3.5 imports.
$(VENV)/vision: constraints/vision.txt | $(VENV)/.built
	$(PIP) --no-deps --target $@ --upgrade -r constraints/vision.txt
	touch $@

# Trainers without what they depend on: the environment has as much of it as the tests need. SkyRL asks for Python 3.12.
$(VENV)/hosts: constraints/hosts.txt | $(VENV)/.built
	$(PIP) --no-deps --ignore-requires-python --target $@ --upgrade -r constraints/hosts.txt
	touch $@

$(VENV)/.built: $(VENV)/.installed CMakeLists.txt das_adapter/__init__.py das_adapter/core/tuning.py $(wildcard csrc/*)
	$(PIP) --no-deps --no-build-isolation --force-reinstall -e .
	$(BIN)/das-adapter cpu-setup
	touch $@

clean:  # remove the environment, builds and runs
	rm -rf $(VENV) build runs
