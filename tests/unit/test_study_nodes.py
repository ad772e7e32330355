"""``nodes`` and ``node_label``: what is allowed, and which trial a trial is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypar import Study, StudyError, grid
from raypar.execution.plan import make_plan
from raypar.run.cluster import Cluster
from raypar.study.options import OPTIONS, node_label_of
from raypar.workloads import digits

ONE = Cluster(({"CPU": 4.0},), is_own=True)
TWO = Cluster(({"CPU": 0.0}, {"CPU": 2.0}, {"CPU": 2.0}), is_own=False, labels=({}, {"type": "a"}, {"type": "b"}))


def study_of(**space: object) -> Study:
    return Study(workload=digits, name="s", num_repeats=1, space={k: grid(*v) for k, v in space.items()})  # type: ignore[misc]


@pytest.mark.parametrize("nodes", ["pack", "spread", 1, 7])
def test_a_way_or_a_number_of_nodes_is_fine(nodes: object) -> None:
    assert OPTIONS["nodes"].check(nodes) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", ["all", "", 0, -1, True, 1.5, (1, 2)])
def test_anything_else_is_told_what_it_may_be(nodes: object) -> None:
    assert "pack" in (OPTIONS["nodes"].check(nodes) or "")  # type: ignore[arg-type]


@pytest.mark.parametrize("label", ["type", "=gpu", "type=", "a=b=c", ""])
def test_a_label_is_a_key_and_a_value(label: str) -> None:
    assert 'type=gpu"' in (OPTIONS["node_label"].check(label) or "")
    assert OPTIONS["node_label"].check("type=gpu") is None and node_label_of("type = gpu") == ("type", "gpu")


def test_more_nodes_than_workers_is_a_mistake() -> None:
    with pytest.raises(StudyError, match="is more than num_workers=2"):
        study_of(num_workers=(2,), nodes=(1, 3))


def test_a_trial_where_nothing_is_said_of_nodes_is_the_one_it_was_before_there_were_nodes() -> None:
    (spec,) = study_of(num_workers=(2,)).trials()
    without = {key: value for key, value in spec.config.items() if key not in ("nodes", "node_label")}
    assert replace(spec, config=without).identity == spec.identity
    assert replace(spec, config=without).placement == spec.placement
    others = study_of(num_workers=(2,), nodes=("spread", 1)).trials()
    assert len({spec.identity, *(other.identity for other in others)}) == 3


def test_placements_that_differ_in_nodes_have_gangs_of_their_own_and_say_so() -> None:
    told = {str(spec.placement) for spec in study_of(num_workers=(2,), nodes=("pack", "spread", 1, 2)).trials()}
    assert told == {
        "2 workers × 1 core",
        "2 workers × 1 core, spread over the nodes",
        "2 workers × 1 core on 1 node",
        "2 workers × 1 core on 2 nodes",
    }


def test_one_machine_has_nothing_to_spread_over_and_not_two_nodes() -> None:
    with pytest.raises(StudyError, match="there is one node, and nothing to spread over"):
        make_plan(study_of(num_workers=(2,), nodes=("pack", "spread")), ONE, ())
    with pytest.raises(StudyError, match="evenly on 2 nodes; 1 of the cluster's nodes can hold one"):
        make_plan(study_of(num_workers=(2,), nodes=(1, 2)), ONE, ())
    with pytest.raises(StudyError, match="no node has the label type=a"):
        make_plan(study_of(num_workers=(2,), node_label=("type=a",)), ONE, ())


def test_a_cluster_of_two_nodes_takes_every_way() -> None:
    plan = make_plan(study_of(num_workers=(2,), nodes=("pack", "spread", 1, 2)), TWO, ())
    assert len(plan.specs) == 4
    assert len(make_plan(study_of(num_workers=(2,), nodes=("pack", 1), node_label=("type=b",)), TWO, ()).specs) == 2
    with pytest.raises(StudyError, match="evenly on 2 nodes; 1 of the nodes with type=b can hold one"):
        make_plan(study_of(num_workers=(2,), nodes=(2,), node_label=("type=b",)), TWO, ())
