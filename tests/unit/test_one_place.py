"""A fact costs one edit: what an installed package adds in one place is found everywhere.

The package is made on the fly: a folder with a module and a ``dist-info``, on the path of another process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE = """
from raypar import Workload
from raypar.parallel.base import DataParallelism
from raypar.study.strategy import StrategyTraits
from raypar.study.workload import whole_number


class Gossip(DataParallelism):
    pass


def conflicts(config, swept):
    if config["num_peers"] >= config["num_workers"] > 1:
        yield "num_peers", "is as many as there are workers", "use fewer"


gossip = StrategyTraits(
    build=Gossip,
    splits="the batch; each worker averages its weights with some others",
    built_on="nothing at all",
    options={"num_peers": whole_number(1, "workers to average with")},
    conflicts=conflicts,
)
pets = Workload(
    name="pets", model=len, data=len, options={"breed": "poodle"}, dataset="37 breeds of pets", description="which pet"
)
"""
ENTRY_POINTS = """
[raypar.strategies]
gossip = fakes:gossip

[raypar.workloads]
pets = fakes:pets
"""
STUDY = """
from raypar import Study, grid
from fakes import pets

study = Study(
    workload=pets, space={"num_workers": grid(1, 2)}, baseline={"num_workers": 1}, config={"strategy": "gossip"}
)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder in which the package is installed, and a study that uses it."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "fakes-1.0.dist-info"
    info.mkdir()
    (folder / "fakes.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fakes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "study.py").write_text(STUDY)
    return folder


@pytest.fixture(scope="module")
def in_folder(folder):
    """Return a function that runs Python in the folder, with the package installed, and returns what it prints."""

    def run(*words):
        path = os.pathsep.join([str(ROOT), str(folder)])
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True
        )
        return " ".join(done.stdout.split())

    return run


RAYPAR = ("-c", "from raypar.cli.app import main; main()")
DOCS = "from docs import hooks; print(hooks.{}())"
LOAD = "from study import study; "
CASES = {
    # a strategy
    "its option and its conflict are checked": (
        (*RAYPAR, "plan", "study.py", "--set", "num_peers=4"),
        "num_peers = 4: is as many as there are workers → use fewer",
    ),
    "a value of its option is checked": (
        (*RAYPAR, "plan", "study.py", "--set", "num_peers=0"),
        "`num_peers` must be at least 1 → workers to average with",
    ),
    "its option is refused for another strategy": (
        (*RAYPAR, "plan", "study.py", "--set", "strategy=ddp", "--set", "num_peers=2"),
        'has no effect with strategy="ddp" → leave it out, or use a strategy that has it: gossip',
    ),
    "its name is suggested": ((*RAYPAR, "plan", "study.py", "--set", "strategy=gosip"), "did you mean 'gossip'?"),
    "its option is in the configs of its trials": (
        ("-c", LOAD + "print({spec.config['num_peers'] for spec in study.trials()})"),
        "{1}",
    ),
    "its option is in no other trial's config, nor in its identity": (
        ("-c", LOAD + "from raypar.study.options import resolve; print('num_peers' in resolve(study.workload, {}))"),
        "False",
    ),
    "its class is built": (
        ("-c", "from raypar.study.strategy import STRATEGIES; print(STRATEGIES['gossip'].build)"),
        "<class 'fakes.Gossip'>",
    ),
    "it is documented": (("-c", DOCS.format("strategies")), "| `gossip` | the batch; each worker averages"),
    "its option is documented": (
        ("-c", DOCS.format("hyperparameters")),
        "| `num_peers` | `1` | workers to average with | `gossip` |",
    ),
    # a workload
    "it is listed": ((*RAYPAR, "model", "list"), "pets 37 breeds of pets accuracy which pet"),
    "it is shown": ((*RAYPAR, "model", "list", "pets"), "breed poodle option of workload pets"),
    "its name is completed": (
        ("-c", "from raypar.cli.common import complete_workload as of; print(of('pe'))"),
        "['pets']",
    ),
    "it is documented, too": (("-c", DOCS.format("workloads")), "### pets which pet · 37 breeds of pets"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_package_adds_is_found_everywhere(in_folder, case):
    words, expected = CASES[case]
    assert expected in in_folder(*words)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ("aloud = fakes:absent", "fakes:absent of raypar.strategies, in the package broken: can't be imported: "),
        ("aloud = fakes:pets", "is a Workload, not a StrategyTraits → correct the package broken, or uninstall it"),
        ("ddp = fakes:gossip", "has the same name as another entry"),
    ],
)
def test_a_package_whose_entries_can_not_be_used_is_named(folder, in_folder, entries, expected):
    info = folder / "broken-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    file = info / "entry_points.txt"
    file.write_text(f"[raypar.strategies]\n{entries}\n")
    try:
        assert expected in in_folder(*RAYPAR, "plan", "study.py")
    finally:
        file.unlink()
