"""What can never run is refused with the numbers; cores are leased to one rank at a time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raypar.run.capacity import CoreLeases, fits, refusal
from raypar.study.trial import Placement

NODES = st.lists(
    st.fixed_dictionaries({"CPU": st.integers(0, 6).map(float)}, optional={"GPU": st.integers(1, 3).map(float)}),
    max_size=4,
)
PLACEMENTS = st.builds(Placement, st.integers(1, 6), st.integers(1, 4), st.sampled_from(["cpu", "cuda"]))


def placed_by_hand(placement: Placement, nodes: list[Mapping[str, float]]) -> bool:
    """Whether some assignment of the workers to the nodes holds, by trying them all."""
    counts = itertools.combinations_with_replacement(range(len(nodes)), placement.num_workers)
    for nodes_of_workers in counts:
        if all(
            nodes_of_workers.count(i) * placement.cpus_per_worker <= node["CPU"]
            and (placement.device == "cpu" or nodes_of_workers.count(i) <= node.get("GPU", 0))
            for i, node in enumerate(nodes)
        ):
            return True
    return False


@given(placement=PLACEMENTS, nodes=NODES)
@settings(deadline=None)
def test_a_gang_fits_where_some_assignment_of_its_workers_to_nodes_does(
    placement: Placement, nodes: list[Mapping[str, float]]
) -> None:
    assert fits(placement, nodes) == placed_by_hand(placement, nodes)


@given(placement=PLACEMENTS, nodes=NODES)
@settings(deadline=None)
def test_what_fits_is_not_refused_and_what_does_not_fit_is(
    placement: Placement, nodes: list[Mapping[str, float]]
) -> None:
    assert (refusal(placement, nodes) is None) == fits(placement, nodes)


@pytest.mark.parametrize(
    ("placement", "nodes", "told"),
    [
        (Placement(4, 1, "cpu"), [{"CPU": 2.0}], "needs 4 CPUs in one gang, the cluster has 2"),
        (Placement(2, 8, "cpu"), [{"CPU": 6.0}, {"CPU": 6.0}], "needs 16 CPUs in one gang, the cluster has 12"),
        (Placement(1, 1, "cuda"), [{"CPU": 8.0}], "needs 1 GPU in one gang, the cluster has 0"),
        (Placement(3, 1, "cuda"), [{"CPU": 8.0, "GPU": 2.0}], "needs 3 GPUs in one gang, the cluster has 2"),
        (Placement(1, 1, "cpu"), [], "needs 1 CPU in one gang, the cluster has 0"),
        (
            Placement(2, 3, "cpu"),
            [{"CPU": 4.0}, {"CPU": 2.0}],
            "needs 2 workers with CPU 3 each, and no 2 fit on the nodes",
        ),
        (
            Placement(2, 1, "cuda"),
            [{"CPU": 8.0}, {"CPU": 1.0, "GPU": 2.0}],
            "needs 2 workers with CPU 1, GPU 1 each, and no 2 fit on the nodes",
        ),
    ],
)
def test_a_refusal_tells_what_is_needed_and_what_is_there(
    placement: Placement, nodes: list[Mapping[str, float]], told: str
) -> None:
    assert refusal(placement, nodes) == told


def test_two_workers_of_three_cores_fit_on_two_nodes_but_not_on_one_of_five() -> None:
    assert fits(Placement(2, 3, "cpu"), [{"CPU": 3.0}, {"CPU": 3.0}])
    assert not fits(Placement(2, 3, "cpu"), [{"CPU": 5.0}])


class Leases(RuleBasedStateMachine):
    """Gangs of any shape come and go on two machines of five and three cores."""

    @initialize()
    def start(self) -> None:
        self.cores = {"a": (0, 1, 4, 5, 7), "b": (0, 1, 2)}
        self.leases = CoreLeases()
        for host, cores in self.cores.items():
            self.leases.add_host(host, cores)
        self.held: list[tuple[dict[int, str], dict[int, tuple[int, ...]]]] = []

    def free(self, host: str) -> int:
        leased = sum(len(cores[r]) for hosts, cores in self.held for r in cores if hosts[r] == host)
        return len(self.cores[host]) - leased

    @rule(hosts=st.lists(st.sampled_from("ab"), min_size=1, max_size=6), num_cores=st.integers(1, 3))
    def lease(self, hosts: list[str], num_cores: int) -> None:
        by_rank = dict(enumerate(hosts))
        cores = self.leases.lease(by_rank, num_cores)
        need = {host: hosts.count(host) * num_cores for host in hosts}
        if any(need[host] > len(self.cores[host]) for host in need):
            assert cores == {}  # never: it runs unpinned
        elif any(need[host] > self.free(host) for host in need):
            assert cores is None  # not now
        else:
            assert cores is not None and {len(c) for c in cores.values()} == {num_cores}
            assert list(cores) == list(by_rank)
        if cores is not None:
            self.held.append((by_rank, cores))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            self.leases.release(*self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def meet_a_known_machine_again(self) -> None:
        self.leases.add_host("a", (0, 1, 4, 5, 7))

    @invariant()
    def no_core_is_leased_twice(self) -> None:
        leased = [(hosts[rank], c) for hosts, cores in self.held for rank in cores for c in cores[rank]]
        assert len(leased) == len(set(leased))
        assert all(core in self.cores[host] for host, core in leased)

    def teardown(self) -> None:
        if not hasattr(self, "leases"):
            return
        for lease in self.held:
            self.leases.release(*lease)
        everything = self.leases.lease({0: "a", 1: "b"}, 3)
        assert everything is not None  # all came back
        self.leases.release({0: "a", 1: "b"}, everything)
        assert self.leases.lease({0: "a"}, 5) == {0: (0, 1, 4, 5, 7)}


TestNoCoreIsLeasedTwiceAndAllComeBack = Leases.TestCase
TestNoCoreIsLeasedTwiceAndAllComeBack.settings = settings(deadline=None, max_examples=50)
