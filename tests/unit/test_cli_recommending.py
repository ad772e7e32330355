"""``raypar recommend``: a configuration out of a study in a store, or one message on what is wrong."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from recording import recorded
from results import make_result
from typer.testing import CliRunner

from raypar.analysis.question import Question, point_key, question_of
from raypar.cli.app import app
from raypar.execution.options import Options, ResumeFlags
from raypar.study.loader import load_study

STUDY_FILE = """
from raypar import Study, grid
from raypar.workloads import digits

study = Study(
    name="noisy",
    workload=digits,
    space={"batch_size": grid(64, 128), "optimizer": grid("sgd", "adam"), "num_workers": grid(1, 2, 4, 8)},
    config={"epochs": 1},
    baseline={"num_workers": 1},
    num_repeats=3,
)
"""
# Two and four workers are about as fast with batches of 64 and Adam; everything else is far slower.
TIMES = {2: (13.0, 14.9, 11.8), 4: (12.0, 12.3, 12.6)}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of some studies, one of them with its file."""
    folder = tmp_path_factory.mktemp("project")
    times = {1: (40.0, 40.4, 39.8), 2: (22.0, 22.1, 21.8), 4: (12.0, 12.1, 11.9)}
    scaled = [make_result({"num_workers": n}, r, t) for n, repeats in times.items() for r, t in enumerate(repeats)]
    recorded(folder, Question("scaled", {"num_workers": 1}, ("num_workers",)), scaled)
    drawn = [make_result({"lr": lr}, 0, 4.0 + lr, 0.9 + lr / 10) for lr in (0.1, 0.2, 0.3)]
    recorded(folder, Question("drawn", {}, ("lr",), num_repeats=1), drawn)
    (folder / "noisy.py").write_text(STUDY_FILE, encoding="utf-8")
    loaded = load_study(folder / "noisy.py")
    noisy = []
    for spec in loaded.study.trials():
        is_fast = spec.point["batch_size"] == 64 and spec.point["optimizer"] == "adam"
        fast = TIMES.get(int(str(spec.point["num_workers"]))) if is_fast else None
        time_s = fast[spec.repeat] if fast else 90.0 + spec.repeat / 10
        noisy.append(replace(make_result({}, spec.repeat, time_s), spec=spec))
    flags = Options(project_dir=folder, tracking_uri="", settings=["epochs=1"], with_ray=False)
    resume = json.loads(ResumeFlags.of(loaded, flags, 1.7e9).to_json())
    recorded(folder, question_of(loaded.study), noisy, resume={**resume, "data_dir": None})
    return folder


@pytest.fixture(autouse=True)
def in_the_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MLFLOW_TRACKING_URI", "RAYPAR_DATA_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(project)


def recommend(*args: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["recommend", *args], env={"COLUMNS": "80"})
    return done.exit_code, done.stdout, done.stderr


def joined(text: str) -> str:
    return " ".join(text.split())


def test_a_study_names_its_fastest_configuration() -> None:
    code, out, err = recommend("scaled")
    assert (code, err) == (0, "")
    assert "Take num_workers=4: 12.0 s [" in joined(out)
    assert max(map(len, out.splitlines())) <= 80 and "\x1b" not in out


def test_limits_and_a_target_are_taken_from_the_command_line() -> None:
    flags = (
        "--target",
        "accuracy=0.9",
        "--min-efficiency",
        "0.85",
        "--max-time",
        "0.5min",
        "--set",
        "num_workers=1,2,4",
    )
    code, out, _ = recommend("scaled", *flags)
    text = joined(out)
    assert code == 0
    assert "Study scaled num_workers=1,2,4: the fastest to accuracy 90.0 % or more, in 30.0 s at most" in text
    assert "Take num_workers=2: 22.0 s [" in text
    assert "longer than 30.0 s" in text and "efficiency below 85 %" in text


def test_the_metric_at_the_end_can_be_a_limit() -> None:
    code, out, _ = recommend("drawn", "--min-metric", "0.925")
    assert code == 0 and out.count("accuracy below 92.5 %") == 2


def test_the_command_that_would_settle_it_runs_more_trials_of_the_same_points(project: Path) -> None:
    code, out, _ = recommend("noisy")
    assert code == 0 and "The study can't tell which is the fastest." in joined(out)
    (line,) = [line for line in out.splitlines() if line.startswith("  raypar study")]
    words = shlex.split(line)
    assert words[:3] == ["raypar", "study", "noisy.py"] and words[-1] == "--no-ray"
    settings = [after for word, after in pairwise(words) if word == "--set"]
    repeats = int(words[words.index("--repeats") + 1])
    assert repeats > 3
    before = load_study(project / "noisy.py").study
    after = load_study(project / words[2], settings, repeats).study
    assert {point_key(p) for p in after.points()} == {
        point_key({"batch_size": 64, "optimizer": "adam", "num_workers": n}) for n in (1, 2, 4)
    }
    known = {spec.identity for spec in before.trials()}
    new = [spec for spec in after.trials() if spec.identity not in known]
    assert {spec.repeat for spec in new} == set(range(3, repeats))


def test_a_search_is_told_to_become_a_study() -> None:
    code, out, _ = recommend("drawn")
    assert code == 0
    assert "Best guess: lr=0.3" in joined(out)
    assert "A search runs each point once: make a study of these points, with repeats." in joined(out)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--target", "accuracy"), "--target accuracy: is no metric=value"),
        (("--target", "accuracy=99"), "write --target accuracy=0.99"),
        (("--target", "acuracy=0.99"), "did you mean 'accuracy'?"),
        (("--start", "launch"), "add --target accuracy=0.99"),
        (("--max-time", "soon"), "--max-time soon: is no time greater than 0"),
        (("--max-time", "1.2.3s"), "--max-time 1.2.3s: is no time"),
        (("--max-cost", "3"), "--max-cost needs a price"),
        (("--max-cost", "-3", "--price", "1"), "--max-cost -3.0: must be greater than 0"),
        (("--max-cost", "3", "--price", "1"), "no result says on how many nodes it ran"),
        (("--min-efficiency", "70"), "--min-efficiency 70: must lie between 0 and 2"),
        (("--min-metric", "nan"), "--min-metric nan: is no number"),
        (("--set", "num_workers"), "--set num_workers: lacks `=`"),
        (("--set", "num_workers=3"), "--set num_workers=3: no point has it"),
        (("--set", "lr=uniform(0,1)"), "is a range"),
        (("--set", "lr=0.1", "--set", "lr=0.2"), "--set lr is given twice"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(flags: tuple[str, ...], message: str) -> None:
    code, out, err = recommend("scaled", *flags)
    assert (code, out) == (2, "")
    assert message in err and "→" in err and "Traceback" not in err


def test_a_study_that_is_not_there_is_told() -> None:
    code, _, err = recommend("scalled")
    assert code == 2 and "no study `scalled` in the store" in err and "did you mean 'scaled'?" in err
