"""From a file, and the flags, to a study; every mistake is one clear message."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raypar import RayparError, StudyError, grid
from raypar.errors import DataError
from raypar.study.loader import LoadedStudy, load_study
from raypar.study.settings import parse_value
from raypar.study.space import Choice, Domain, Grid, LogUniform, RandInt, Uniform, Value

GOOD = """
'''What does a second worker bring?

More about it.
'''
from raypar import Study, grid
from raypar.workloads import digits

study = Study(
    workload=digits,
    space={"num_workers": grid(1, 2), "batch_size": grid(64, 128)},
    baseline={"num_workers": 1},
    config={"lr": 0.2},
)
"""


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("raypar_study_", "helper_of_", "package_of_")):
            del sys.modules[name]


def written(folder: Path, text: str, name: str = "asked.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def loaded(folder: Path, text: str = GOOD, **flags: object) -> LoadedStudy:
    return load_study(written(folder, text), **flags)  # type: ignore[arg-type]


def told(path: Path, settings: tuple[str, ...] = (), **flags: int) -> str:
    with pytest.raises(RayparError) as caught:
        load_study(path, settings, **flags)
    message = str(caught.value)
    assert "Traceback" not in message and "→" in message and str(path) in message
    return message


def test_a_file_becomes_its_study(tmp_path: Path) -> None:
    found = loaded(tmp_path)
    assert found.study.name == "asked"
    assert found.study.description == "What does a second worker bring?"
    assert found.path == (tmp_path / "asked.py").resolve() and found.source == GOOD
    assert len(found.study.trials()) == 12


def test_a_name_and_description_that_are_given_stay(tmp_path: Path) -> None:
    text = GOOD.replace("workload=digits,", 'workload=digits, name="mine", description="why",')
    study = loaded(tmp_path, text).study
    assert (study.name, study.description) == ("mine", "why")


def test_a_stem_that_is_no_name_is_made_one(tmp_path: Path) -> None:
    assert load_study(written(tmp_path, GOOD, "my study (1).py")).study.name == "my study _1_"
    assert load_study(written(tmp_path, GOOD, "-first.py")).study.name == "first"


def test_the_file_is_a_module_of_its_own(tmp_path: Path) -> None:
    found = load_study(written(tmp_path, GOOD, "two-words.py"))
    module = sys.modules[found.module_name]
    assert found.module_name == "raypar_study_two_words"
    assert module.__file__ == str(found.path) and module.study.workload.name == "digits"


def test_files_of_the_same_name_in_two_folders_get_two_modules(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one = load_study(written(tmp_path, GOOD))
    other = load_study(written(tmp_path / "other", GOOD))
    assert one.module_name != other.module_name
    assert {one.module_name, other.module_name} <= set(sys.modules)


def test_a_file_can_be_loaded_again_after_a_change(tmp_path: Path) -> None:
    assert loaded(tmp_path).module_name == loaded(tmp_path, GOOD.replace("0.2", "0.3")).module_name
    assert loaded(tmp_path, GOOD.replace("0.2", "0.4")).study.config["lr"] == 0.4


def test_the_only_study_may_have_any_name(tmp_path: Path) -> None:
    assert loaded(tmp_path, GOOD.replace("study = ", "question = ")).study.name == "asked"


def test_of_several_studies_the_one_named_study_is_taken(tmp_path: Path) -> None:
    text = GOOD + "\nother = Study(workload=digits, name='other')\n"
    assert loaded(tmp_path, text).study.name == "asked"


def test_one_study_under_two_names_is_one_study(tmp_path: Path) -> None:
    text = GOOD.replace("study = ", "first = ") + "\nsecond = first\n"
    assert loaded(tmp_path, text).study.name == "asked"


def test_modules_beside_the_file_can_be_imported_and_are_named(tmp_path: Path) -> None:
    written(tmp_path, "import numpy.fft\nLR = 0.5\n", "helper_of_loader.py")
    (tmp_path / "package_of_loader").mkdir()
    written(tmp_path / "package_of_loader", "", "__init__.py")
    written(tmp_path / "package_of_loader", "EPOCHS = 2\n", "sub.py")
    text = GOOD.replace(
        "from raypar import", "import helper_of_loader\nfrom package_of_loader import sub\nfrom raypar import"
    )
    found = loaded(tmp_path, text.replace('"lr": 0.2', '"lr": helper_of_loader.LR, "epochs": sub.EPOCHS'))
    assert found.study.config == {"lr": 0.5, "epochs": 2}
    assert set(found.local_modules) == {"helper_of_loader", "package_of_loader", "package_of_loader.sub"}
    assert "numpy.fft" in found.imported_modules
    assert not any(name.startswith(("helper", "package")) for name in found.imported_modules)


def test_third_party_imports_are_named_those_in_functions_too(tmp_path: Path) -> None:
    text = "import os, json\nimport numpy as np\n" + GOOD + "\ndef f():\n    from sklearn.datasets import load_iris\n"
    assert loaded(tmp_path, text).imported_modules == ("numpy", "sklearn.datasets")


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "marked.py"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_study(path).study.name == "marked"


# ── what can be wrong with a file ────────────────────────────────────────────────────────────────────────────────


def test_a_missing_file_is_told_with_a_close_name(tmp_path: Path) -> None:
    written(tmp_path, GOOD, "batch_size.py")
    assert f"did you mean {tmp_path / 'batch_size.py'}?" in told(tmp_path / "batchsize.py")


def test_a_missing_suffix_is_told(tmp_path: Path) -> None:
    written(tmp_path, GOOD, "quick.py")
    assert f"did you mean {tmp_path / 'quick.py'}?" in told(tmp_path / "quick")


def test_a_missing_file_without_a_close_name_is_told_with_what_there_is(tmp_path: Path) -> None:
    written(tmp_path, GOOD, "alpha.py")
    assert "holds: alpha.py" in told(tmp_path / "zzzzzz.py")


def test_a_missing_file_in_an_empty_folder_is_told(tmp_path: Path) -> None:
    assert "holds no Python file" in told(tmp_path / "study.py")


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path / 'nowhere'}" in told(tmp_path / "nowhere" / "study.py")


def test_a_folder_is_told_with_its_files(tmp_path: Path) -> None:
    written(tmp_path, GOOD, "alpha.py")
    message = told(tmp_path)
    assert "is a folder" in message and "alpha.py" in message


def test_a_file_that_is_not_python_is_told(tmp_path: Path) -> None:
    assert "is not a Python file" in told(written(tmp_path, "a: 1", "study.yaml"))


def test_a_file_that_is_not_utf8_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.py"
    path.write_bytes(b"# one\nx = '\xe9'\n")
    assert "line 2: byte 0xe9 is not UTF-8" in told(path)


def test_null_bytes_are_told(tmp_path: Path) -> None:
    assert "null bytes" in told(written(tmp_path, "x = 1\0"))


# what the message holds, what the file holds
FILES: list[tuple[tuple[str, ...], str]] = [
    (("line 2: syntax error: '(' was never closed", "study = Study(", "^"), "\nstudy = Study(\n"),
    (("line 3: syntax error", "return 1", "mend that line"), "\n\nreturn 1\n"),
    (("line 3: syntax error", "unindent"), "if True:\n  x = 1\n y = 2\n"),
    (("line 3: ZeroDivisionError: division by zero",), "\n\n1 / 0\n"),
    (("line 1: ModuleNotFoundError: No module named 'not_there'", "install not_there"), "import not_there.x"),
    (("cannot import name 'mnist_mpl'", "did you mean `mnist_mlp`?"), "from raypar.workloads import mnist_mpl"),
    (("cannot import name 'gird'", "did you mean `grid`?"), "from raypar import gird"),
    (("No module named 'raypar.workload'", "check the spelling"), "from raypar.workload import digits"),
    (("line 1: NameError: name 'Study' is not defined",), "study = Study()"),
    (("line 2: SystemExit: 3", "leave sys.exit() out"), "import sys\nsys.exit(3)\n"),
    (("line 1: AssertionError",), "assert False"),
    (("keyword argument 'num_repeat'", "did you mean `num_repeats`?"), "Study(workload=digits, num_repeat=3)"),
    (("unexpected keyword argument 'learning'", "config={...}"), "Study(workload=digits, learning=3)"),
    (("required keyword-only argument: 'workload'", "Study(workload=...", "raypar.workloads"), "Study(space={})"),
    (("takes 1 positional argument",), "Study(digits)"),
    (("defines no Study", "study = Study("), "x = 1"),
    (("defines no Study",), ""),
    (("`study` is a dict, not a Study",), "study = {'workload': 'mnist'}"),
    (("`study` is a type, not a Study",), "study = Study"),
    (
        ("holds several studies: a, b", "name the one to run `study`"),
        "a = Study(workload=digits)\nb = Study(workload=digits, seed=1)",
    ),
    (("num_repeats = 0", "1 mistake in the study"), "study = Study(workload=digits, num_repeats=0)"),
    (
        ("2 mistakes", "config['epoch'] = 3", "space['lr'] = [1]"),
        "Study(workload=digits, config={'epoch': 3}, space={'lr': [1]})",
    ),
]


@pytest.mark.parametrize(("holds", "text"), FILES, ids=[f[0][0] for f in FILES])
def test_what_is_wrong_in_a_file_is_told_in_one_message(tmp_path: Path, holds: tuple[str, ...], text: str) -> None:
    names = "Study(" in text or "= Study" in text
    if names and "NameError" not in holds[0] and "syntax" not in holds[0]:
        text = "from raypar import Study, grid\nfrom raypar.workloads import digits\n" + text
    message = told(written(tmp_path, text))
    for part in holds:
        assert part in message


def test_an_error_in_a_helper_is_told_with_the_line_in_both_files(tmp_path: Path) -> None:
    written(tmp_path, "\n\nraise ValueError('too bad')\n", "helper_of_failure.py")
    message = told(written(tmp_path, "x = 1\nimport helper_of_failure\n"))
    assert "line 2 (in helper_of_failure.py, line 3): ValueError: too bad" in message


def test_a_syntax_error_in_a_helper_names_the_helper(tmp_path: Path) -> None:
    helper = written(tmp_path, "x = (\n", "helper_of_syntax.py")
    with pytest.raises(RayparError) as caught:
        load_study(written(tmp_path, "import helper_of_syntax\n"))
    assert f"{helper}, line 1: syntax error" in str(caught.value)


def test_a_raypar_error_of_the_file_keeps_its_kind_and_way_out(tmp_path: Path) -> None:
    text = "from raypar.errors import DataError\nraise DataError('gone', hint='fetch it')\n"
    with pytest.raises(DataError, match=r"asked\.py, line 2: gone\n.*fetch it"):
        load_study(written(tmp_path, text))


def test_a_file_that_failed_leaves_nothing_behind(tmp_path: Path) -> None:
    before = list(sys.path)
    told(written(tmp_path, "1 / 0"))
    assert sys.path == before and "raypar_study_asked" not in sys.modules


def test_an_interrupt_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        load_study(written(tmp_path, "raise KeyboardInterrupt"))


# ── --set, --repeats, --seed ─────────────────────────────────────────────────────────────────────────────────────


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
    ("epoch=3", ("--set epoch = '3'", "unknown", "did you mean `epochs`?")),
    ("zzzz=3", ("--set zzzz = '3'", "unknown to workload digits", "known: ", "batch_size")),
    ("num_repeats=3", ("--set num_repeats = '3'", "use --repeats 3")),
    ("seed=3", ("--set seed = '3'", "use --seed 3")),
    ("workload=mnist_mlp", ("--set workload = 'mnist_mlp'", "change it in the study's file")),
    ("max_retries=1", ("--set max_retries = '1'", "change it in the study's file")),
    ("lr=fast", ("--set lr = 'fast'", "of type float, not str", "learning rate")),
    ("epochs=1.5", ("--set epochs = 1.5", "of type int, not float")),
    ("epochs=0", ("--set epochs = 0", "at least 1")),
    ("epochs=True", ("--set epochs = True", "not bool")),
    ("epochs=None", ("--set epochs = None", "needs a value")),
    ("optimizer=adamm", ("--set optimizer = 'adamm'", "did you mean `adam`?")),
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
