"""The simulated network of tests and benchmarks: its links have the requested shape, and it leaves nothing behind.

Rates and delays are only checked from below, since a busy machine adds to every time.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from harness import HERE
from netlab import BURST_BYTES, Lab, Shape, why_not

from raypar import Study, grid
from raypar.analysis.analyse import Question, analyse
from raypar.measure.telemetry import MIN_STALL_S
from raypar.run.ranks import RankEnd, trial_result
from raypar.train.job import RankOutcome
from raypar.workloads import digits

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
CUT_S = MIN_STALL_S + 1.0

# Counts received bytes, and answers the end of each connection with the count.
COUNTER = """
import socket
listen = socket.create_server(("", 5000))
print("listens", flush=True)
while True:
    line, (sender, _) = listen.accept()
    count = 0
    while received := line.recv(1 << 20):
        count += len(received)
    line.sendall(f"{count} from {sender}".encode())
    line.close()
"""
# Prints the answer, the time to connect and the total time.
SENDER = """
import json, socket, sys, time
begun_s = time.monotonic()
line = socket.create_connection((sys.argv[1], 5000))
connected_s = time.monotonic() - begun_s
line.sendall(bytes(int(sys.argv[2])))
line.shutdown(socket.SHUT_WR)
print(json.dumps([line.recv(100).decode(), connected_s, time.monotonic() - begun_s]))
"""
# Trains on two hosts, as a rank of a trial does.
RANK = """
import json, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from raypar.parallel.strategy import DistContext
from raypar.study.options import resolve
from raypar.train.loop import train
from raypar.workloads import digits
class Channel:
    def report(self, metrics):
        print("reported", flush=True)
        return True
rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", f"tcp://{sys.argv[2]}:5001", timedelta(seconds=120), 2, rank)
# Evaluations are rare, since a cut during one does not stall a step.
config = resolve(digits, {"num_workers": 2, "epochs": 60, "batch_size": 128, "eval_every_steps": 300})
outcome = train(digits, config, 0, DistContext(rank, 2, torch.device("cpu")), Channel(), start_s=0.0)
print(json.dumps(outcome.step_times_s))
"""
# Joins the process group as a rank of a gang on two hosts does, and adds up the ranks' numbers.
MEMBER = """
import os, socket, sys
import torch
import torch.distributed as dist
from raypar.train.job import RankContext
from raypar.train.worker import _process_group
rank, first, address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
listen = socket.create_server((first, 5001)).detach() if rank == 0 else None
context = RankContext(rank, 2, 0, 1, rank, (first, 5001), 0.0, node_ip=address)
with _process_group(context, torch.device("cpu"), listen):
    total = torch.tensor(1.0 + rank)
    dist.all_reduce(total)
    print(int(total), os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
"""
OWNER = """
import sys
from netlab import Lab, Shape
lab = Lab(2)
lab.shape(Shape(1e9, 0.001))
print(*(lab.host_pid(i) for i in range(2)), lab.folder, flush=True)
sys.stdin.readline()
lab.close()
"""


@pytest.fixture(scope="module")
def lab():
    with Lab(3) as lab:
        for host in (1, 2):
            counter = lab.popen(host, [sys.executable, "-c", COUNTER], stdout=subprocess.PIPE, text=True)
            assert counter.stdout is not None and counter.stdout.readline() == "listens\n"
        yield lab


def sent(lab, to, num_bytes, times=1):
    """Send from host 0 `times` times; return the shortest time to connect and the shortest total time."""
    printed = [json.loads(lab.run(0, [sys.executable, "-c", SENDER, to, str(num_bytes)])) for _ in range(times)]
    assert {answer for answer, _, _ in printed} == {f"{num_bytes} from {lab.address(0)}"}
    return min(connected_s for _, connected_s, _ in printed), min(took_s for _, _, took_s in printed)


def test_hosts_reach_each_other_and_see_only_their_own_processes(lab):
    lab.shape(Shape())
    for to in (lab.address(1), lab.address(2), "node2"):
        sent(lab, to, 100_000)
    assert [lab.run(i, ["hostname"]).strip() for i in range(3)] == ["node0", "node1", "node2"]
    assert lab.run(0, ["hostname", "-i"]).strip() == lab.address(0)
    seen = lab.run(0, [sys.executable, "-c", "import psutil; print(*psutil.pids())"]).split()
    assert "1" in seen and len(seen) < 10 and psutil.pid_exists(lab.host_pid(0))


def test_a_delay_is_added_in_both_directions_and_removed_again(lab):
    lab.shape(Shape(delay_s=0.04))
    assert sent(lab, lab.address(2), 200_000, times=3)[0] >= 0.08
    lab.shape(Shape())
    assert sent(lab, lab.address(2), 1, times=5)[0] < 0.08


@pytest.mark.parametrize("delay_s", [0.0, 0.002])
def test_a_rate_limits_both_ends_of_every_link(lab, delay_s):
    rate_bit_per_s, num_bytes = 20e6, 2_000_000
    lab.shape(Shape(rate_bit_per_s, delay_s))
    for where, device in [(None, f"port{i}") for i in range(3)] + [(i, "eth0") for i in range(3)]:
        (limit,) = json.loads(lab.run(where, ["tc", "-j", "qdisc", "show", "dev", device]))
        assert (limit["kind"], limit["options"]["rate"]) == ("tbf", rate_bit_per_s / 8)  # tc prints bytes
    # Each end lets a burst pass at once.
    assert sent(lab, lab.address(1), num_bytes)[1] >= (num_bytes - 2 * BURST_BYTES) * 8 / rate_bit_per_s
    lab.shape(Shape())
    assert "tbf" not in lab.run(None, ["tc", "qdisc", "show"]) + lab.run(0, ["tc", "qdisc", "show"])


def test_a_link_cut_during_a_timed_trial_is_a_stall(lab):
    lab.shape(Shape())
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-c", RANK]
    how = {"stdout": subprocess.PIPE, "text": True, "env": env}
    ranks = [lab.popen(host, [*command, str(host), lab.address(0)], **how) for host in (0, 1)]
    for rank in ranks:
        assert rank.stdout.readline() == "reported\n"
    lab.run(None, ["ip", "link", "set", "port1", "down"])
    time.sleep(CUT_S)
    lab.run(None, ["ip", "link", "set", "port1", "up"])
    printed = [rank.communicate()[0].splitlines()[-1] for rank in ranks]
    ends = {i: RankEnd(RankOutcome(step_times_s=tuple(json.loads(line)))) for i, line in enumerate(printed)}
    result = trial_result(Study(workload=digits, space={"num_workers": grid(2)}).trials()[0], ends)
    (stall_s,) = result.conditions.stalls_s
    assert stall_s >= CUT_S
    assert (
        analyse(Question("cut", {}, ()), [result]).warnings[0].detail.startswith("1 of 1 trial stalled within a step")
    )


def test_ranks_connect_even_if_host_names_resolve_to_loopback():
    """By default, Gloo listens at the address of the host's name, which Debian's installer sets to 127.0.1.1."""
    env = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    how["env"] = {**env, "PYTHONPATH": str(HERE.parents[1])}
    with Lab(2) as lab:
        for host in (0, 1):
            hosts = lab.folder / f"hosts{host}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 node{host}\n")
            lab.run(host, ["mount", "--bind", hosts, "/etc/hosts"])
            # Like Docker's bridge, with the same address on every host.
            lab.run(host, ["ip", "link", "add", "br-decoy", "type", "bridge"])
            lab.run(host, ["ip", "addr", "add", "172.17.0.1/16", "dev", "br-decoy"])
            lab.run(host, ["ip", "link", "set", "br-decoy", "up"])
        command = [sys.executable, "-c", MEMBER]
        ranks = [lab.popen(i, [*command, str(i), lab.address(0), lab.address(i)], **how) for i in (0, 1)]
        printed = [rank.communicate()[0] for rank in ranks]
        assert all(text.endswith("3 eth0 =eth0\n") for text in printed), printed


@pytest.mark.parametrize("is_killed", [False, True], ids=["closed", "killed"])
def test_a_lab_leaves_nothing_when_closed_or_killed(is_killed, tmp_path):
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(HERE.parent)}
    links = subprocess.check_output(["ip", "-j", "link"])
    with psutil.Popen([sys.executable, "-c", OWNER], stdin=-1, stdout=-1, text=True, env=env) as owner:
        *pids, folder = owner.stdout.readline().split()
        descendants = owner.children(recursive=True)
        assert {int(pid) for pid in pids} < {process.pid for process in descendants}
        assert any("relay.py" in " ".join(process.cmdline()) for process in descendants)
        if is_killed:  # only its folder of logs may stay
            owner.kill()
        owner.communicate("\n")
    assert psutil.wait_procs(descendants, timeout=10)[1] == []
    assert subprocess.check_output(["ip", "-j", "link"]) == links
    assert is_killed or not Path(folder).exists()
