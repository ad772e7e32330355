"""Which commands forks may run, with which arguments and environment."""

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from raypar.train.script_launch import launch_of

HERE = str(Path(sys.executable).parent)
PYTHON = ("python", "-u")
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text("")
    return tmp_path


def launch(words, folder, path=HERE, **changes):
    return launch_of(words, path, folder, changes)


@pytest.mark.parametrize(
    ("words", "python", "num_ranks"),
    [
        (("python", "train.py", "--lr", "-1"), ("python",), None),
        ((sys.executable, "-u", "train.py", "--lr", "-1"), (sys.executable, "-u"), None),
        ((*TORCHRUN, "train.py", "--lr", "-1"), (sys.executable, "-u"), 2),
        (("torchrun", "--nproc_per_node", "3", "--nnodes", "1", "train.py", "--lr", "-1"), (sys.executable, "-u"), 3),
        (("python", "-m", "torch.distributed.run", "train.py", "--lr", "-1"), (sys.executable, "-u"), 1),
    ],
)
def test_python_and_torchrun_on_one_machine_can_be_forks(folder, words, python, num_ranks):
    found = launch(words, folder)
    assert found.argv == ("train.py", "--lr", "-1") and found.num_ranks == num_ranks
    assert found.interpreter_words == python


@pytest.mark.parametrize(
    "words",
    [
        ("python", "-m", "train"),
        ("python", "-X", "dev", "train.py"),
        ("python", "-c", "import train"),
        ("python", "missing.py"),
        ("python", "."),
        ("python",),
        ("bash", "train.py"),
        ("accelerate", "launch", "train.py"),
        ("missing", "train.py"),
        ("torchrun", "--nproc-per-node=auto", "train.py"),
        ("torchrun", "--nproc-per-node=0", "train.py"),
        ("torchrun", "--max-restarts=3", "train.py"),
        ("torchrun", "--nnodes=2", "train.py"),
        ("torchrun", "--nnodes=1", "--master-port=29501", "train.py"),
        ("torchrun", "-m", "train"),
        ("torchrun", "--no-python", "train.py"),
        ("torchrun", "--wrong", "train.py"),
        TORCHRUN,
    ],
)
def test_other_commands_are_started_as_they_are(folder, words, capsys):
    assert launch(words, folder) is None
    assert capsys.readouterr() == ("", "")


def test_another_environments_python_is_started(folder, tmp_path):
    other = tmp_path / "bin"
    other.mkdir()
    (other / "python").symlink_to(sys.executable)
    assert launch(("python", "train.py"), folder, path=f"{other}{os.pathsep}{HERE}") is None
    assert launch(("python", "train.py"), folder) is not None


@pytest.mark.parametrize(
    ("changes", "can_fork"),
    [
        ({"PYTHONHASHSEED": "7"}, False),
        ({"OMP_PROC_BIND": "true"}, False),
        ({"MY_DATA": "here"}, True),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, True),
    ],
)
def test_variables_that_are_read_at_the_start_need_a_new_process(folder, changes, can_fork):
    assert (launch((*PYTHON, "train.py"), folder, **changes) is not None) is can_fork


def test_defaults_of_torchrun_in_the_environment_are_not_plain(folder, monkeypatch):
    monkeypatch.setenv("PET_MAX_RESTARTS", "2")
    assert launch((*TORCHRUN, "train.py"), folder) is None
    assert launch(("python", "train.py"), folder) is not None


@pytest.mark.parametrize(
    ("name", "can_fork"),
    [
        ("json.py", False),
        ("torch/__init__.py", False),
        ("torch/notes.txt", True),
        ("of_this_script_alone.py", True),
        ("sys.py", True),
    ],
)
def test_modules_beside_the_script_that_hide_imported_ones_need_a_new_process(folder, name, can_fork):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("")
    assert (launch(("python", "train.py"), folder) is not None) is can_fork


def test_an_environment_below_the_scripts_folder_hides_nothing_from_the_check(folder, monkeypatch):
    module = ModuleType("helpers")
    monkeypatch.setitem(sys.modules, "helpers", module)
    installed = folder / ".venv" / "site-packages" / "helpers.py"
    for origin, can_fork in ((installed, False), (folder / "helpers.py", True)):
        origin.parent.mkdir(parents=True, exist_ok=True)
        origin.write_text("")
        (folder / "helpers.py").write_text("")
        module.__file__ = str(origin)
        assert (launch(("python", "train.py"), folder) is not None) is can_fork


def test_each_rank_gets_the_variables_of_torchrun(folder):
    found = launch((*TORCHRUN, "train.py"), folder).environment(1, 4242, "id", folder)
    assert found["RANK"] == found["LOCAL_RANK"] == "1" and found["WORLD_SIZE"] == "2"
    assert found["MASTER_PORT"] == "4242" and found["TORCHELASTIC_RUN_ID"] == "id"
    assert not launch(("python", "train.py"), folder).environment(0, 0, "", folder)
