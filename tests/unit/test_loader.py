"""From a file to a study."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from loading import GOOD, loaded, told, written

from raypar import RayparError
from raypar.errors import DataError
from raypar.study.loader import load_study

pytestmark = pytest.mark.usefixtures("modules_as_they_were")


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
