"""Two machines over SSH, by the commands of the documentation (needs root: the machines are namespaces of this one)."""

import re
import sys

import pytest
from harness import digits_study
from netlab import Lab, why_not
from netlab.ray_cluster import REPOSITORY, RayCluster
from test_docs import blocks, section

WHY_NOT = why_not(with_ssh=True)
pytestmark = [
    *(pytest.mark.cluster, pytest.mark.timeout(600)),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]
FIRST, SECOND = 0, 1
STUDY = digits_study('{"num_workers": grid(1)}')
# This environment replaces an installation on the second machine.
RAY = f'#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {sys.prefix}/bin/ray "$@"\n'


@pytest.fixture
def machines():
    with Lab(2, with_ssh=True) as lab:
        for host in (FIRST, SECOND):
            (lab.home(host) / ".ssh").mkdir(exist_ok=True)
            config = f"IdentityFile {lab.folder / 'key'}\nStrictHostKeyChecking no\nLogLevel ERROR\n"
            (lab.home(host) / ".ssh" / "config").write_text(config)
        programs = lab.home(SECOND) / "venv" / "bin"
        programs.mkdir(parents=True)
        (programs / "python").symlink_to(f"{sys.prefix}/bin/python")
        for name, text in (("ray", RAY), ("pip", "#!/bin/sh\n")):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        yield RayCluster(lab)


def test_two_machines_train_together_by_the_documented_commands(machines):
    start, end = blocks(section("clusters.md", "Two machines over SSH"), "sh")
    for host, address in ((FIRST, "192.0.2.10"), (SECOND, "192.0.2.11")):
        start, end = (text.replace(address, machines.lab.address(host)) for text in (start, end))
    start, end = (text.replace("ubuntu@", "root@") for text in (start, end))
    (machines.lab.home(FIRST) / "s.py").write_text(STUDY)
    printed = machines.run(FIRST, f"set -e\n{start}")
    assert "s: 2 points, 2 trials" in " ".join(printed.split())
    shown = machines.run(FIRST, "raypar store export s s.csv && cat s.csv")
    assert len(set(re.findall(r"\bnode[01]\b", shown))) == 2, shown
    machines.run(FIRST, f"set -e\n{end}")
    for host in (FIRST, SECOND):
        assert "raylet" not in machines.run(host, "ps -eo comm")
