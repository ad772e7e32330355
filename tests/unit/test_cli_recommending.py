"""``raypar recommend``: flags, refusals and the suggested command; tests/golden has whole outputs."""

import json
import shlex
from dataclasses import replace
from itertools import pairwise

import pytest
from command import joined, raypar, refused
from recording import recorded
from results import make_result
from stage import options_of

from raypar.analysis.question import Question, point_key, question_of
from raypar.cli.common import parse_quantity
from raypar.execution.flags import RunFlags
from raypar.execution.options import ResumeFlags
from raypar.study.loader import load_study
from raypar.study.quantity import UNITS_J

STUDY_FILE = """from raypar import Study, grid
from raypar.workloads import digits
space = {"batch_size": grid(64, 128), "optimizer": grid("sgd", "adam"), "num_workers": grid(1, 2, 4, 8)}
study = Study(name="noisy", workload=digits, space=space, config={"epochs": 1}, baseline={"num_workers": 1})
"""
# Two and four workers are about as fast with batches of 64 and Adam; everything else is far slower.
TIMES = {2: (13.0, 14.9, 11.8), 4: (12.0, 12.3, 12.6)}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with a store of some studies, one of them with its file."""
    folder = tmp_path_factory.mktemp("project")
    times = {1: (40.0, 40.4, 39.8), 2: (22.0, 22.1, 21.8), 4: (12.0, 12.1, 11.9)}
    scaled = [make_result({"num_workers": n}, r, t) for n, repeats in times.items() for r, t in enumerate(repeats)]
    recorded(folder, Question("scaled", {"num_workers": 1}, ("num_workers",)), scaled)
    percent = [make_result({"num_workers": n}, r, 9.0 - n, accuracy=97.0 - n) for n in (1, 2) for r in range(3)]
    recorded(folder, Question("percent", {"num_workers": 1}, ("num_workers",)), percent)
    drawn = [make_result({"lr": lr}, 0, 4.0 + lr, 0.9 + lr / 10) for lr in (0.1, 0.2, 0.3)]
    recorded(folder, Question("drawn", {}, ("lr",), num_repeats=1, is_search=True), drawn)
    (folder / "noisy.py").write_text(STUDY_FILE, encoding="utf-8")
    loaded = load_study(folder / "noisy.py")
    noisy = []
    for spec in loaded.study.trials():
        is_fast = spec.point["batch_size"] == 64 and spec.point["optimizer"] == "adam"
        fast = TIMES.get(int(str(spec.point["num_workers"]))) if is_fast else None
        time_s = fast[spec.repeat] if fast else 90.0 + spec.repeat / 10
        noisy.append(replace(make_result({}, spec.repeat, time_s), spec=spec))
    options = options_of(folder, tracking_uri="", set=("epochs=1",), no_ray=True, log_model=True)
    resume = json.loads(ResumeFlags.of(loaded, options, 1.7e9).to_json())
    recorded(folder, question_of(loaded.study), noisy, resume={**resume, "data_dir": None})
    return folder


@pytest.fixture(autouse=True)
def in_the_project(project, monkeypatch):
    for variable in ("MLFLOW_TRACKING_URI", "RAYPAR_DATA_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(project)


def recommended(*args):
    code, out, err = raypar("recommend", *args)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80 and "\x1b" not in out
    return joined(out)


def test_limits_and_targets_come_from_the_command_line():
    assert "Recommended: num_workers=4, 12.0 s [" in recommended("scaled")
    flags = "--target accuracy=0.9 --min-efficiency 0.85 --max-time 0.5min --set num_workers=1,2,4"
    text = recommended("scaled", *flags.split())
    assert "Study scaled num_workers=1,2,4: the fastest to accuracy 90.0 % or more, in 30.0 s at most" in text
    assert "Recommended: num_workers=2, 22.0 s [" in text
    assert "longer than 30.0 s" in text and "efficiency below 85 %" in text
    assert recommended("drawn", "--min-metric", "0.925").count("accuracy below 92.5 %") == 2
    assert "A search runs each point once. Make a study of these points with repeats." in recommended("drawn")


def test_a_percentage_is_shown_and_given_as_one():
    text = recommended("percent")
    assert "within 0.50 points of the best" in text and "96.00 %" in text and "9600" not in text
    assert "the fastest to accuracy 95.00 % or more" in recommended("percent", "--target", "accuracy=95")
    assert "accuracy 95.50 % or more at the end" in recommended("percent", "--min-metric", "95.5")
    refused("a percentage from 0 to 100 → write --target accuracy=95", "recommend", "percent", "--target=accuracy=0.95")
    refused("a percentage from 0 to 100 → write --min-metric 95", "recommend", "percent", "--min-metric=0.95")
    refused("a share from 0 to 1 → write --min-metric 0.95", "recommend", "scaled", "--min-metric=95")
    code, out, _ = raypar("store", "show", "percent")
    assert code == 0 and "96.00 %" in out
    document = json.loads(raypar("recommend", "percent", "--json")[1])
    assert (document["metric_unit"], document["metric_margin"]) == ("percent", 0.5)


def test_the_suggested_command_repeats_the_same_points(project):
    _, out, _ = raypar("recommend", "noisy")
    (line,) = [line for line in out.splitlines() if line.startswith("  raypar study")]
    words = shlex.split(line)
    assert words[:3] == ["raypar", "study", "noisy.py"] and words[-2:] == ["--log-model", "--no-ray"]
    settings = [after for word, after in pairwise(words) if word == "--set"]
    repeats = int(words[words.index("--repeats") + 1])
    before = load_study(project / "noisy.py").study
    after = load_study(project / words[2], settings, RunFlags(repeats=repeats).of_study).study
    points = ({"batch_size": 64, "optimizer": "adam", "num_workers": n} for n in (1, 2, 4))
    assert {point_key(p) for p in after.points()} == {point_key(p) for p in points}
    stored = {spec.identity for spec in before.trials()}
    new = [spec for spec in after.trials() if spec.identity not in stored]
    assert repeats > 3 and {spec.repeat for spec in new} == set(range(3, repeats))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--target accuracy=99", "write --target accuracy=0.99"),
        ("--target acuracy=0.99", "did you mean 'accuracy'?"),
        ("--max-time 1.2.3s", "--max-time 1.2.3s: must be a positive time"),
        ("--max-cost 3", "--max-cost needs a price"),
        ("--max-cost -3 --price 1", "--max-cost -3.0: must be greater than 0"),
        ("--max-cost 3 --price 1", "no result has its number of nodes recorded"),
        ("--set num_workers", "--set num_workers: lacks `=`"),
        ("--set num_workers=3", "--set num_workers=3: no point has it"),
        ("--set lr=uniform(0,1)", "is a range"),
        ("--set lr=grid()", "--set lr=grid(): is empty: give at least one value"),
        ("--set lr=0.1 --set lr=0.2", "--set lr is given twice"),
    ],
)
def test_bad_input_is_refused(flags, message):
    refused(message, "recommend", "scaled", *flags.split())


@pytest.mark.parametrize(
    ("text", "value"),
    [("500", 500.0), ("500J", 500.0), ("2.5 kJ", 2500.0), ("1e3 kJ", 1e6), ("0.5kWh", 1.8e6), (" 7 wh ", 25200.0)],
)
def test_energies_have_units(text, value):
    assert parse_quantity("--max-energy", text, UNITS_J, "energy", "500J") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "J", "0", "-5J", "5 kg", "5..2J", "five", "1e999J", "nan", "5 k"])
def test_an_invalid_energy_is_refused_with_an_example(text):
    refused("must be a positive energy → write --max-energy 500J", "recommend", "scaled", f"--max-energy={text}")
