"""The line of waiting trials: in its order, each carried by one of Tune's, refused at its turn and no sooner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from results import make_result
from scheduled import cluster, rules

from raypar.run import dispatcher as line_module
from raypar.run.dispatcher import COME_BACK_S, Line
from raypar.run.gang_pool import Gang
from raypar.run.placement import Node
from raypar.run.scheduler import Rules, Standing
from raypar.study.trial import Failure, FailureKind, TrialSpec


class Pool:
    """What a line asks of a pool of gangs, without the gangs' processes."""

    is_short_of_memory = False

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.nodes = nodes
        self.gangs: dict[str, Gang] = {}

    def standings(self, ends_in_s: Callable[[Gang], float | None]) -> list[Standing]:
        return [Standing(g.id, g.placement, g.phase, g.on, g.last_used_s, ends_in_s(g)) for g in self.gangs.values()]

    def rules(self, max_trials: int | None) -> Rules:
        return rules(max_trials)

    def refusal(self, gang: Gang, spec: TrialSpec) -> str | None:
        return None

    def start(self, spec: TrialSpec, on: dict[str, int]) -> Gang:
        """A gang that is idle at once."""
        gang = Gang(str(len(self.gangs) + 1), spec.placement, on)
        gang.waiting = set(range(spec.placement.num_workers))
        self.gangs[gang.id] = gang
        return gang


@pytest.fixture(autouse=True)
def fixed_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Ray to ask whether it has an autoscaler."""
    monkeypatch.setattr(line_module, "may_grow", lambda: False)


def specs(*num_workers: int) -> list[TrialSpec]:
    points = [{"num_workers": count, "lr": i / 10} for i, count in enumerate(num_workers)]
    return [make_result(point, 0, 1.0).spec for point in points]


def started(steps: Any) -> list[tuple[TrialSpec, str]]:
    return [(run.spec, run.uid) for run, _ in steps.starts]


def test_trials_start_in_their_order_as_soon_as_one_of_tunes_carries_them() -> None:
    trials = specs(1, 1, 1)
    line, pool = Line(None, trials), Pool(cluster(4, 4))
    assert [on for _, on in line.steps(pool).opens] == [{"n1": 1}, {"n0": 1}]  # before there is anybody to carry
    pool.start(trials[0], {"n0": 1})
    pool.start(trials[0], {"n1": 1})
    assert not started(line.steps(pool))
    line.add_carrier("a")
    assert started(line.steps(pool)) == [(trials[0], "a")]
    line.add_carrier("b")
    assert started(line.steps(pool)) == [(trials[0], "a"), (trials[1], "b")]


def test_what_can_never_run_is_refused_at_its_turn_since_nodes_may_have_joined_by_then() -> None:
    trials = specs(1, 9, 9)
    line, pool = Line(None, trials), Pool(cluster(4))
    line.add_carrier("a")
    line.add_carrier("b")
    assert not line.steps(pool).refused  # the first one waits for its gang
    pool.start(trials[0], {"n0": 1})
    steps = line.steps(pool)
    assert started(steps) == [(trials[0], "a")]
    ((run, failure),) = steps.refused
    assert (run.spec, run.uid) == (trials[1], "b")
    assert failure == Failure(FailureKind.REFUSED, "needs 9 CPUs in one gang, the cluster has 4")


def test_what_lost_nodes_have_left_no_place_for_waits_for_them_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(line_module.time, "monotonic", lambda: now_s)
    line, pool = Line(None, specs(4)), Pool(cluster(4))
    line.add_carrier("a")
    assert not line.steps(pool).refused
    pool.nodes = cluster(2)
    now_s += COME_BACK_S
    assert not line.steps(pool).refused
    pool.nodes = cluster(2, 4)  # it has come back
    assert not line.steps(pool).refused
    pool.nodes = cluster(2)
    now_s += COME_BACK_S + 1
    ((_, failure),) = line.steps(pool).refused
    assert failure.kind is FailureKind.GANG_LOST
    assert failure.message == "nodes were lost: needs 4 CPUs in one gang, the cluster has 2"


def test_a_trial_that_tune_lost_before_its_turn_takes_the_next_one_with_it_and_no_other() -> None:
    trials = specs(1, 1)
    line, pool = Line(None, trials), Pool(cluster(4))
    line.add_carrier("a")
    line.add_carrier("lost")
    run = line.given_to("lost")
    assert run is not None and (run.spec, run.uid) == (trials[0], "lost")
    assert line.given_to("lost") is None
    line.remove(run)
    pool.start(trials[1], {"n0": 1})
    assert started(line.steps(pool)) == [(trials[1], "a")]


def test_after_the_line_is_closed_nothing_starts_that_is_not_carried_yet() -> None:
    trials = specs(1)
    line, pool = Line(None, trials), Pool(cluster(4))
    pool.start(trials[0], {"n0": 1})
    line.close()
    line.add_carrier("a")
    assert line.is_empty and not started(line.steps(pool))
