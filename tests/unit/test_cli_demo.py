"""``raypar demo``: commands on a stored study, without torch and Ray."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from command import joined, raypar, refused

from raypar.cli.demo import VIEWS, demo_folder

ROOT = Path(__file__).parents[2]
# Every view but the one that starts a server, in one process.
ALL_VIEWS = """
import sys
sys.modules |= {"torch": None, "torchvision": None, "ray": None}
from raypar.cli.app import app
for view in sys.argv[1:]:
    print(f"==== {view}", flush=True)
    try:
        app(["demo", view])
    except SystemExit as end:
        assert not end.code, end.code
"""


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A user's folder without a cache, and another one to work in."""
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nothing of the demo is for a server
    monkeypatch.chdir(tmp_path / "work")


def test_no_view_needs_torch_or_ray(tmp_path):
    views = [view for view in VIEWS if view != "ui"]
    done = subprocess.run([sys.executable, "-c", ALL_VIEWS, *views], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = dict(part.split("\n", 1) for part in done.stdout.split("==== ")[1:])
    assert shown["report"].startswith("quickstart: 4 points")
    assert "Does a second worker pay off?" in shown["report"]
    assert shown["recommend"].startswith("Study quickstart: the fastest whose accuracy is within 0.5 points")
    assert "Where to stop" in shown["fit"]
    assert "8 workers, batch 768: efficiency " in shown["predict"]
    assert "finished" in shown["show"]
    assert not list(Path.cwd().iterdir())


def test_flags_are_passed_to_the_view(tmp_path):
    code, out, _ = raypar("demo", "recommend", "--target", "accuracy=0.9")
    assert code == 0 and joined(out).startswith("Study quickstart: the fastest to accuracy 90.0 % or more.")
    for words in (("--html", "page.html"), ("--html=other.html",)):
        code, out, _ = raypar("demo", "report", *words)
        assert code == 0 and Path(words[-1].removeprefix("--html=")).read_text().startswith("<!doctype html>")
    refused("No such option: --fast", "demo", "report", "--fast")
    assert "raypar demo fit [OPTIONS]" in joined(raypar("demo", "fit", "--help")[1])
    assert "raypar demo [OPTIONS]" in joined(raypar("demo", "--help")[1])


def test_an_unknown_view_is_refused():
    refused("the demo has no view 'recomend' → did you mean 'recommend'?", "demo", "recomend")


def test_the_study_is_stored_once_for_each_version():
    folder = demo_folder()
    (journal,) = (folder / ".raypar" / "spool").glob("*.jsonl")
    journal.unlink()
    (folder / "mlflow.db").touch()  # as `raypar demo ui` leaves it
    assert demo_folder() == folder and not journal.exists()


def test_the_picture_in_the_readme_is_what_the_demo_prints():
    spec = importlib.util.spec_from_file_location("picture", ROOT / "docs" / "picture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.picture() == module.PICTURE.read_text(encoding="utf-8")
    assert module.PICTURE.name in (ROOT / "README.md").read_text(encoding="utf-8")
