"""``raypar why`` and ``raypar improve``: their executions, exit codes, and answers of stored studies."""

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import typer
from command import joined, raypar, refused
from recording import recorded
from results import make_result
from test_cli_target import OPTIONS, STUDY
from test_why import PARTS_OF, observed

from raypar.analysis.analyse import analyse
from raypar.analysis.question import Question
from raypar.cli.improve import calls_in
from raypar.cli.target import study_file
from raypar.cli.why import Asking, exit_as
from raypar.errors import BrokeOff
from raypar.execution.flags import RunFlags
from raypar.study.loader import load_study
from raypar.study.options import ON_CPU
from raypar.study.trial import TrialState


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "train.py").write_text(OPTIONS + "optimizer = torch.optim.AdamW(model)\n")
    return tmp_path


def loaded_script():
    return load_study(study_file("train.py", None, None, None, as_it_is=True, num_cores=2))


def test_later_executions_keep_the_trials_of_the_first(folder, monkeypatch):
    executions = []

    @contextlib.contextmanager
    def executed(loaded, options, *, shows_trials):
        assert shows_trials
        executions.append((loaded.study, options))
        yield None, outcome(Question("train_why", {"what_if": "none"}, ("what_if",)), [])

    monkeypatch.setattr("raypar.cli.why.executed", executed)
    asking = Asking(loaded_script(), RunFlags(fresh=True), "_why", "what_if")
    asking.execute(num_repeats=1)
    asking.execute(["no loading"])
    (first, of_first), (second, of_second) = executions
    assert first.name == second.name == "train_why" and (first.num_repeats, second.num_repeats) == (1, 3)
    assert [point["what_if"] for point in second.points()] == ["none", "no loading"]
    assert first.trials()[0].identity in {trial.identity for trial in second.trials()}
    assert of_first.flags.fresh and not of_second.flags.fresh and of_second.not_before > 0
    assert not of_first.is_resumable, "the command continues it, not `raypar store resume`"


@pytest.mark.parametrize(
    ("failed_at", "ends", "code"),
    [
        ([], {}, None),
        (["compile=True"], {}, None),
        (["compile=True", "none"], {}, 1),
        ([], {"interrupted_by": 2, "was_interrupted": True}, 130),
        (["compile=True"], {"interrupted_by": 2, "was_interrupted": True}, 130),
    ],
)
def test_a_setting_that_the_script_can_not_take_is_no_failure(failed_at, ends, code):
    failures = [make_result({"change": change}, state=TrialState.FAILED) for change in failed_at]
    facts = {"interrupted_by": None, "was_interrupted": False, "broke_off": None, **ends}
    with pytest.raises(typer.Exit) if code else contextlib.nullcontext() as caught:
        exit_as(SimpleNamespace(failures=failures, **facts), "change")
    assert code is None or caught.value.exit_code == code
    with pytest.raises(BrokeOff):
        exit_as(SimpleNamespace(failures=failures, **{**facts, "interrupted_by": None, "was_interrupted": False,
                                                      "broke_off": BrokeOff("disk is full")}), "change")  # fmt: skip


def test_calls_are_found_in_the_script(folder):
    assert list(calls_in(loaded_script(), ["AdamW"])) == [f"{folder}/train.py:5"]


def test_a_stored_study_is_explained_without_running_it(folder):
    results = [observed({"what_if": "none"}, repeat, 0.01 * (1 + repeat / 1000), PARTS_OF[1]) for repeat in range(3)]
    recorded(folder, Question("study", {"what_if": "none"}, ("what_if",)), results)
    code, out, err = raypar("why", "study")
    assert (code, err) == (0, "")
    assert "50 % waiting for data, 20 % forward pass, 20 % backward pass, 10 % optimizer." in joined(out)


