# make study    the quick start: sets up what it needs, then runs studies/quickstart.py
# make test     what continuous integration checks: style, types, tests, a cluster, and the quick start end to end
# make test-faults    the tests that take minutes: Ray's head, gangs and brokers killed under a study, its database locked
# make test-cluster    what `make test` has of clusters: `ray up` on four hosts in namespaces; needs root, sshd, rsync

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check

PYTEST := $(BIN)/python -m pytest
CLUSTER := -rs -m cluster tests/real/test_cluster.py

# Real processes on a shared machine fail now and then for the machine's sake. Tests that failed run once more, in a
# process of their own, and are listed: one that fails twice is broken.
AGAIN := --last-failed --last-failed-no-failures none -rA --show-capture=no
tested = $(PYTEST) $(1) || (test $$? = 1 && echo 'Once more, what failed:' && $(PYTEST) $(1) $(AGAIN))

.DELETE_ON_ERROR:
.PHONY: study test test-faults test-cluster clean

study: $(VENV)/.installed
	$(BIN)/raypar study studies/quickstart.py

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(call tested,-n logical --maxprocesses 4 tests/unit)
	$(call tested,--durations=25 tests/real)
	$(call tested,$(CLUSTER))
	$(BIN)/python .ci/check_quickstart.py

test-faults: $(VENV)/.installed-dev
	$(PYTEST) -m 'faults or long' tests/real

test-cluster: $(VENV)/.installed-dev
	$(PYTEST) $(CLUSTER)

# The stamps keep a second run from installing again; a change of pyproject.toml makes them stale.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing raypar into $(VENV) (torch and Ray are large: this takes minutes, once) …"
	@$(PIP) -e '.[train]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "Installing raypar and what checks it into $(VENV) (this takes minutes, once) …"
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.installed $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("raypar needs Python 3.11 or later: make PYTHON=python3.12 …")'
	@$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
