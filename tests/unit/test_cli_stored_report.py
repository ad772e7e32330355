"""``raypar report``: the terminal's report, the HTML file and the figures, from the store alone."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from html_studies import question, results
from typer.testing import CliRunner

from raypar.analysis.scaling import WorkerGroup
from raypar.cli.app import app
from raypar.track.recorder import Execution, Recorder
from raypar.track.store import Store

TAGS = {"git.commit": "0123abcd", "host": "node-7", "command": "raypar study s.py"}
SOURCE = "study = Study(name='scaling')\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("store")
    uri = f"sqlite:///{folder}/mlflow.db"
    execution = Execution(
        "one",
        "scaling",
        1.7e9,
        tags={**TAGS, "raypar.question": json.dumps(asdict(question()))},
        description="How far does it scale?",
        study_source=SOURCE,
    )
    recorder = Recorder(execution, tracking_uri=uri, project_dir=folder)
    recorder.start()
    for result in results():
        recorder.record(replace(result, step_times_s=((0.1, 0.2),)))
    assert recorder.close("finished") == 0
    return uri


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerGroup.analyse, "__defaults__", (60,))


def report(store: str, *args: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["report", "scaling", "--tracking-uri", store, *args], env={"COLUMNS": "80"})
    return done.exit_code, done.stdout, done.stderr


def test_the_html_is_made_from_the_store_alone(store: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    code, out, err = report(store, "--html", str(path))
    assert (code, err) == (0, "")
    assert out.startswith("scaling: 7 points, 19 trials") and out.endswith(f"wrote {path}\n")
    text = path.read_text(encoding="utf-8")
    for word in ("How far does it scale?", "0123abcd", "node-7", "raypar study s.py", "out of memory"):
        assert word in text
    assert "study = Study(name=&#39;scaling&#39;)" in text
    assert text.count("<figure ") == 10


def test_figures_are_written_as_svg_and_png_or_in_the_format_asked_for(store: str, tmp_path: Path) -> None:
    code, out, err = report(store, "--figures", str(tmp_path / "both"))
    assert (code, err) == (0, "")
    names = sorted(path.name for path in (tmp_path / "both").iterdir())
    keys = {name.partition(".")[0] for name in names}
    assert {"speedup", "efficiency", "times", "pareto", "drift"} <= keys
    assert names == sorted(f"{key}.{kind}" for key in keys for kind in ("svg", "png"))
    assert f"wrote {len(names)} files to" in " ".join(out.split())
    assert report(store, "--figures", str(tmp_path / "one"), "--format", "png")[0] == 0
    assert {path.name for path in (tmp_path / "one").iterdir()} == {f"{key}.png" for key in keys}


def test_without_options_nothing_is_written(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = report(store)
    assert code == 0 and "wrote" not in out
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".html", ".svg", ".png")]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--open",), "--open: there is no file to open"),
        (("--html", "no/such/folder/r.html"), "no/such/folder/r.html: can't be written"),
    ],
)
def test_what_can_not_be_done_is_one_message_and_exit_code_2(store: str, args: tuple[str, ...], message: str) -> None:
    code, _, err = report(store, *args)
    assert code == 2 and message in err and "→" in err and "Traceback" not in err


def test_the_origin_of_an_execution_comes_back(store: str, tmp_path: Path) -> None:
    tags, description = Store(store, tmp_path).origin("scaling")
    assert TAGS.items() <= tags.items() and description == "How far does it scale?"
    assert Store(store, tmp_path).origin("none") == ({}, "")


def test_the_price_of_the_command_line_stands_over_that_of_the_study(store: str) -> None:
    code, out, _ = report(store, "--price", "7.25")
    assert code == 0 and "× 7.25, the price of a node-hour" in " ".join(out.split())
    code, _, err = report(store, "--price", "nan")
    assert code == 2 and err.startswith("error: --price nan: must be greater than 0")
