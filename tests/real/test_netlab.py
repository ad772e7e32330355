"""The network of hosts that other tests and benchmarks stand on: links as asked for, and nothing left behind.

Rates and delays are checked from below only: a busy machine adds to every time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from netlab import Lab, Shape, why_not  # noqa: E402
from netlab.shape import BURST_BYTES  # noqa: E402

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

PORT = 5000
# Takes in what comes, counts it, and answers every connection's end with the count.
COUNTER = f"""
import socket
listen = socket.create_server(("", {PORT}))
print("listens", flush=True)
while True:
    line, (sender, _) = listen.accept()
    count = 0
    while received := line.recv(1 << 20):
        count += len(received)
    line.sendall(f"{{count}} from {{sender}}".encode())
    line.close()
"""
# Tells the answer and how long it took from the connection's beginning.
SENDER = f"""
import json, socket, sys, time
begun_s = time.monotonic()
line = socket.create_connection((sys.argv[1], {PORT}))
connected_s = time.monotonic() - begun_s
line.sendall(bytes(int(sys.argv[2])))
line.shutdown(socket.SHUT_WR)
answer = line.recv(100).decode()
print(json.dumps({{"answer": answer, "connected_s": connected_s, "took_s": time.monotonic() - begun_s}}))
"""
OWNER = """
import sys
sys.path.insert(0, sys.argv[1])
from netlab import Lab, Shape
lab = Lab(2)
lab.shape(Shape(delay_s=0.001))
print(*(lab.host_pid(i) for i in range(2)), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3) as lab:
        for host in (1, 2):
            counter = lab.popen(host, [sys.executable, "-c", COUNTER], stdout=subprocess.PIPE, text=True)
            assert counter.stdout is not None and counter.stdout.readline() == "listens\n"
        yield lab


def sent(lab: Lab, to: str, num_bytes: int, times: int = 1) -> tuple[set[str], float, float]:
    """Send from host 0 so many times: the answers, and the shortest times of a connection's start and of all of it."""
    told = [json.loads(lab.run(0, [sys.executable, "-c", SENDER, to, str(num_bytes)])) for _ in range(times)]
    return {t["answer"] for t in told}, min(t["connected_s"] for t in told), min(t["took_s"] for t in told)


def test_hosts_reach_each_other_by_address_and_by_name(lab: Lab) -> None:
    lab.shape(Shape())
    for to in (lab.address(1), lab.address(2), "node2"):
        assert sent(lab, to, 100_000)[0] == {f"100000 from {lab.address(0)}"}
    assert [lab.run(i, ["hostname"]).strip() for i in range(3)] == ["node0", "node1", "node2"]
    assert lab.run(0, ["hostname", "-i"]).strip() == lab.address(0)


def test_a_host_sees_its_own_processes_only(lab: Lab) -> None:
    seen = lab.run(0, [sys.executable, "-c", "import psutil; print(*psutil.pids())"]).split()
    assert "1" in seen and len(seen) < 10
    assert psutil.Process(lab.host_pid(0)).pid > 10


def test_a_delay_is_added_to_each_way_and_taken_off_again(lab: Lab) -> None:
    delay_s = 0.04
    lab.shape(Shape(delay_s=delay_s))
    answers, connected_s, _ = sent(lab, lab.address(2), 200_000, times=3)
    assert answers == {f"200000 from {lab.address(0)}"}
    assert connected_s >= 2 * delay_s
    lab.shape(Shape())
    assert sent(lab, lab.address(2), 1, times=5)[1] < 2 * delay_s


@pytest.mark.parametrize("delay_s", [0.0, 0.002])
def test_a_rate_limits_both_ends_of_every_link(lab: Lab, delay_s: float) -> None:
    rate_bit_per_s, num_bytes = 20e6, 2_000_000
    lab.shape(Shape(rate_bit_per_s, delay_s))
    for where, device in [(None, f"port{i}") for i in range(3)] + [(i, "eth0") for i in range(3)]:
        (limit,) = json.loads(lab.run(where, ["tc", "-j", "qdisc", "show", "dev", device]))
        assert limit["kind"] == "tbf"
        assert limit["options"]["rate"] == rate_bit_per_s / 8  # tc tells bytes
    answers, _, took_s = sent(lab, lab.address(1), num_bytes)
    assert answers == {f"{num_bytes} from {lab.address(0)}"}
    # Each end lets a burst pass at once.
    assert took_s >= (num_bytes - 2 * BURST_BYTES) * 8 / rate_bit_per_s
    lab.shape(Shape())
    assert "tbf" not in lab.run(None, ["tc", "qdisc", "show"]) + lab.run(0, ["tc", "qdisc", "show"])


def network_namespaces() -> set[str]:
    """Of all processes of this machine."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(str((process / "ns" / "net").readlink()))
        except OSError:  # it has ended
            continue
    return found


def descendants() -> set[psutil.Process]:
    """Of this process."""
    return set(psutil.Process().children(recursive=True))


def own_links() -> list[str]:
    return [link["ifname"] for link in json.loads(subprocess.check_output(["ip", "-j", "link"]))]


def test_nothing_of_a_lab_is_left_when_it_is_closed() -> None:
    links, others = own_links(), descendants()
    lab = Lab(2)
    lab.shape(Shape(1e9, 0.001))
    still_at_work = lab.popen(1, ["sleep", "1000"])
    of_hosts = {str(Path(f"/proc/{lab.host_pid(i)}/ns/net").readlink()) for i in range(2)}
    ours = descendants() - others
    assert of_hosts <= network_namespaces() and len(of_hosts) == 2
    assert any("relay.py" in " ".join(p.cmdline()) for p in ours)
    lab.close()
    assert still_at_work.wait(10) != 0
    assert not descendants() & ours
    assert not of_hosts & network_namespaces()
    assert own_links() == links
    assert not lab.folder.exists()


def test_a_lab_ends_with_the_process_that_made_it_however_that_ends(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(TESTS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # its folder of logs is all that may stay
    )
    assert owner.stdout is not None
    hosts = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    assert len(hosts) == 2
    owner.kill()
    owner.communicate()
    assert not psutil.wait_procs(hosts, timeout=10)[1]
