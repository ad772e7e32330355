"""Nodes that leave a cluster on purpose, as Ray reports them."""

import pytest

from raypar.run import departures
from raypar.run.departures import Departures
from raypar.run.gang_pool import alive_nodes

UNKNOWN, STOPPED, LOST, PREEMPTED, IDLE = range(5)  # as Ray numbers the reasons of nodes' deaths


class SimulatedRay:
    def __init__(self, **reasons):
        self.reasons, self.draining = reasons, {}

    def nodes(self):
        return [
            {
                "NodeID": node,
                "Alive": reason is None,
                "DeathReason": reason or UNKNOWN,
                "NodeManagerHostname": f"host-{node}",
                "NodeManagerAddress": "::1",
                "Resources": {"CPU": 1.0},
                "Labels": {"raypar-machine": "pod-7"} if node == "labelled" else {},
            }
            for node, reason in self.reasons.items()
        ]

    def get_draining_nodes(self):
        return self.draining


@pytest.fixture
def simulated(monkeypatch):
    def make(**reasons):
        ray = SimulatedRay(**reasons)
        monkeypatch.setattr("ray.nodes", ray.nodes)
        monkeypatch.setattr(departures, "state", ray)
        return ray

    return make


def test_rays_reason_tells_a_departure_from_a_loss(simulated):
    simulated(up=None, stopped=STOPPED, lost=LOST, spot=PREEMPTED, idle=IDLE, labelled=PREEMPTED, other=PREEMPTED)
    assert Departures().of({"up", "stopped", "lost", "spot", "idle", "labelled"}) == {
        "host-stopped": "was stopped",
        "host-spot": "was preempted",
        "host-idle": "was removed by the autoscaler",
        "pod-7": "was preempted",
    }


def test_a_notice_is_remembered_after_the_end_of_its_node(simulated):
    ray = simulated(spot=None, other=None)
    found = Departures()
    assert found.of({"spot", "other"}) == {}
    ray.draining = {"spot": 1795935711609}
    assert list(found.draining()) == ["spot"]
    ray.reasons, ray.draining = {"spot": LOST, "other": LOST}, {}  # it ended before its deadline
    assert found.of({"spot", "other"}) == {"host-spot": "was preempted"}


def test_a_node_with_a_notice_gets_no_trials_although_it_is_up(simulated):
    ray = simulated(spot=None, other=None, lost=LOST)
    ray.draining = {"spot": 0}
    assert [node.id for node in alive_nodes()] == ["spot", "other"]
    assert [node.id for node in alive_nodes(Departures().draining())] == ["other"]
