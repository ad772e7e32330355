# make study         install raypar and run the quick start, studies/quickstart.py
# make test          the checks of continuous integration, about ten minutes: style, types, unit tests, one real run of
#                    each kind (on Ray, killed and resumed, with an MLflow server, in a browser), and the quick start
# make test-all      all tests, about an hour and a half: every real run, more examples per property, a soak test
# make test-faults   only the faults: Ray's head, gangs and the broker killed during a study, its database locked
# make test-cluster  only clusters: `ray up` on four hosts in network namespaces, and Slurm on three nodes; needs root,
#                    sshd, rsync; slurm-wlm, munge
# make docs          build the documentation's site into build/site, without network; warnings are errors
# make dist          build the wheel and the source distribution into dist/
# make cluster       create Ray's token, unless there is one, and start a cluster on AWS: `ray up cluster.yaml`;
#                    CLUSTER=cluster-local.yaml: on machines that you have

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLUSTER ?= cluster.yaml
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check

PYTEST := $(BIN)/python -m pytest
UNIT_TESTS := -n logical --maxprocesses 4 tests/unit

.DELETE_ON_ERROR:
.PHONY: study style test test-all test-faults test-cluster docs dist cluster clean

study: $(VENV)/.installed
	$(BIN)/raypar study studies/quickstart.py

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: style
	$(PYTEST) $(UNIT_TESTS)
	$(PYTEST) -m core tests/real
	$(BIN)/python .ci/check_quickstart.py

test-all: style
	$(PYTEST) --hypothesis-profile=thorough $(UNIT_TESTS)
	$(PYTEST) -rs --durations=25 -m 'not faults and not cluster' tests/real
	$(MAKE) test-faults test-cluster
	$(BIN)/python .ci/check_quickstart.py
	$(BIN)/python benchmarks/soak.py --trials 60 --memory-trials 0

test-faults: $(VENV)/.installed-dev
	$(PYTEST) -m faults tests/real

test-cluster: $(VENV)/.installed-dev
	$(PYTEST) -rs -m cluster tests/real

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: | $(BIN)/python
	@$(PIP) build
	$(BIN)/python -m build

cluster: $(VENV)/.installed-aws
	@umask 077 && $(BIN)/ray get-auth-token --generate >/dev/null
	$(BIN)/ray up $(CLUSTER)

# Stamp files: install again only when pyproject.toml changes.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing raypar into $(VENV) (torch and Ray are large: this takes minutes, once) …"
	@$(PIP) -e '.[train]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "Installing raypar and its test tools into $(VENV) (this takes minutes, once) …"
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	@$(PIP) -e '.[docs]'
	@touch $@

$(VENV)/.installed-aws: pyproject.toml | $(BIN)/python
	@$(PIP) -e '.[aws]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("raypar needs Python 3.11 or later: make PYTHON=python3.12 …")'
	@$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
