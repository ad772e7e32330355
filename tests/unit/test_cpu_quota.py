"""A container's CPU quota limits the number of cores. Where it leaves no cores of its own, nothing is pinned."""

import contextlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.observe.quota import CGROUPS, cpu_quota, whole_cores
from raypar.run import cluster
from raypar.study.trial import Placement
from raypar.train import affinity
from raypar.train.affinity import CAN_PIN, allowed_cores, host_cores, own_cores

VERSION_2 = "0::/kubepods.slice/pod.slice/container.scope\n"
VERSION_1 = "9:name=systemd:/docker/abc\n3:cpuset:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/docker/abc\n"


def tree(folder, of_process, files):
    """Write a process's cgroups: files by path."""
    for path, text in files.items():
        (file := folder / "cgroup" / path).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / "of_process").write_text(of_process)
    return cpu_quota(folder / "cgroup", folder / "of_process")


@pytest.mark.parametrize(
    ("of_process", "files", "expected"),
    [
        (VERSION_2, {}, math.inf),
        (VERSION_2, {"kubepods.slice/pod.slice/container.scope/cpu.max": "max 100000\n"}, math.inf),
        (VERSION_2, {"kubepods.slice/pod.slice/container.scope/cpu.max": "350000 100000\n"}, 3.5),
        # A quota above it is smaller.
        (
            VERSION_2,
            {
                "kubepods.slice/pod.slice/container.scope/cpu.max": "400000 100000\n",
                "kubepods.slice/pod.slice/cpu.max": "100000 50000\n",
                "kubepods.slice/cpu.max": "max 100000\n",
            },
            2.0,
        ),
        # A container is shown its own cgroup as the root.
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        (VERSION_2, {"cpu.max": "150000 100000\n"}, 1.5),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "350000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3.5),
        (
            VERSION_1,
            {
                "cpu/docker/abc/cpu.cfs_quota_us": "200000\n",
                "cpu/docker/abc/cpu.cfs_period_us": "100000\n",
                "cpu/docker/cpu.cfs_quota_us": "-1\n",
                "cpu/docker/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        # Of another container, and of another controller.
        (VERSION_2, {"kubepods.slice/pod.slice/other.scope/cpu.max": "100000 100000\n"}, math.inf),
        (VERSION_1, {"cpuset/docker/abc/cpu.max": "100000 100000\n"}, math.inf),
        (VERSION_2, {"cpu.max": "nonsense\n"}, math.inf),
        (VERSION_2, {"cpu.max": "100000 0\n"}, math.inf),
    ],
)
def test_the_smallest_quota_of_a_cgroup_and_those_above_it_counts(tmp_path, of_process, files, expected):
    assert tree(tmp_path, of_process, files) == expected


def test_no_cgroups_mean_no_quota(tmp_path):
    assert cpu_quota(tmp_path, tmp_path / "absent") == math.inf


@given(st.lists(st.one_of(st.none(), st.integers(1, 10**7)), min_size=1, max_size=5), st.booleans())
def test_nested_quotas_have_the_smallest_one(tmp_path_factory, quotas, is_version_2):
    path, files = Path("." if is_version_2 else "cpu"), {}
    for depth, quota in enumerate(quotas):
        if is_version_2:
            files[path / "cpu.max"] = f"{quota or 'max'} 100000"
        else:
            files |= {path / "cpu.cfs_quota_us": f"{quota or -1}", path / "cpu.cfs_period_us": "100000"}
        path /= f"level{depth}"
    inner = str(path.parent if is_version_2 else path.parent.relative_to("cpu"))
    of_process = f"0::/{inner}\n" if is_version_2 else f"4:cpu:/{inner}\n"
    smallest = min((quota / 100_000 for quota in quotas if quota), default=math.inf)
    assert tree(tmp_path_factory.mktemp("nested"), of_process, files) == smallest


@pytest.mark.parametrize(("quota", "expected"), [(3.5, 3), (4.0, 4), (0.5, 1), (1.99, 1), (9.0, 8), (math.inf, 8)])
def test_a_quota_pays_for_whole_cores_of_the_allowed_ones(quota, expected):
    assert whole_cores(quota, 8) == expected


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(affinity, "allowed_cores", lambda: tuple(range(8, 16)))
    return lambda quota: monkeypatch.setattr(affinity, "cpu_quota", lambda: quota)


@pytest.mark.parametrize(("quota", "num_cores"), [(3.5, 3), (0.1, 1), (7.9, 7)])
def test_two_containers_with_a_share_of_a_machine_are_counted_and_not_pinned_to_the_same_cores(
    eight_cores, quota, num_cores
):
    eight_cores(quota)
    machine = cluster.this_machine()
    assert machine.num_cpus == len(host_cores()) == num_cores
    assert own_cores() == machine.cores == ()
    wide = Placement(num_workers=num_cores + 1, cpus_per_worker=1, device="cpu")
    assert list(machine.refusals([wide])) == [wide]


@pytest.mark.parametrize("quota", [8.0, 12.5, math.inf])
def test_a_container_with_cores_of_its_own_is_pinned_to_them(eight_cores, quota):
    eight_cores(quota)
    assert [core.number for core in own_cores()] == list(range(8, 16))
    assert own_cores() == host_cores() and cluster.this_machine().num_cpus == 8


SEEN = """
import json, os
from raypar.observe.quota import cpu_quota
from raypar.train.affinity import allowed_cores, host_cores, own_cores
with open(os.environ["TASKS"], "w") as tasks:
    tasks.write(str(os.getpid()))
print(json.dumps([cpu_quota(), len(allowed_cores()), len(host_cores()), len(own_cores())]))
"""


@contextlib.contextmanager
def real_cgroup(quota_us):
    """Make a cgroup with a quota per 100 ms, and one inside. Yields the inner one's file of processes."""
    version_1 = CGROUPS / "cpu" / "cpu.cfs_quota_us"
    root = version_1.parent if version_1.parent.exists() else CGROUPS
    outer = root / f"raypar-test-{os.getpid()}"
    inner = outer / "inner"
    made = []
    try:
        for folder in (outer, inner):
            folder.mkdir()
            made.append(folder)
        if root == CGROUPS:
            (outer / "cpu.max").write_text(f"{quota_us} 100000")
        else:
            (outer / "cpu.cfs_quota_us").write_text(str(quota_us))
        yield inner / "cgroup.procs"
    except OSError as error:
        pytest.skip(f"can't make a cgroup here: {error}")
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                folder.rmdir()


@pytest.mark.skipif(not CAN_PIN or len(allowed_cores()) < 2, reason="needs two cores")
def test_a_process_in_a_real_cgroup_has_the_cores_that_its_quota_pays_for():
    num_cores = len(allowed_cores())
    with real_cgroup(100_000 * num_cores - 50_000) as tasks:
        environment = {**os.environ, "TASKS": str(tasks)}
        done = subprocess.run([sys.executable, "-c", SEEN], env=environment, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == [num_cores - 0.5, num_cores, num_cores - 1, 0]
