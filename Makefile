# Every set-up step installs its programs under .local/. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
LOCAL := .local
VENV := $(LOCAL)/venv
BIN := $(VENV)/bin
CLUSTER ?=
REGISTRY ?=
cluster_flag = $(if $(CLUSTER),--cluster $(CLUSTER))
SOURCES := operator/src sidecar/src tests e2e bench tools
STEP = $(PYTHON) -m e2e.cluster.progress
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: help
help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

$(VENV)/installed: requirements/dev.txt
	@mkdir -p $(LOCAL) && printf '*\n' > $(LOCAL)/.gitignore
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV)
	@$(STEP) "install the development tools" $(BIN)/pip install --quiet --disable-pip-version-check --require-hashes \
		-r requirements/dev.txt
	@touch $@

.PHONY: demo
demo: ## Bring up a cluster, install the product, send real requests and explain the results (CLUSTER=local|kind|existing)
	@$(PYTHON) -m e2e.demo $(cluster_flag)

.PHONY: up
up: ## Bring up a local Kubernetes; kubeconfig at .local/kubeconfig (CLUSTER=local|kind|existing)
	@$(PYTHON) -m e2e.cluster up $(cluster_flag)

.PHONY: down
down: ## Stop the cluster and leave nothing behind; caches stay under .local/ (purge: make clean)
	@$(PYTHON) -m e2e.cluster down

.PHONY: clean
clean: ## Stop the cluster and remove everything under .local/
	@$(PYTHON) -m e2e.cluster down --purge
	@rm -rf $(LOCAL) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

.PHONY: images
images: ## Build the images (operator, sidecar, Redis, CPU engine)
	@$(PYTHON) -m e2e.images build

.PHONY: push
push: ## Build the product's images and push them: make push REGISTRY=registry.example.com/team
	@$(PYTHON) -m e2e.images push --registry "$(REGISTRY)"

.PHONY: generate
generate: $(VENV)/installed ## Write CRDs, charts' copies and the reference pages from the code
	@PYTHONPATH=operator/src $(BIN)/python -m tools.generate

.PHONY: baseline
baseline: $(VENV)/installed ## Accept changes of the CRDs that break stored objects, before a release
	@PYTHONPATH=operator/src $(BIN)/python -m tools.generate --baseline

.PHONY: format
format: $(VENV)/installed ## Format the code
	@$(BIN)/ruff format $(wildcard $(SOURCES))
	@$(BIN)/ruff check --fix $(wildcard $(SOURCES))

.PHONY: check
check: $(VENV)/installed ## Gates: format, lint, types, words, dead code, import contracts, generated files
	@$(STEP) "format" $(BIN)/ruff format --check $(wildcard $(SOURCES))
	@$(STEP) "lint" $(BIN)/ruff check $(wildcard $(SOURCES))
	@$(STEP) "words" $(BIN)/python -m tools.prose
	@$(STEP) "types" $(BIN)/mypy
	@$(STEP) "dead code" $(BIN)/vulture
	@PYTHONPATH=operator/src:sidecar/src $(STEP) "import contracts" $(BIN)/lint-imports
	@PYTHONPATH=operator/src $(STEP) "generated files" $(BIN)/python -m tools.generate --check
	@$(BIN)/python -m bench.measured

.PHONY: unit
unit: $(VENV)/installed ## Every test that needs no server: two minutes
	@$(BIN)/python -m e2e.run_tests --unit

.PHONY: mutate
mutate: $(VENV)/installed ## Change product lines one by one; do tests fail? Lines that differ from SINCE, or PART=gate
	@$(BIN)/python -m tools.mutate $(if $(PART),--part $(PART)) $(if $(SINCE),--since $(SINCE)) \
		$(if $(MUTANTS),--mutants $(MUTANTS)) $(if $(SEED),--seed $(SEED))

.PHONY: test
test: check ## Gates, and each claim of docs/proof.md once, on real parts; or TESTS=tests/tiers
	@$(BIN)/python -m e2e.run_tests $(TESTS)

.PHONY: test-all
test-all: $(VENV)/installed ## Every test, in parts, resumed where it ended: PART=tiers for one, SOAK=1 draws more
	@KVSTRATA_SIZE=$(if $(SOAK),soak,all) $(BIN)/python -m e2e.run_tests $(if $(PART),--part $(PART),--all)

$(LOCAL)/venv-docs/installed: requirements/docs.txt
	@mkdir -p $(LOCAL) && printf '*\n' > $(LOCAL)/.gitignore
	@$(PYTHON) -m venv $(LOCAL)/venv-docs
	@$(STEP) "install the tools of the documentation" $(LOCAL)/venv-docs/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/docs.txt
	@touch $@

.PHONY: docs
docs: $(LOCAL)/venv-docs/installed ## Build the documentation as a site with search: .local/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(STEP) "build the documentation" $(LOCAL)/venv-docs/bin/mkdocs build --quiet --strict

.PHONY: bench
bench: $(VENV)/installed ## Run the benchmarks, or one: make bench BENCH=enforce; results in bench/results/
	@PYTHONPATH=operator/src:sidecar/src $(BIN)/python -m bench $(BENCH)
