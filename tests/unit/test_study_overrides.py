"""What --set, --repeats and --seed change in a study; mistaken ones are in `bad_input`."""

from __future__ import annotations

from pathlib import Path

import pytest
from loading import loaded

from raypar import StudyError, grid
from raypar.study.overrides import parse_value
from raypar.study.space import Choice, Domain, Grid, LogUniform, RandInt, Uniform, Value

pytestmark = pytest.mark.usefixtures("modules_as_they_were")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", 0.1),
        ("1e-3", 1e-3),
        ("-1", -1),
        ("adam", "adam"),
        ("'adam'", "adam"),
        ("None", None),
        ("True", True),
        ("true", True),
        ("false", False),
        ("cuda:0", "cuda:0"),
        ("(1, 2)", (1, 2)),
        ("a b", "a b"),
        ("1,2", grid(1, 2)),
        ("1, 2", grid(1, 2)),
        ("sgd,adam", grid("sgd", "adam")),
        ("a-b,c:d", grid("a-b", "c:d")),
        ("0.1,1e-3", grid(0.1, 1e-3)),
        ("grid(1,2)", Grid((1, 2))),
        ("grid(sgd, adam)", Grid(("sgd", "adam"))),
        ("choice(1, 2)", Choice((1, 2))),
        ("uniform(0, 1)", Uniform(0, 1)),
        ("loguniform(1e-4, 1e-1)", LogUniform(1e-4, 1e-1)),
        ("randint(1, 9)", RandInt(1, 9)),
        ("__import__('os')", "__import__('os')"),
    ],
)
def test_a_setting_reads_as_the_value_it_looks_like(text: str, value: Value | Domain) -> None:
    parsed = parse_value(text)
    assert parsed == value and type(parsed) is type(value)


def test_a_fixed_setting_takes_its_key_out_of_the_space_and_the_baseline(tmp_path: Path) -> None:
    study = loaded(tmp_path, settings=["num_workers=2", "lr=1"]).study
    assert list(study.space) == ["batch_size"] and study.baseline == {}
    assert study.config == {"num_workers": 2, "lr": 1}


def test_a_setting_of_several_values_sweeps_the_key(tmp_path: Path) -> None:
    study = loaded(tmp_path, settings=["lr=0.1,0.2", "batch_size=grid(64,96)"]).study
    assert study.space["lr"] == grid(0.1, 0.2) and study.space["batch_size"] == grid(64, 96)
    assert "lr" not in study.config and study.baseline == {"num_workers": 1}


def test_repeats_and_seed_are_the_studys(tmp_path: Path) -> None:
    study = loaded(tmp_path, repeats=5, seed=11).study
    assert (study.num_repeats, study.seed) == (5, 11)


def test_a_train_loop_takes_any_setting(tmp_path: Path) -> None:
    text = "from raypar import Study, Workload\nstudy = Study(workload=Workload.from_train_loop(lambda c: None))\n"
    assert loaded(tmp_path, text, settings=["whatever=3"]).study.config == {"whatever": 3}


def test_all_mistakes_of_the_flags_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(StudyError) as caught:
        loaded(tmp_path, settings=["lr", "epoch=3", "lr=fast", "num_workers=2,4", "seed=1"], repeats=0)
    assert len(caught.value.mistakes) == 6
