"""From a file, --set, --repeats and --seed to a study; mistakes are in `bad_input`."""

import sys

import pytest

from raypar import RayparError, grid
from raypar.errors import DataError
from raypar.execution.flags import RunFlags
from raypar.study.loader import load_study, load_workload
from raypar.study.overrides import parse_value
from raypar.study.space import Choice, LogUniform, RandInt, Uniform

pytestmark = pytest.mark.usefixtures("modules_as_they_were")

GOOD = """
'''What does a second worker bring?

More about it.
'''
from raypar import Study, grid
from raypar.workloads import digits

space = {"num_workers": grid(1, 2), "batch_size": grid(64, 128)}
study = Study(workload=digits, space=space, baseline={"num_workers": 1}, config={"lr": 0.2})
"""


def written(folder, text, name="asked.py"):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def loaded(folder, text=GOOD, **flags):
    return load_study(written(folder, text), **flags)


def test_a_file_becomes_its_study_and_a_module(tmp_path):
    study_file = loaded(tmp_path)
    assert study_file.study.name == "asked"
    assert study_file.study.description == "What does a second worker bring?"
    assert study_file.path == (tmp_path / "asked.py").resolve() and study_file.source == GOOD
    assert len(study_file.study.trials()) == 12
    module = sys.modules[study_file.module_name]
    assert study_file.module_name == "raypar_study_asked"
    assert module.__file__ == str(study_file.path) and module.study.workload.name == "digits"


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("asked.py", GOOD.replace("workload=digits,", 'workload=digits, name="mine", description="why",'), "mine"),
        ("my study (1).py", GOOD, "my study _1_"),
        ("-first.py", GOOD, "first"),
        ("marked.py", "\ufeff" + GOOD, "marked"),
        ("asked.py", GOOD.replace("study = ", "question = "), "asked"),
        ("asked.py", GOOD + "\nother = Study(workload=digits, name='other')\n", "asked"),
        ("asked.py", GOOD.replace("study = ", "first = ") + "\nsecond = first\n", "asked"),
    ],
    ids=["given", "spaces", "dash", "byte order mark", "another variable", "one named study", "one under two names"],
)
def test_a_study_has_the_name_it_gives_or_that_of_its_file(tmp_path, file, text, name):
    study = load_study(written(tmp_path, text, file)).study
    assert study.name == name and (study.description == "why") == (name == "mine")


def test_a_changed_file_is_the_same_module_and_a_file_of_the_same_name_elsewhere_is_another(tmp_path):
    names = {load_study(written(tmp_path, GOOD, file)).module_name for file in ("asked.py", "other/asked.py")}
    assert len(names) == 2 and names <= set(sys.modules)
    changed = loaded(tmp_path, GOOD.replace("0.2", "0.4"))
    assert changed.module_name in names and changed.study.config["lr"] == 0.4


IMPORTS = "from raypar import Study\nfrom raypar.workloads import digits, wide_mlp\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "defines no workload"),
        (IMPORTS, "several workloads: digits, wide_mlp"),
        (IMPORTS + "a, b = Study(workload=digits), Study(workload=wide_mlp)\n", "several workloads: digits, wide_mlp"),
        (GOOD.replace("space,", "space, num_repeats=0,"), r"asked\.py: 1 mistake in the study"),
    ],
)
def test_a_file_without_exactly_one_workload_is_refused(tmp_path, text, message):
    with pytest.raises(RayparError, match=message):
        load_workload(written(tmp_path, text))


@pytest.mark.parametrize("made", ["", "study = Study(workload=digits)\nother = Study(workload=digits, name='other')\n"])
def test_the_workload_of_a_file_is_that_of_its_study_or_its_only_one(tmp_path, made):
    text = IMPORTS + made if made else "from raypar.workloads import digits\nmine = digits\n"
    assert load_workload(written(tmp_path, text)).name == "digits"


