"""``raypar report``: page and figures of a stored study; tests/golden has the printed report."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command import joined, raypar, refused
from html_studies import question, results
from recording import recorded

from raypar.provenance import source_files

TAGS = {"git.commit": "0123abcd", "host": "node-7", "command": "raypar study s.py"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    stored = [replace(result, step_times_s=((0.1, 0.2),)) for result in results()]
    recorded(folder, question(), stored, TAGS, description="How far does it scale?", study_source="a = 'b'")
    return f"sqlite:///{folder}/mlflow.db"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def reported(store, *args):
    code, out, err = raypar("report", "scaling", *(["--tracking-uri", store] if store else []), *args)
    assert (code, err) == (0, "")
    return joined(out)


def test_the_page_only_needs_the_store(store, tmp_path):
    out = reported(store, "--html", "report.html")
    assert out.startswith("scaling: 7 points, 19 trials") and out.endswith("wrote report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    words = ("How far does it scale?", "0123abcd", "node-7", "raypar study s.py", "a = &#39;b&#39;", "out of memory")
    assert all(word in text for word in words) and text.count("<figure ") == 10


@pytest.mark.parametrize(("before", "now"), [("a = 1", "a = 2"), ("a = 1", "a = 1  # the same"), ("a = 1", None)])
def test_trials_of_changed_code_are_a_caveat(tmp_path, before, now):
    file = tmp_path / "scaling.py"
    file.write_text(before)
    digests = source_files(file, before).digests
    stored = [replace(result, code=digests) for result in results()]
    recorded(tmp_path, question(), stored, resume={"file": str(file)})
    file.unlink() if now is None else file.write_text(now)
    told = "ran other code than the study has now: scaling.py changed since." in reported(None, "--verbose")
    assert told == (now == "a = 2")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.chdir(elsewhere)  # what lies outside of the folder is not looked at
    assert "ran other code" not in reported(f"sqlite:///{tmp_path}/mlflow.db", "--verbose")


@pytest.mark.parametrize(("args", "path"), [(("--html", "r.html"), "r.html"), ((), ".raypar/reports/scaling.html")])
@pytest.mark.parametrize("has_browser", [True, False])
def test_the_page_is_opened_in_the_browser(store, tmp_path, monkeypatch, args, path, has_browser):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or has_browser)
    out = reported(store, "--open", *args)
    assert opened == [(tmp_path / path).as_uri()] and f"wrote {path}" in out
    assert ("no browser found" in out) is not has_browser
    assert "How far does it scale?" in (tmp_path / path).read_text(encoding="utf-8")


def test_figures_are_written_in_the_chosen_formats(store, tmp_path):
    out = reported(store, "--figures", "both")
    names = sorted(path.name for path in (tmp_path / "both").iterdir())
    keys = {name.partition(".")[0] for name in names}
    assert {"speedup", "efficiency", "times", "pareto", "drift"} <= keys
    assert names == sorted(f"{key}.{kind}" for key in keys for kind in ("svg", "png"))
    assert f"wrote {len(names)} files to both" in out
    reported(store, "--figures", "one", "--format", "png")
    assert {path.name for path in (tmp_path / "one").iterdir()} == {f"{key}.png" for key in keys}


def test_every_locale_shows_the_same_numbers(store, tmp_path):
    """Run in separate processes, because Python chooses its encodings when it starts."""

    def report(**changes):
        command = [Path(sys.executable).parent / "raypar", "report", "scaling", "--tracking-uri", store]
        plain = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHONUTF8"))}
        done = subprocess.run(command, capture_output=True, cwd=tmp_path, timeout=120, env={**plain, **changes})
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout.decode()

    numbers = re.findall(r"\d+", report(PYTHONUTF8="1"))
    assert re.findall(r"\d+", report(LC_ALL="C")) == numbers
    assert re.findall(r"\d+", report(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")) == numbers


def test_without_flags_nothing_is_written(store, tmp_path):
    assert "wrote" not in reported(store) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--html no/r.html", "no/r.html: can't be written: No such file"),
        ("--html .", ".: is a folder"),
        ("--open", ".raypar/reports: can't be written: Not a directory"),
        ("--figures .raypar/figures", ".raypar/figures: can't be written: Not a directory"),
        ("--html no/r.html --figures new", "no/r.html: can't be written"),
    ],
)
def test_an_unwritable_file_is_reported_first(store, tmp_path, arguments, message):
    (tmp_path / ".raypar").write_text("a file")
    refused(message, "report", "scaling", "--tracking-uri", store, *arguments.split(), out="")
    assert [path.name for path in tmp_path.iterdir()] == [".raypar"]


def test_the_price_flag_overrides_that_of_the_study(store):
    assert "cost: 7.25 a node-hour" in reported(store, "--price", "7.25")
    refused("--price nan: must be greater than 0", "report", "scaling", "--tracking-uri", store, "--price", "nan")
