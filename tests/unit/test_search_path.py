"""A study's folder is first on the path and hides no module; only trials import from the current folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bad_input import GOOD
from nothing_starts import raypar

from raypar import doctor, search_path
from raypar.run.cluster import job_config
from raypar.study.loader import load_study

NAMES = ("cmd", "random", "json", "torch", "ray", "mlflow", "typing", "profile", "numpy", "click")
pytestmark = pytest.mark.usefixtures("modules_as_they_were")


def file_found(name):
    """Return the file that an import of the module would run."""
    for finder in sys.meta_path:
        if (spec := finder.find_spec(name, None)) is not None:
            return Path(spec.origin)
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_study_named_like_a_module_does_not_hide_it(name, tmp_path):
    path = tmp_path / f"{name}.py"
    path.write_text(GOOD + f"def later():\n    import {name}\n")
    assert load_study(path).study.name == name
    assert file_found(name).parent != tmp_path


@pytest.mark.parametrize("is_package", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_named_like_a_module_hides_nothing_and_is_refused_if_imported(name, is_package, tmp_path):
    file = tmp_path / name / "__init__.py" if is_package else tmp_path / f"{name}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise RuntimeError('imported')")
    (tmp_path / "good.py").write_text(GOOD)
    load_study(tmp_path / "good.py")
    assert tmp_path not in file_found(name).parents
    (tmp_path / "helper.py").write_text(f"def later():\n    from {name} import anything\n")
    (tmp_path / "bad.py").write_text("import helper\n" + GOOD)
    done = raypar(["plan", "bad.py"], tmp_path)
    shown = name if is_package else f"{name}.py"
    assert done.code == 2 and f"bad.py: {shown} beside it hides the module `{name}` " in " ".join(done.err.split())
    assert done.err.endswith("→ rename it\n"), done.err


@pytest.mark.parametrize("name", ["utils", "data", "train", "model", "test", "example", "sys", "os"])
def test_other_files_beside_a_study_are_importable(name, tmp_path):
    (tmp_path / f"{name}.py").touch()
    (tmp_path / "xml").mkdir()  # not a package, so it hides nothing
    (tmp_path / "good.py").write_text(f"import {name}, xml\n" + GOOD)
    load_study(tmp_path / "good.py")
    assert (file_found(name).parent == tmp_path) == (name not in ("sys", "os"))


def test_a_package_in_use_from_the_studys_folder_is_not_hidden(tmp_path, monkeypatch):
    for name in ("raypar", "ray"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.setattr(search_path.sys, "path", [str(tmp_path)])
    assert search_path.hidden_by([tmp_path], "ray") is None, "no other one exists"
    monkeypatch.undo()
    assert search_path.hidden_by([tmp_path], "ray") is not None
    assert search_path.hidden_by([Path(search_path.__file__).parents[1]], "raypar") is None


VERBS = """
import sys
from typer.testing import CliRunner
from raypar import doctor
from raypar.cli.app import app
for words in sys.argv[1:]:
    done = CliRunner().invoke(app, words.split())
    assert done.exception is None or isinstance(done.exception, SystemExit), (words, done.exception)
    print(words, done.exit_code)
print(doctor.torch_imports()[0].is_ok)
"""
READ_ONLY = ("list", "store show s", "report s", "report s --html r.html", "store export s t.csv", "store compare s s")
READ_ONLY += (
    "recommend s",
    "model fit s",
    "model predict s",
    "model list",
    "plan nothing.py",
    "store sync",
    "init --help",
)


def test_reading_commands_run_no_code_of_the_current_folder(tmp_path):
    for name in {*sys.stdlib_module_names, *search_path._dependencies(), "colorama"}:
        if not name.startswith("_") and "/" not in name:
            (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'a').write({name!r} + ' ')")
    environment = {**os.environ, "PYTHONPATH": str(Path(doctor.__file__).parents[1])}
    command = [sys.executable, "-P", "-c", VERBS, *READ_ONLY]  # like the installed script
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["True"], done
    assert not (tmp_path / "mark").exists(), (tmp_path / "mark").read_text()


def test_rays_workers_do_not_import_from_the_current_folder():
    config = job_config()
    config._py_driver_sys_path.extend(["/somewhere"])  # like Ray when it connects
    assert config._py_driver_sys_path == [] and config._serialize() is not None
