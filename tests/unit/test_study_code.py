"""What counts as a change of a study's code: what its workload leads to, as Python reads it, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypar.study.code import MAX_PARTS, OUTSIDE, code_of, differing, listed

STUDY = '''
"""What it asks."""
from raypar import Study, Workload, grid
import nets
from nets.layers import hidden_layer as layer
from readers import read

WIDTH = 64  # of the hidden layer
SIZES = (32, 64)


def model(config):
    """Builds it."""
    import torch

    return torch.nn.Sequential(layer(WIDTH), nets.head())


def unused():
    return 1


study = Study(
    workload=Workload(name="w", model=model, data=lambda config: read(config), description="mine"),
    space={"batch_size": grid(*SIZES)},
    num_repeats=2,
)
'''
FILES = {
    "nets/__init__.py": "from .heads import head\n",
    "nets/heads.py": "from . import layers\n\ndef head():\n    return layers.linear(10)\n",
    "nets/layers.py": "def linear(n):\n    return n\n\ndef hidden_layer(n):\n    return linear(n)\n\ndef other():\n    pass\n",  # noqa: E501
    "readers.py": "import numpy as np\nCACHE = {}\nCACHE['size'] = 3\n\ndef read(config):\n    return np.zeros(CACHE['size'])\n",  # noqa: E501
}


def code(folder: Path, *changes: tuple[str, str, str], study: str = STUDY) -> dict[str, str]:
    """The code of the study after replacing (file, old, new)."""
    texts = {"s.py": study, **FILES}
    for file, old, new in changes:
        assert texts[file].count(old) == 1
        texts[file] = texts[file].replace(old, new)
    for file, text in texts.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    return code_of(folder / "s.py", texts["s.py"])


def changed(folder: Path, *changes: tuple[str, str, str]) -> str:
    return listed(differing(code(folder), code(folder, *changes)))


def test_what_the_workload_leads_to_is_followed_through_local_modules(tmp_path: Path) -> None:
    assert sorted(code(tmp_path)) == [
        "nets/heads.py: head",
        "nets/layers.py: hidden_layer",
        "nets/layers.py: linear",
        "readers.py: CACHE",
        "readers.py: read",
        "s.py: WIDTH",
        "s.py: model",
        "s.py: study",
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("s.py", "WIDTH = 64", "WIDTH = 65"), "WIDTH in s.py"),
        (("s.py", "nets.head())", "nets.head(), nets.head())"), "model in s.py"),
        (("s.py", "read(config)", "read({})"), "study in s.py"),
        (("nets/layers.py", "return n\n", "return n + 1\n"), "linear in nets/layers.py"),
        (("nets/heads.py", "10", "11"), "head in nets/heads.py"),
        (("readers.py", "'size'] = 3", "'size'] = 4"), "CACHE in readers.py"),
        (("readers.py", "numpy as np", "torch as np"), "read in readers.py"),
        (("readers.py", "CACHE = {}", "CACHE = {}\nprepare_everything()"), f"{OUTSIDE} in readers.py"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_change_of_what_is_run_is_told_by_its_name_and_file(
    tmp_path: Path, change: tuple[str, str, str], told: str
) -> None:
    assert changed(tmp_path, change) == told


@pytest.mark.parametrize(
    "change",
    [
        ("s.py", "WIDTH = 64  # of the hidden layer", "WIDTH = (  64 )"),
        ("s.py", "Builds it.", "Builds the network."),
        ("s.py", "What it asks.", "What it really asks."),
        ("s.py", "SIZES = (32, 64)", "SIZES = (32, 64, 128)"),
        ("s.py", "num_repeats=2", 'num_repeats=3, baseline={"num_workers": 1}, config={"epochs": 2}'),
        ("s.py", 'description="mine"', 'description="ours"'),
        ("s.py", "def unused():\n    return 1", "def unused():\n    return 2"),
        ("s.py", "    import torch\n\n    return", "    # as usual\n    import torch\n    return"),
        ("nets/layers.py", "def other():\n    pass", "def other():\n    return 1"),
    ],
)
def test_comments_formatting_settings_and_code_that_is_not_used_are_no_change(
    tmp_path: Path, change: tuple[str, str, str]
) -> None:
    assert changed(tmp_path, change) == ""


def test_a_module_that_only_a_function_imports_is_followed(tmp_path: Path) -> None:
    loop = "def train(config):\n    import readers\n    readers.read(config)\n"
    study = loop + "study = Study(workload=Workload.from_train_loop(train))\n"
    assert sorted(code(tmp_path, study=study)) == [
        "readers.py: CACHE",
        "readers.py: read",
        "s.py: study",
        "s.py: train",
    ]


def test_a_study_made_by_a_function_leads_to_what_that_names(tmp_path: Path) -> None:
    study = "from readers import *\ndef make(n):\n    return Study(workload=read, num_repeats=n)\nstudy = make(3)\n"
    one = code(tmp_path, study=study)
    assert "readers.py: read" in one
    assert differing(one, code(tmp_path, ("s.py", "num_repeats=n", "num_repeats=n + 1"), study=study)) == ()


def test_a_module_of_the_folder_that_is_no_python_makes_the_file_count_as_a_whole(tmp_path: Path) -> None:
    assert list(code(tmp_path, ("readers.py", "CACHE = {}", "CACHE = {"))) == ["s.py"]


def test_many_functions_are_told_file_by_file(tmp_path: Path) -> None:
    many = "".join(f"def f{i}():\n    return {i}\n" for i in range(MAX_PARTS + 1))
    study = many + f"study = Study(workload=[{', '.join(f'f{i}' for i in range(MAX_PARTS + 1))}])\n"
    one = code(tmp_path, study=study)
    assert list(one) == ["s.py"]
    assert listed(differing(one, code(tmp_path, ("s.py", "return 7\n", "return 8\n"), study=study))) == "s.py"


def test_where_one_is_not_known_nothing_is_said_to_differ() -> None:
    assert differing({}, {"s.py: model": "1"}) == () == differing({"s.py: model": "1"}, {})


def test_of_many_changes_the_first_are_named() -> None:
    assert listed(["s.py: a", "s.py: b", "t.py: c"]) == "a and b in s.py, c in t.py"
    assert listed([f"s.py: {c}" for c in "abcdef"]) == "a, b, c and d in s.py and 2 more"