def test_modules_beside_the_file_can_be_imported_and_are_named(tmp_path):
    written(tmp_path, "import numpy.fft\nLR = 0.5\n", "helper_of_loader.py")
    written(tmp_path, "", "package_of_loader/__init__.py")
    written(tmp_path, "EPOCHS = 2\n", "package_of_loader/sub.py")
    text = "import helper_of_loader\nfrom package_of_loader import sub\n" + GOOD
    study_file = loaded(tmp_path, text.replace('"lr": 0.2', '"lr": helper_of_loader.LR, "epochs": sub.EPOCHS'))
    assert study_file.study.config == {"lr": 0.5, "epochs": 2}
    assert set(study_file.local_modules) == {"helper_of_loader", "package_of_loader", "package_of_loader.sub"}
    assert "numpy.fft" in study_file.imported_modules
    assert not any(name.startswith(("helper", "package")) for name in study_file.imported_modules)


def test_third_party_imports_are_named_including_those_in_functions(tmp_path):
    text = "import os, json\nimport numpy as np\n" + GOOD + "\ndef f():\n    from sklearn.datasets import load_iris\n"
    assert loaded(tmp_path, text).imported_modules == ("numpy", "sklearn.datasets")


def test_an_error_in_a_helper_is_reported_with_the_line_in_both_files(tmp_path):
    written(tmp_path, "\n\nraise ValueError('too bad')\n", "helper_of_failure.py")
    before = list(sys.path)
    with pytest.raises(RayparError, match=r"line 2 \(in helper_of_failure.py, line 3\): ValueError: too bad"):
        loaded(tmp_path, "x = 1\nimport helper_of_failure\n")
    assert sys.path == before and "raypar_study_asked" not in sys.modules
    with pytest.raises(KeyboardInterrupt):
        loaded(tmp_path, "raise KeyboardInterrupt")


def test_a_raypar_error_of_the_file_keeps_its_kind_and_hint(tmp_path):
    with pytest.raises(DataError, match=r"asked\.py, line 2: gone\n.*fetch it"):
        loaded(tmp_path, "from raypar.errors import DataError\nraise DataError('gone', hint='fetch it')\n")


# ---- flags


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("0.1", 0.1), ("1e-3", 1e-3), ("-1", -1), ("adam", "adam"), ("'adam'", "adam"), ("None", None)),
        *(("True", True), ("true", True), ("false", False), ("cuda:0", "cuda:0"), ("(1, 2)", (1, 2)), ("a b", "a b")),
        *(("1,2", grid(1, 2)), ("1, 2", grid(1, 2)), ("sgd,adam", grid("sgd", "adam")), ("grid(1,2)", grid(1, 2))),
        *(("a-b,c:d", grid("a-b", "c:d")), ("0.1,1e-3", grid(0.1, 1e-3)), ("grid(sgd, adam)", grid("sgd", "adam"))),
        *(("choice(1, 2)", Choice((1, 2))), ("uniform(0, 1)", Uniform(0, 1)), ("randint(1, 9)", RandInt(1, 9))),
        *(("loguniform(1e-4, 1e-1)", LogUniform(1e-4, 1e-1)), ("__import__('os')", "__import__('os')")),
    ],
)
def test_a_setting_reads_as_the_value_it_looks_like(text, value):
    parsed = parse_value(text)
    assert parsed == value and type(parsed) is type(value)


def test_a_fixed_setting_takes_its_key_out_of_the_space_and_the_baseline(tmp_path):
    study = loaded(tmp_path, settings=["num_workers=2", "lr=1"], flags=RunFlags(repeats=5, seed=11).of_study).study
    assert list(study.space) == ["batch_size"] and study.baseline == {}
    assert study.config == {"num_workers": 2, "lr": 1}
    assert (study.num_repeats, study.seed) == (5, 11)


def test_a_setting_of_several_values_sweeps_the_key(tmp_path):
    study = loaded(tmp_path, settings=["lr=0.1,0.2", "batch_size=grid(64,96)"]).study
    assert study.space["lr"] == grid(0.1, 0.2) and study.space["batch_size"] == grid(64, 96)
    assert "lr" not in study.config and study.baseline == {"num_workers": 1}


def test_a_train_loop_takes_any_setting(tmp_path):
    text = "from raypar import Study, Workload\nstudy = Study(workload=Workload.from_train_loop(lambda c: None))\n"
    assert loaded(tmp_path, text, settings=["whatever=3"]).study.config == {"whatever": 3}
