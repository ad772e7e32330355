"""Placements that can never run are refused, and a core is leased to one rank at a time."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raypar.run.placement import CoreLeases, FreeResources, Node, close_together, needed, refusal, shares, spread_out
from raypar.study.trial import Placement
from raypar.train.affinity import Core

NODES = st.lists(
    st.fixed_dictionaries({"CPU": st.integers(0, 6).map(float)}, optional={"GPU": st.integers(1, 3).map(float)}),
    max_size=4,
)
WAYS = st.one_of(st.sampled_from(["pack", "spread"]), st.integers(1, 4))
PLACEMENTS = st.builds(Placement, st.integers(1, 6), st.integers(1, 4), st.sampled_from(["cpu", "cuda", "mps"]), WAYS)


def machine(sockets, cores, threads):
    """Return cores numbered as on most systems: every core's first thread before any core's second."""
    count = sockets * cores
    return tuple(Core(n, n % count // cores, n % count) for n in range(count * threads))


def numbered(*numbers):
    """Return cores of one socket."""
    return tuple(Core(n, 0, n) for n in numbers)


def placed_by_hand(placement, nodes):
    """Return whether some assignment of the workers to the nodes works, by trying all."""

    def holds(nodes_of_workers):
        counts = [nodes_of_workers.count(i) for i in range(len(nodes))]
        used = [count for count in counts if count]
        if isinstance(placement.nodes, int) and (max(used) - min(used) > 1 or len(used) != placement.nodes):
            return False
        num_gpus = 1 if placement.device == "cuda" else 0
        return all(
            count * placement.cpus_per_worker <= node["CPU"] and count * num_gpus <= node.get("GPU", 0)
            for count, node in zip(counts, nodes, strict=True)
        )

    return any(map(holds, itertools.combinations_with_replacement(range(len(nodes)), placement.num_workers)))


@given(placement=PLACEMENTS, nodes=NODES)
def test_a_gang_is_refused_if_no_assignment_to_nodes_works(placement, nodes):
    assert (refusal(placement, nodes) is None) == placed_by_hand(placement, nodes)


def has(num_cpus, num_gpus=0):
    return {"CPU": num_cpus, "GPU": num_gpus}


@pytest.mark.parametrize(
    ("placement", "nodes", "message"),
    [
        (Placement(2, 8, "cpu"), [has(6), has(6)], "16 CPUs in one gang, the cluster has 12"),
        (Placement(1, 1, "cpu"), [], "1 CPU in one gang, the cluster has 0"),
        (Placement(3, 1, "cuda"), [has(8, 2)], "3 GPUs in one gang, the cluster has 2"),
        (Placement(2, 3, "cpu"), [has(4), has(2)], "2 workers with CPU 3 each, and no 2 fit on the nodes"),
        (Placement(2, 1, "cuda"), [has(8), has(1, 2)], "2 workers with CPU 1, GPU 1 each, and no 2 fit on the nodes"),
        (
            Placement(4, 1, "cpu", 2),
            [has(4), has(1)],
            "4 workers with CPU 1 each, evenly on 2 nodes; 2 of the cluster's nodes can hold one",
        ),
    ],
)
def test_a_refusal_has_the_numbers(placement, nodes, message):
    assert refusal(placement, nodes) == f"needs {message}"


@pytest.mark.parametrize(
    ("nodes", "free", "taken"),
    [
        ("pack", [2, 4, 3], (0, 4, 0)),
        ("pack", [2, 1, 2], (2, 0, 2)),
        ("spread", [2, 4, 3], (1, 2, 1)),
        ("spread", [0, 4, 1], (0, 3, 1)),
        (1, [2, 4, 3], (0, 4, 0)),
        (2, [2, 4, 3], (0, 2, 2)),
        (3, [2, 4, 3], (1, 2, 1)),
        (4, [2, 4, 3, 0], None),
        (2, [1, 9, 1], None),
    ],
)
def test_workers_are_placed_on_nodes(nodes, free, taken):
    assert shares(Placement(4, 1, "cpu", nodes), {"CPU": 1.0}, [{"CPU": float(n)} for n in free]) == taken


@given(placement=PLACEMENTS, cpus=st.lists(st.integers(0, 4), max_size=12))
def test_a_gang_gets_as_few_of_the_largest_nodes_as_possible(placement, cpus):
    nodes = [Node(str(i), str(i), {"CPU": float(count), "GPU": 1.0}) for i, count in enumerate(cpus)]
    has = [node.has for node in nodes]
    expected = shares(placement, needed(placement), has)
    for i in sorted(range(len(nodes)), key=lambda i: -cpus[i]):  # leave out one after another
        others = [{} if j == i else resources for j, resources in enumerate(has)]
        counts = shares(placement, needed(placement), others)
        if counts is not None and num_used(counts) == num_used(expected):
            expected, has = counts, others
    taken = FreeResources(nodes, exclusive=True).find(placement)
    assert taken == (None if expected is None else {str(i): count for i, count in enumerate(expected) if count})


def num_used(counts):
    return sum(count > 0 for count in counts)


def test_a_label_excludes_other_nodes_and_an_unknown_one_is_refused():
    nodes, labels = [has(1), has(4)], [{"type": "gpu", "ray.io/node-id": "1"}, {"type": "cpu"}]
    one, two, tpu = (Placement(n, 1, "cpu", "pack", f"type={t}") for n, t in ((1, "gpu"), (2, "gpu"), (1, "tpu")))
    assert refusal(one, nodes, labels) is None
    assert refusal(two, nodes, labels) == "needs 2 CPUs in one gang, the nodes with type=gpu have 1"
    assert refusal(tpu, nodes, labels) == "no node has the label type=tpu; there are: type=cpu, type=gpu"
    assert refusal(one, nodes) == "no node has the label type=gpu; there are: none"


class Leases(RuleBasedStateMachine):
    """Gangs of any shape come and go on two machines of five and three cores."""

    @initialize()
    def start(self):
        self.cores = {"a": (0, 1, 4, 5, 7), "b": (0, 1, 2)}
        self.leases = CoreLeases()
        for host, cores in (*self.cores.items(), *self.cores.items()):  # each host twice
            self.leases.add_node(host, numbered(*cores))
        self.held: list[tuple[dict[int, str], dict[int, tuple[int, ...]]]] = []

    def free(self, host):
        leased = sum(len(cores[r]) for hosts, cores in self.held for r in cores if hosts[r] == host)
        return len(self.cores[host]) - leased

    @rule(
        hosts=st.lists(st.sampled_from("ab"), min_size=1, max_size=6),
        num_cores=st.integers(1, 3),
        affinity=st.sampled_from([None, 2, "spread", "compact", "off"]),
    )
    def lease(self, hosts, num_cores, affinity):
        by_rank = dict(enumerate(hosts))
        cores = self.leases.lease(by_rank, num_cores, affinity)
        need = {host: hosts.count(host) * num_cores for host in hosts}
        if any(need[host] > len(self.cores[host]) for host in need):
            assert cores == {}  # it runs unpinned
        elif any(need[host] > self.free(host) for host in need):
            assert cores is None  # not now
        else:
            assert cores is not None and {len(c) for c in cores.values()} == {num_cores}
            assert list(cores) == list(by_rank)
        if cores is not None:
            self.held.append((by_rank, cores))

    @rule(listed=st.lists(st.sampled_from([0, 1, 4]), min_size=1, max_size=3, unique=True), num_ranks=st.integers(1, 3))
    def lease_listed(self, listed, num_ranks):
        by_rank = dict.fromkeys(range(num_ranks), "a")
        taken = {c for hosts, cores in self.held for rank in cores if hosts[rank] == "a" for c in cores[rank]}
        cores = self.leases.lease(by_rank, 1, tuple(listed))
        if taken & set(listed):
            assert cores is None  # not now
        else:
            assert cores is not None
            assert [core for rank in by_rank for core in cores[rank]] == listed
            self.held.append((by_rank, cores))

    @rule(data=st.data())
    def release(self, data):
        if self.held:
            self.leases.release(*self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def no_core_is_leased_twice(self):
        leased = [(hosts[rank], c) for hosts, cores in self.held for rank in cores for c in cores[rank]]
        assert len(leased) == len(set(leased))
        assert all(core in self.cores[host] for host, core in leased)

    def teardown(self):
        if not hasattr(self, "leases"):
            return
        for lease in self.held:
            self.leases.release(*lease)
        everything = self.leases.lease({0: "a", 1: "b"}, 3)
        assert everything is not None  # all came back
        self.leases.release({0: "a", 1: "b"}, everything)
        assert self.leases.lease({0: "a"}, 5) == {0: (0, 1, 4, 5, 7)}


TestNoCoreIsLeasedTwiceAndAllComeBack = Leases.TestCase


TWO_BY_TWO_BY_TWO = machine(sockets=2, cores=2, threads=2)  # socket 0: cores 0 and 1, their second threads 4 and 5


@pytest.mark.parametrize(
    ("taken", "count", "spread", "compact"),
    [
        ((), 2, (0, 2), (0, 4)),
        ((), 3, (0, 1, 2), (0, 4, 1)),
        ((), 6, (0, 4, 1, 2, 6, 3), (0, 4, 1, 5, 2, 6)),
        ((), 8, (0, 4, 1, 5, 2, 6, 3, 7), (0, 4, 1, 5, 2, 6, 3, 7)),
        # Socket 0 has only core 0's second thread. compact keeps larger sockets whole.
        ((0, 1, 5), 2, (4, 2), (2, 6)),
        ((0, 1, 5), 5, (4, 2, 6, 3, 7), (2, 6, 3, 7, 4)),
        # Socket 0 has one core with two threads. spread prefers a separate core to a separate socket.
        ((1, 5), 3, (0, 2, 3), (2, 6, 3)),
    ],
)
def test_spread_uses_all_sockets_and_compact_few(taken, count, spread, compact):
    free = [core for core in TWO_BY_TWO_BY_TWO if core.number not in taken]
    assert tuple(core.number for core in spread_out(free, count)) == spread
    assert tuple(core.number for core in close_together(free, count)) == compact


MACHINES = st.builds(machine, st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))


@given(data=st.data(), cores=MACHINES)
def test_spread_and_compact_are_optimal(data, cores):
    free = data.draw(st.lists(st.sampled_from(cores), min_size=1, unique=True))
    count = data.draw(st.integers(1, len(free)))
    spread, compact = spread_out(free, count), close_together(free, count)
    for chosen in (spread, compact):
        assert len(set(chosen)) == count and set(chosen) <= set(free)
    assert len({c.physical for c in spread}) == min(count, len({c.physical for c in free}))
    if count >= (sockets := len({c.package for c in free})):
        assert len({c.package for c in spread}) == sockets
    sizes = sorted((sum(c.package == p for c in free) for p in {c.package for c in free}), reverse=True)
    fewest = next(n for n in range(1, len(sizes) + 1) if sum(sizes[:n]) >= count)
    assert len({c.package for c in compact}) == fewest


def leased(hosts, num_cores, affinity):
    leases = CoreLeases()
    for host in set(hosts.values()):
        leases.add_node(host, TWO_BY_TWO_BY_TWO)
    return leases.lease(hosts, num_cores, affinity)


def test_affinity_selects_the_cores_of_each_worker():
    two = {0: "a", 1: "a"}
    assert leased(two, 2, "spread") == {0: (0, 1), 1: (2, 3)}
    assert leased(two, 2, "compact") == {0: (0, 4), 1: (1, 5)}
    assert leased(two, 2, None) == leased(two, 2, 2) == {0: (0, 1), 1: (2, 3)}
    assert leased({0: "a", 1: "a"}, 2, (7, 3, 1, 0)) == {0: (7, 3), 1: (1, 0)}
    assert leased({0: "a", 1: "b"}, 1, "2-3") == {0: (2, 3), 1: (2, 3)}
    assert leased({0: "a", 1: "a", 2: "b", 3: "a"}, 1, "0-3") == {0: (0,), 1: (1,), 3: (2, 3), 2: (0, 1, 2, 3)}


TWO_NODES = numbered(*range(16))
NODES_CORES = (
    frozenset({0, 1, 2, 3, 8, 9, 10, 11}),
    frozenset({4, 5, 6, 7, 12, 13, 14, 15}),
)  # as with two threads each


def near_of(*nodes):
    """Return the cores near each rank's GPU, given the GPU's NUMA node."""
    return {rank: NODES_CORES[node] for rank, node in enumerate(nodes)}


@pytest.mark.parametrize(
    ("nodes", "num_cores", "expected"),
    [
        ((1,), 2, {0: (4, 5)}),
        ((0, 1), 2, {0: (0, 1), 1: (4, 5)}),
        ((1, 0), 2, {0: (4, 5), 1: (0, 1)}),
        ((1, 1), 4, {0: (4, 5, 6, 7), 1: (12, 13, 14, 15)}),
        ((0, 0, 1, 1), 4, {0: (0, 1, 2, 3), 1: (8, 9, 10, 11), 2: (4, 5, 6, 7), 3: (12, 13, 14, 15)}),
        ((0, 0, 0, 0, 1, 1, 1, 1), 2, {rank: (n, n + 1) for rank, n in enumerate((0, 2, 8, 10, 4, 6, 12, 14))}),
        # Four GPUs on a NUMA node with cores for two: the other ranks get the remaining cores.
        ((1, 1, 1, 1), 4, {0: (4, 5, 6, 7), 1: (12, 13, 14, 15), 2: (0, 1, 2, 3), 3: (8, 9, 10, 11)}),
        # Each rank's own cores come first.
        ((0, 1), 7, {0: (0, 1, 2, 3, 8, 9, 10), 1: (4, 5, 6, 7, 12, 13, 14)}),
        ((0, 0), 5, {0: (0, 1, 2, 3, 8), 1: (9, 10, 11, 4, 5)}),
    ],
)
def test_each_worker_gets_cores_near_its_gpu_first(nodes, num_cores, expected):
    leases = CoreLeases()
    leases.add_node("a", TWO_NODES)
    assert leases.lease(dict.fromkeys(expected, "a"), num_cores, None, near_of(*nodes)) == expected


def test_a_trial_does_not_wait_for_cores_near_its_gpu():
    leases = CoreLeases()
    for host in "ab":
        leases.add_node(host, TWO_NODES)
    leases.lease({0: "a"}, 1, (4, 5, 6))
    first = leases.lease({0: "a"}, 4, None, near_of(1))
    assert first == {0: (7, 12, 13, 14)}
    assert leases.lease({0: "a", 1: "b"}, 2, None, near_of(1, 1)) == {0: (15, 0), 1: (4, 5)}
    leases.release({0: "a"}, first)
    assert leases.lease({0: "a"}, 2, None, near_of(1)) == {0: (7, 12)}


@pytest.mark.parametrize("affinity", ["spread", "compact", "0-1", (1, 0)])
def test_a_given_affinity_overrides_gpu_locality(affinity):
    leases, others = CoreLeases(), CoreLeases()
    for each in (leases, others):
        each.add_node("a", TWO_NODES)
    two = {0: "a", 1: "a"}
    assert leases.lease(two, 1, affinity, near_of(1, 1)) == others.lease(two, 1, affinity)


@given(
    nodes=st.lists(st.integers(0, 1), min_size=1, max_size=8),
    num_cores=st.integers(1, 8),
    taken=st.sets(st.integers(0, 15)),
)
def test_the_number_of_cores_near_gpus_is_maximal(nodes, num_cores, taken):
    leases = CoreLeases()
    leases.add_node("a", TWO_NODES)
    if taken:
        leases.lease({0: "a"}, 1, tuple(taken))  # another trial's
    hosts = dict.fromkeys(range(len(nodes)), "a")
    cores, plain = (leases.lease(hosts, num_cores, None, near) for near in (near_of(*nodes), None))
    if cores:
        leases.release(hosts, cores)
        plain = leases.lease(hosts, num_cores)
        num_near = sum(
            core in NODES_CORES[node] for node, rank in zip(nodes, cores, strict=True) for core in cores[rank]
        )
        free = [NODES_CORES[node] - taken for node in (0, 1)]
        assert num_near == sum(min(len(free[node]), nodes.count(node) * num_cores) for node in (0, 1))
        assert {len(each) for each in cores.values()} == {num_cores}
        assert len({core for each in cores.values() for core in each} - taken) == len(nodes) * num_cores
    assert bool(cores) is bool(plain)


def test_missing_cores_are_refused_with_the_existing_ones():
    leases = CoreLeases()
    leases.add_node("a", numbered(0, 1, 2, 3))
    leases.add_node("b", numbered(0, 1, 2, 8))
    both = {0: "a", 1: "b"}
    assert leases.refusal(both, "0-3") == "there is no core 3: the machine's are 0-2,8"
    assert leases.refusal(both, (5, 9, 6)) == "there is no core 5-6,9: the machine's are 0-3"
    for fine in (None, 64, "spread", "compact", "off", "0-2"):
        assert leases.refusal(both, fine) is None


@pytest.mark.parametrize(
    ("of_a", "of_b", "leased"),
    [
        ((0, 1), (2, 3), {0: (0,), 1: (2,)}),
        ((0, 1), (0, 1), {0: (0,), 1: (1,)}),
        ((0, 1, 2), (0, 1), {0: (0,), 1: (1,)}),
        ((0,), (0,), {}),  # they share the core, whatever is leased
    ],
    ids=["cores of their own", "the same cores", "common cores", "a single core"],
)
def test_two_nodes_of_a_machine_lease_no_core_twice(of_a, of_b, leased):
    leases = CoreLeases()
    for node, numbers in (("a", of_a), ("b", of_b)):
        leases.add_node(node, numbered(*numbers), "machine")
    nodes = {0: "a", 1: "b"}
    assert leases.lease(nodes, 1) == leased
    assert not leases.lease({0: "b"}, 2)
    leases.release(nodes, leased)
    assert leases.lease(nodes, 1) == leased
