"""benchmarks/observe.py, script_bugs.py, improve.py and foreign_scripts.py compare and plant what they say."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from torchvision.datasets import MNIST

from raypar.study.observation import ObservedRank
from raypar.study.profile import PARTS, Breakdown
from raypar.study.script_settings import SCRIPT_SETTINGS


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module


def run_of(observe, by_hand, step_s, **parts):
    rank = ObservedRank(breakdown=Breakdown(step_s, dict.fromkeys(PARTS, 0.0) | parts, 0.0))
    return observe.Run([{"parts": by_hand}], [SimpleNamespace(rank=rank)])


def test_parts_are_compared_as_shares_and_ddp_communicates_in_the_backward_pass(benchmark):
    observe = benchmark("observe")
    by_hand = {"forward": 2.0, "backward": 6.0, "optimizer": 2.0}
    parts = {"forward": 4.0, "backward": 8.0, "exposed_communication": 4.0, "optimizer": 2.0, "other": 2.0}
    gaps = observe.part_gaps(run_of(observe, by_hand, 20.0, **parts))
    differing = {part: gap for (_, part), gap in gaps.items() if abs(gap) > 1e-9}
    assert differing == pytest.approx({"optimizer": -0.1, "other": 0.1})
    by_hand = {"forward": 5.0, "exposed_communication": 5.0}
    run = run_of(observe, by_hand, 1.0, forward=0.5, backward=0.1, exposed_communication=0.3, stragglers=0.1)
    assert observe.largest_gap([run, run])[0] == pytest.approx(0.1)
    assert observe.part_gaps(run)[0, "exposed_communication"] == pytest.approx(-0.1)


def test_planted_mistakes_and_remedies_exist(benchmark):
    script_bugs, improve = benchmark("script_bugs"), benchmark("improve")
    assert len(script_bugs.KINDS) == 12 and set(script_bugs.KINDS) <= script_bugs.ABOUT_CODE
    assert {shape for shapes in script_bugs.KINDS.values() for shape in shapes} == set(script_bugs.PACKAGES)
    assert all(case.remedy <= SCRIPT_SETTINGS.keys() for case in improve.CASES.values())


def test_random_images_are_mnist_to_torchvision(benchmark, tmp_path):
    benchmark("foreign_scripts")._mnist("data", 50)(tmp_path)
    train, test = (MNIST(str(tmp_path / "data"), train=is_train, download=True) for is_train in (True, False))
    assert (len(train), len(test)) == (50, 1000) and train[0][0].size == (28, 28)
    assert set(test.targets.tolist()) == set(range(10))
