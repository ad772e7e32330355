"""Studies declared in a notebook or a script, as files: they load elsewhere, and name the code that they consist of."""

import subprocess
import sys
from pathlib import Path

import pytest

from raypar import RayparError, Study, choice, grid
from raypar.provenance import changed_files
from raypar.study.loader import load_study
from raypar.study.pickled import write_study
from raypar.workloads import digits

ROOT = Path(__file__).parents[2]
PROGRAM = """
import functools
import sys
from pathlib import Path

import sizes_of_notebook
from raypar import Data, Split, Study, Workload, grid

SIZE = 3
TOKEN = "".join(["not", "for", "others"])


class Base:
    RATE = 0.5


class Net(Base):
    def build(self):
        import torch

        return torch.nn.Linear(SIZE, sizes_of_notebook.NUM)


def inner(scale):
    assert TOKEN
    return [scale * each for each in (1.0, CHANGED)]


def model(config, scale):
    return Net().build(), inner(scale)


def data(config):
    return Data(train=Split([1.0], [1]), val=Split([1.0], [1]))


unused = lambda: None
workload = Workload(name="own", model=functools.partial(model, scale=2.0), data=data, num_train_samples=512)
study = Study(workload=workload, space={"lr": grid(0.1, 0.2)}, name="a study", description="Does it?")
if __name__ == "__main__":
    from raypar.study.pickled import write_study

    print(write_study(study, Path.cwd()))
"""


def written(folder, changed="2.0", size="3"):
    """Run a program that writes its study; return the file's name."""
    (folder / "sizes_of_notebook.py").write_text("NUM = 7\n")
    (folder / "program.py").write_text(PROGRAM.replace("CHANGED", changed).replace("SIZE = 3", f"SIZE = {size}"))
    command = [sys.executable, "program.py"]
    run = subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    return folder / Path(run.stdout.strip()).name


def test_a_study_of_a_program_loads_in_another_process_with_the_sources_that_it_uses(tmp_path, monkeypatch):
    path = written(tmp_path)
    assert path.name == ".a_study_notebook.py" and path.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(sys, "path", [*sys.path])
    loaded = load_study(path)
    study = loaded.study
    assert (study.name, study.description, study.points()) == ("a study", "Does it?", ({"lr": 0.1}, {"lr": 0.2}))
    network, numbers = study.workload.model({})
    assert (network.in_features, network.out_features, numbers) == (3, 7, [2.0, 4.0])
    for name in ("'model'", "'inner'", "'Net'", "'Base'", "'data'"):
        assert name in loaded.source
    assert "'TOKEN': '" in loaded.source and "notforothers" not in loaded.source
    assert "unused" not in loaded.source and "RATE = 0.5" in loaded.source
    assert set(loaded.code) == {path.name, "sizes_of_notebook.py"} and "sizes_of_notebook" in loaded.local_modules


def test_changed_code_of_a_function_is_noticed_and_changed_values_of_the_study_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    versions = ("2.0", "3"), ("2.0", "3"), ("3.0", "3"), ("2.0", "4")
    first, *others = (load_study(written(tmp_path, *version)).code for version in versions)
    assert [changed_files(first, other) for other in others] == [(), *[(".a_study_notebook.py",)] * 2]


def test_a_study_without_a_name_or_with_a_lock_is_refused(tmp_path):
    import threading

    with pytest.raises(RayparError, match="needs a name") as error:
        write_study(Study(workload=digits, space={"lr": grid(0.1)}), tmp_path)
    assert "Study(name=" in error.value.hint
    locked = Study(workload=digits, space={"lr": choice(0.1)}, name="s", searcher=threading.Lock())
    with pytest.raises(RayparError, match="can't be sent to another process"):
        write_study(locked, tmp_path)
    assert [*tmp_path.iterdir()] == []
