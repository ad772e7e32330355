"""benchmarks/networks.py talks to its ranks as a supervisor does."""

import sys
from multiprocessing import Pipe
from pathlib import Path

import pytest

from raypar.train.job import RankOutcome

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from networks import Hosts


def rank_that_sends(*messages):
    """Return hosts with one rank, and the rank's end of their connection."""
    ours, theirs = Pipe()
    hosts = object.__new__(Hosts)  # without network namespaces
    hosts._pipes = [ours]
    for message in messages:
        theirs.send(message)
    return hosts, theirs


def test_a_report_is_answered_and_a_position_is_ignored():
    outcome = RankOutcome(wall_s=1.0)
    hosts, rank = rank_that_sends(("report", {"loss": 0.5}, None), ("position", None), ("done", outcome))
    assert hosts._outcomes([("job", "context")]) == [outcome]
    assert [rank.recv(), rank.recv()] == [("job", "context"), True]


def test_an_error_ends_the_benchmark():
    hosts, _ = rank_that_sends(("error", "error", "ValueError", "no such width", ""))
    with pytest.raises(SystemExit, match="host 0: no such width"):
        hosts._outcomes([("job", "context")])
