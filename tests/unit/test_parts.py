"""Parts of a study: which trials each runs, who may run beside it, and on which machines."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage import a_study, finished

from raypar.errors import RayparError
from raypar.execution.machine import alone
from raypar.execution.part import check_machines
from raypar.execution.plan import make_plan
from raypar.run.cluster import Cluster
from raypar.study.part import StudyPart, describe
from raypar.track.client import lease_path

TWO_CORES = Cluster(({"CPU": 2.0},), is_own=True)
XEON, EPYC = ({"cpu": cpu, "cores": "8", "gpu": ""} for cpu in ("Xeon", "EPYC"))


def missing(part, stored=(), **changes):
    return make_plan(a_study(**changes), TWO_CORES, stored, part=part).missing


@given(st.integers(1, 6), st.integers(0, 6))
def test_parts_are_disjoint_whole_blocks_and_cover_the_study(count, more):
    repeats = count + more
    parts = [missing(StudyPart(number, count), num_repeats=repeats) for number in range(1, count + 1)]
    whole = missing(None, num_repeats=repeats)
    blocks = [{spec.repeat for spec in part} for part in parts]
    assert sum(map(len, parts)) == len(whole) and sorted(set().union(*blocks)) == list(range(repeats))
    assert {spec.identity for part in parts for spec in part} == {spec.identity for spec in whole}
    assert all(
        len(part) * repeats == len(of_blocks) * len(whole) for part, of_blocks in zip(parts, blocks, strict=True)
    )


def test_a_part_reports_results_of_the_others_too():
    by_other = tuple(map(finished, missing(StudyPart(2, 2))))
    plan = make_plan(a_study(), TWO_CORES, by_other, part=StudyPart(1, 2))
    assert len(plan.done) == len(by_other) and {spec.repeat for spec in plan.missing} == {0}
    assert make_plan(a_study(), TWO_CORES, by_other, part=StudyPart(2, 2)).missing == ()
    assert describe(StudyPart(2, 2), a_study()) == "part 2 of 2: block 2; `raypar report s` covers all parts"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_repeats": 1}, "--part 1/2: the study has 1 block, so a part has none"),
        ({"until": "settled"}, "--part 1/2: a study until it is settled has no fixed blocks to divide"),
    ],
)
def test_a_study_without_a_block_for_each_part_is_refused(changes, why):
    with pytest.raises(RayparError, match=why):
        missing(StudyPart(1, 2), **changes)


@pytest.fixture
def running(tmp_path, monkeypatch):
    """Return a context manager in which a part runs; None: the whole study."""
    monkeypatch.setenv("RAYPAR_LOCK_DIR", str(tmp_path / "locks"))
    return lambda part: alone("s", ["raypar", "study", "s.py"], f"sqlite:///{tmp_path}/mlflow.db", tmp_path, part)


@pytest.mark.parametrize(
    ("one", "other", "may"),
    [
        (StudyPart(1, 2), StudyPart(2, 2), True),
        (StudyPart(1, 2), StudyPart(1, 2), False),
        (StudyPart(1, 2), StudyPart(3, 3), False),
        (StudyPart(1, 2), None, False),
        (None, StudyPart(1, 2), False),
    ],
)
def test_only_other_parts_of_the_same_division_run_at_the_same_time(running, one, other, may):
    refused = (
        contextlib.nullcontext() if may else pytest.raises(RayparError, match=r"study `s( 1/2)?` is already running")
    )
    with running(one), refused, running(other):
        pass
    with running(other):  # afterwards
        pass


@pytest.fixture
def lease(tmp_path):
    return lease_path("s", f"sqlite:///{tmp_path}/mlflow.db", tmp_path)


def test_all_parts_run_on_machines_of_one_kind(lease):
    one, two = StudyPart(1, 2), StudyPart(2, 2)
    check_machines(one, {"node1": XEON, "node2": XEON}, lease, has_results=False)
    one.lease_of(lease).write_text("runs")
    check_machines(two, {"node3": XEON}, lease, has_results=False)
    for has_results in (False, True):
        if has_results:
            one.lease_of(lease).unlink()  # it has ended
        with pytest.raises(RayparError, match="the other parts ran on Xeon, 8 cores, this one is on EPYC, 8 cores"):
            check_machines(two, {"node3": EPYC}, lease, has_results=has_results)
    with pytest.raises(RayparError, match="its machines differ: node1: Xeon, 8 cores; node2: EPYC, 8 cores"):
        check_machines(one, {"node1": XEON, "node2": EPYC}, lease, has_results=False)
    check_machines(two, {"node3": EPYC}, lease, has_results=False)  # a new study: no other part runs, and none has
    (kept,) = lease.parent.iterdir()
    assert json.loads(kept.read_text()) == EPYC
