"""What --set, --repeats and --seed change in a study, and what they can't."""

from __future__ import annotations

from pathlib import Path

import pytest
from loading import GOOD, loaded, told, written

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
    found = parse_value(text)
    assert found == value and type(found) is type(value)


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


# setting, what the message holds
SETTINGS: list[tuple[str, tuple[str, ...]]] = [
    ("lr", ("--set = 'lr'", "lacks `=`", "--set lr=0.1")),
    ("=3", ("--set = '=3'", "lacks a key")),
    ("lr=", ("--set = 'lr='", "lacks a value")),
    ("epoch=3", ("--set epoch = '3'", "unknown", "did you mean 'epochs'?")),
    ("zzzz=3", ("--set zzzz = '3'", "unknown option 'zzzz'", "choose from: ", "batch_size")),
    ("num_repeats=3", ("--set num_repeats = '3'", "use --repeats 3")),
    ("seed=3", ("--set seed = '3'", "use --seed 3")),
    ("workload=mnist_mlp", ("--set workload = 'mnist_mlp'", "change it in the study's file")),
    ("max_retries=1", ("--set max_retries = '1'", "change it in the study's file")),
    ("lr=fast", ("--set lr = 'fast'", "of type float, not str", "learning rate")),
    ("epochs=1.5", ("--set epochs = 1.5", "of type int, not float")),
    ("epochs=0", ("--set epochs = 0", "at least 1")),
    ("epochs=True", ("--set epochs = True", "not bool")),
    ("epochs=None", ("--set epochs = None", "needs a value")),
    ("optimizer=adamm", ("--set optimizer = 'adamm'", "did you mean 'adam'?")),
    ("num_workers=1,0", ("--set num_workers = 0", "at least 1")),
    ("num_workers=1,1", ("--set num_workers = '1,1'", "duplicate values: 1", "each value once")),
    ("num_workers=grid()", ("--set num_workers = 'grid()'", "is empty")),
    ("lr=uniform(1)", ("--set lr = 'uniform(1)'", "takes two numbers")),
    ("lr=uniform(2,1)", ("--set lr = 'uniform(2,1)'", "low < high")),
    ("lr=uniform(a,b)", ("--set lr",)),
    ("lr=uniform(low=1,high=2)", ("--set lr", "takes plain values")),
    ("num_workers=2,4", ("baseline['num_workers'] = 1", "matches no point")),
    ("batch_size=4000", ("batch_size = 4000", "larger than the training set")),
    ("per_worker_batch_size=32", ("per_worker_batch_size = 32", "leave one out")),
]


@pytest.mark.parametrize(("setting", "holds"), SETTINGS, ids=[s[0] for s in SETTINGS])
def test_a_mistaken_setting_is_told(tmp_path: Path, setting: str, holds: tuple[str, ...]) -> None:
    message = told(written(tmp_path, GOOD), (setting,))
    for part in holds:
        assert part in message


def test_a_key_that_is_set_twice_is_told(tmp_path: Path) -> None:
    assert "is given twice" in told(written(tmp_path, GOOD), ("lr=1", "lr=2"))


def test_repeats_and_seed_that_make_no_sense_are_told(tmp_path: Path) -> None:
    message = told(written(tmp_path, GOOD), repeats=0, seed=-1)
    assert "--repeats = 0" in message and "--seed = -1" in message and "2 mistakes" in message


def test_all_mistakes_of_the_flags_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(StudyError) as caught:
        loaded(tmp_path, settings=["lr", "epoch=3", "lr=fast", "num_workers=2,4", "seed=1"], repeats=0)
    assert len(caught.value.mistakes) == 6
