# Everything a person or CI does with this checkout. `make help` lists it.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP_ARGS ?=
STRICT ?=

.PHONY: help install packages run test lab-env lab-test lab-faults soak lint types bench reference clean
help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvguard needs Python 3.11 or newer; run make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -m venv $(VENV) || { echo "python venv is missing: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[dev]'
	@touch $@

install: $(STAMP)  ## set up .venv with kvguard and what its tests need

packages:
	@tests/debian.sh prometheus=promtool

run: $(STAMP)  ## start the guard; RUN_ARGS are its flags
	$(BIN)/kvguard run $(RUN_ARGS)

test: $(STAMP) packages  ## all tests but those of the real engine stack
	$(BIN)/python -m pytest --ignore=tests/lab $(ARGS)

lab-env:  ## build the engine stack (vLLM for CPUs, LMCache, Redis) in .lab
	@tests/debian.sh redis-server=redis-server
	@PIP_ARGS='$(PIP_ARGS)' tests/lab/build_env.sh

lab-test: $(STAMP) lab-env  ## tests on the real engine stack; STRICT=1 takes every limit as written
	STRICT='$(STRICT)' KVGUARD_BIN='$(abspath $(BIN)/kvguard)' .lab/bin/python -m pytest tests/lab $(ARGS)

lab-faults: $(STAMP) lab-env  ## every fault of a store, once (FAULT_RUNS=3 STRICT=1 in full)
	STRICT='$(STRICT)' FAULT_RUNS='$(FAULT_RUNS)' KVGUARD_BIN='$(abspath $(BIN)/kvguard)' .lab/bin/python -m pytest tests/lab/test_faults.py $(ARGS)

soak: $(STAMP) lab-env  ## what is long, in full: writes docs/acceptance.md and docs/faults.md (70 minutes)
	LAB_REPORT='$(abspath docs/acceptance.md)' STRICT=1 KVGUARD_BIN='$(abspath $(BIN)/kvguard)' .lab/bin/python -m pytest tests/lab/test_acceptance.py
	ROGUES=10000 .lab/bin/python -m pytest tests/lab/test_gate_rogue.py
	FAULTS_REPORT='$(abspath docs/faults.md)' STRICT=1 FAULT_RUNS=3 KVGUARD_BIN='$(abspath $(BIN)/kvguard)' .lab/bin/python -m pytest tests/lab/test_faults.py

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## strict types on guard/
	$(BIN)/mypy --strict guard

bench: $(STAMP)  ## timings, as ratios within one run
	@for script in bench/exposition.py bench/tick.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done
	@if [ -x .lab/bin/python ]; then echo "== bench/gate_lookup.py"; .lab/bin/python bench/gate_lookup.py; \
	else echo "== bench/gate_lookup.py needs an environment with LMCache in .lab: not measured"; fi

reference: $(STAMP)  ## write docs/metrics.md from the code
	$(BIN)/python -m guard.reference.metrics_page > docs/metrics.md.new
	mv docs/metrics.md.new docs/metrics.md

clean:  ## remove what make made
	rm -rf $(VENV) .lab .lab-pre .lab-run .pytest_cache .mypy_cache .ruff_cache .hypothesis
