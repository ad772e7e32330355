"""What is wrong with a study file is told in one clear message, and a file that failed leaves nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from loading import GOOD, told, written

from raypar import RayparError
from raypar.errors import DataError
from raypar.study.loader import load_study

pytestmark = pytest.mark.usefixtures("modules_as_they_were")


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
    (("line 3: syntax error", "return 1", "fix that line"), "\n\nreturn 1\n"),
    (("line 3: syntax error", "unindent"), "if True:\n  x = 1\n y = 2\n"),
    (("line 3: ZeroDivisionError: division by zero",), "\n\n1 / 0\n"),
    (("line 1: ModuleNotFoundError: No module named 'not_there'", "install not_there"), "import not_there.x"),
    (("cannot import name 'mnist_mpl'", "did you mean 'mnist_mlp'?"), "from raypar.workloads import mnist_mpl"),
    (("cannot import name 'gird'", "did you mean 'grid'?"), "from raypar import gird"),
    (("No module named 'raypar.workload'", "check the spelling"), "from raypar.workload import digits"),
    (("line 1: NameError: name 'Study' is not defined",), "study = Study()"),
    (("line 2: SystemExit: 3", "leave sys.exit() out"), "import sys\nsys.exit(3)\n"),
    (("line 1: AssertionError",), "assert False"),
    (("keyword argument 'num_repeat'", "did you mean 'num_repeats'?"), "Study(workload=digits, num_repeat=3)"),
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