def test_the_steps_of_a_model_are_profiled_and_nothing_is_left_out(folder, monkeypatch):
    executions = []

    @contextlib.contextmanager
    def executed(loaded, options, *, shows_trials):
        executions.append((loaded.study, options))
        made = observed({"num_workers": 1}, 0, 0.01, PARTS_OF[1])
        times = {"step_times_s": ((0.01,) * 100,), "throughput_samples_per_s": 6400.0}
        yield None, outcome(Question("mine_why", {}, ("num_workers",)), [replace(made, observation=None, **times)])

    monkeypatch.setattr("raypar.cli.why.executed", executed)
    (folder / "mine.py").write_text(STUDY)
    code, out, _ = raypar("why", "mine.py", "--json")
    ((study, options),) = executions
    assert code == 0 and options.profiling.num_steps == 20 and study.name == "mine_why" and "what_if" not in study.space
    (point,) = json.loads(out)["points"]
    assert point["step_s"]["value"] == 0.01 and point["samples_per_step"] == 64 and point["what_ifs"] == []


FACTORS = {"fused_optimizer=True": 0.8, "loader_workers=1 persistent_workers=True": 0.5}


@pytest.fixture
def executions(monkeypatch):
    """Let executions have results at once; yields the study and the first trials of each."""
    made = []

    @contextlib.contextmanager
    def executed(loaded, options, *, shows_trials):
        specs = options.source.first(loaded.study, (), ON_CPU)
        made.append((loaded.study, specs))
        results = [
            observed({"change": change}, repeat, 0.01 * FACTORS.get(change, 1.0) * (1 + repeat / 1000), PARTS_OF[1])
            for change, repeat in sorted({(spec.point["change"], spec.repeat) for spec in specs})
        ]
        yield None, outcome(Question("train_improve", {"change": "none"}, ("change",)), results)

    monkeypatch.setattr("raypar.cli.why.executed", executed)
    return made


def test_promising_changes_are_repeated_beside_the_unchanged_script_also_together(folder, executions):
    code, out, _ = raypar("improve", "train.py", "--budget", "2m", "--json")
    (_, first), (of_tried, tried), (of_repeated, repeated) = executions
    assert code == 0 and [(spec.point["change"], spec.repeat) for spec in first] == [("none", 0)]
    assert {spec.repeat for spec in tried} == {0, 1} and {"none", "threads=2", *FACTORS} <= {*changes_in(tried)}
    assert {spec.repeat for spec in repeated} == {2, 3, 4}
    both = "loader_workers=1 persistent_workers=True fused_optimizer=True"
    assert changes_in(repeated) == {"none", *FACTORS, both}
    assert (of_tried.until, of_repeated.until, of_repeated.budget) == ("", "settled", 120)
    changes = json.loads(out)["changes"]
    assert changes[0]["is_recommended"] and {each["settings"] for each in changes} == changes_in(tried) - {"none"} | {
        both
    }, "those that were not repeated, too"
    outcomes = {each["settings"]: each["outcome"] for each in changes}
    unconfirmed = {each for each, outcome in outcomes.items() if outcome == "unconfirmed"}
    assert unconfirmed == outcomes.keys() - {both, *FACTORS}, "their two trials support no claim"
    assert [outcomes[each] for each in FACTORS] == ["faster", "faster"]


@pytest.mark.parametrize(("first_trials_s", "budget"), [(300.0, 240.0), (800.0, 400.0)])
def test_the_repeats_of_changes_end_within_ten_minutes_or_half_the_time_of_the_first_trials(
    folder, executions, monkeypatch, first_trials_s, budget
):
    clock = iter([0.0, first_trials_s])
    monkeypatch.setattr("raypar.cli.improve.time", SimpleNamespace(monotonic=lambda: next(clock)))
    code, _, _ = raypar("improve", "train.py", "--json")
    assert code == 0 and executions[-1][0].budget == budget


def outcome(question, results):
    """Return a complete execution, which has the trials of its own plan only."""
    facts = {"interrupted_by": None, "was_interrupted": False, "broke_off": None, "failures": (), "stopped": None}
    by_identity = {result.spec.identity: result for result in results}
    return SimpleNamespace(
        analysis=analyse(question, results), results=by_identity, plan=SimpleNamespace(question=question), **facts
    )


def changes_in(specs):
    return {spec.point["change"] for spec in specs}


def test_targets_that_are_no_scripts_are_refused(folder):
    (folder / "mine.py").write_text(STUDY)
    refused("mine.py: is not a study of a script or train loop", "improve", "mine.py")
    refused("gone.py: there is no such file", "why", "gone.py")
    refused("gone: there is no such file", "why", "gone")
