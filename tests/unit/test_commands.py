"""Commands and train loops as workloads: templates, output, hooks, step times, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar import Study, StudyError, Workload, grid, hooks
from raypar.analysis.analyse import analyse
from raypar.study.command import Command
from raypar.study.metric import Metric
from raypar.study.options import resolve
from raypar.study.trial import TrialResult, TrialState
from raypar.train.command import OutputReader
from raypar.train.laps import BY_REPORT, BY_STEP, UNTIMED, LapTimer, num_steps_of

TORCHRUN = "torchrun --nproc-per-node={num_workers} train.py --lr {lr}"


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_a_value_is_one_word_whatever_is_in_it(value):
    assert Command("run --note={note} x").filled({"note": value}) == ("run", f"--note={value}", "x")


@given(st.text(st.characters(codec="ascii", exclude_characters="\0\r"), min_size=1))
def test_a_shell_gets_a_value_as_one_word_too(value):
    *_, text = Command("printf %s {note}", shell=True).filled({"note": value})
    assert subprocess.run(["/bin/sh", "-c", text], capture_output=True, check=True).stdout.decode() == value


def test_quotes_and_doubled_braces_of_a_template_are_those_of_a_shell_and_of_python():
    command = Command("""python -c 'print("{{}}")' --lr {lr:.2f}""")
    assert command.filled({"lr": 0.5}) == ("python", "-c", 'print("{}")', "--lr", "0.50")
    assert command.names == ("lr",)


def test_a_name_in_braces_is_an_option_and_raypars_own_keep_their_meaning():
    workload = Workload.from_command(TORCHRUN + " --to {output_dir}")
    config = resolve(workload, {"lr": 0.1, "num_workers": 2})
    assert config["lr"] == 0.1 and config["num_workers"] == 2 and "output_dir" not in config and "epochs" not in config
    assert (workload.name, workload.metric_of()) == ("train.py", Metric("loss", "min"))


@pytest.mark.parametrize(
    ("command", "more", "config", "message"),
    [
        (TORCHRUN, {}, {}, "lr = None: is in braces in the command and has no value"),
        ("train.py {num_worker}", {}, {}, "did you mean 'num_workers'"),
        ("train.py", {}, {"rate": 1}, "the command has no {rate}"),
        (TORCHRUN, {}, {"lr": 0.1, "rate": 1}, "unknown option 'rate'"),
        ("train.py 'open", {}, {}, "can't be split into words"),
        ("train.py {lr", {}, {"lr": 1}, "a literal brace is written twice"),
        ("train.py {a.b}", {}, {}, "{a.b} is no name of a hyperparameter"),
        ("", {}, {}, "is no command line"),
        ("train.py", {"metrics": {"loss": "loss"}}, {}, "has no group for the value"),
        ("train.py", {"metrics": {"loss": "("}}, {}, "is no regular expression"),
        ("train.py", {"defaults": {"epochs": 3}}, {}, "unknown option 'epochs'"),
    ],
)
def test_a_faulty_command_is_refused_before_anything_starts(command, more, config, message):
    with pytest.raises(StudyError) as error:
        Study(workload=Workload.from_command(command, **more), name="s", config=config)
    assert message in str(error.value)


def test_a_train_loop_takes_options_and_a_metric_as_other_workloads_do():
    loop = Workload.from_train_loop(print, options={"lr": 0.1}, defaults={"num_workers": 2}, metric="loss", mode="min")
    study = Study(workload=loop, name="s", config={"anything": 1})
    (spec,) = {s.point_identity: s for s in study.trials()}.values()
    assert study.judged_by == Metric("loss", "min")
    assert {key: spec.config[key] for key in ("lr", "num_workers", "anything")} == {
        "lr": 0.1,
        "num_workers": 2,
        "anything": 1,
    }
    with pytest.raises(StudyError, match="`lr` is of type float, not str"):
        Study(workload=loop, name="s", config={"lr": "fast"})


@pytest.mark.parametrize(
    ("patterns", "lines", "reports"),
    [
        ({}, ['{"step": 1, "loss": 0.5, "note": "x"}', "{not json}", "loss 3"], [{"step": 1, "loss": 0.5}]),
        ({"loss": r"loss[ =:]+([0-9.]+)"}, ["step 1 loss: 2.5", "nothing", "loss=1"], [{"loss": 2.5}, {"loss": 1}]),
        (
            {"loss": r"loss (\S+)", "accuracy": r"acc (\S+)"},
            ["loss 2", "loss 1", "acc 0.5", "loss nan", "loss"],
            [{"loss": 2}, {"loss": 1, "accuracy": 0.5}],
        ),
        ({"loss": r"loss(:)?"}, ["loss", "loss:"], []),
    ],
)
def test_reports_are_read_from_output(patterns, lines, reports):
    reader = OutputReader(patterns)
    read = [report for line in lines for report in reader.reports(line)]
    assert read == reports
    rest = list(reader.rest())
    assert [str(r) for r in rest] == (["{'loss': nan}"] if "acc 0.5" in lines else [])


def test_the_first_step_is_not_counted_and_what_lies_beside_a_report_is_in_no_step():
    laps = LapTimer()
    for at_s in (10, 11, 13):
        laps.step(at_s)
    laps.report(20, until_s=21)  # evaluated before, and reported for a second
    laps.step(22)
    assert laps.times_s == (1, 2, 1) and laps.train_time_s == 4 and laps.source == BY_STEP


def test_a_report_in_the_output_begins_no_step_as_it_may_be_read_late():
    laps = LapTimer()
    laps.step(10)
    laps.report(13, is_ordered=False)  # written before the next step, and read after it
    laps.step(12)
    laps.step(14)
    assert laps.times_s == (2, 2)


def test_reports_that_count_steps_give_the_mean_step_time_between_two_of_them():
    laps = LapTimer()
    for at_s, num_steps in ((0, 100), (10, 200), (14, 204), (15, 204), (17, None)):
        laps.report(at_s, num_steps=num_steps)
    assert laps.times_s == (0.1, 1.0, 1.0, 2.0) and laps.train_time_s == 17
    assert num_steps_of({"loss": 1.0, "global_step": 7.0}) == 7 and num_steps_of({"epoch": 7.0}) is None


def test_the_files_of_a_command_are_its_scripts_and_modules():
    command = Command("python -m parts.train --config a.yaml helpers/run.py /opt/other.py")
    assert command.files == ("helpers/run.py", "parts/train.py") and command.title == "run.py"


def test_without_steps_reports_are_timed_and_without_both_nothing_is():
    laps = LapTimer()
    assert (laps.times_s, laps.train_time_s, laps.source) == ((), None, UNTIMED)
    laps.report(5, until_s=6)
    assert laps.source == UNTIMED  # where it began is unknown
    laps.report(8)
    assert (laps.times_s, laps.source) == ((2,), BY_REPORT)


def test_the_hooks_need_no_other_package_and_do_nothing_outside_of_a_study(tmp_path):
    code = (
        "import sys\n"
        "class Only:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] not in {*sys.stdlib_module_names, 'raypar'}: raise ImportError(name)\n"
        "sys.meta_path.insert(0, Only())\n"
        "import raypar\nraypar.report({'loss': 1})\nraypar.step()\nprint('raypar.study' in sys.modules)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != hooks.REPORT_FILE}
    environment["PYTHONPATH"] = str(Path(hooks.__file__).parents[1])
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_only_the_first_rank_of_a_command_writes_and_what_is_no_number_is_left_out(tmp_path):
    path = tmp_path / "reports"
    code = "import raypar; raypar.step(); raypar.report({'loss': 1.5, 'name': 'x', 'ok': True, 'list': [1]})"
    for rank in ("0", "1"):
        path.touch()
        environment = {**os.environ, hooks.REPORT_FILE: str(path), "RANK": rank}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    step, report = map(json.loads, path.read_text().splitlines())
    assert report["report"] == {"loss": 1.5} and report["at_s"] >= step["at_s"]


def result_of(spec, loss, time_s, source):
    environment = {"steps_from": [source]}
    reports = ({"epoch": 1.0, "loss": loss},)
    return TrialResult(
        spec, TrialState.FINISHED, wall_s=9.0, train_time_s=time_s, reports=reports, environment=environment
    )


@pytest.mark.parametrize(
    ("losses", "source", "sentences"),
    [
        ((0.5, 0.51), BY_STEP, ("between two calls of raypar.step", "Their last loss agrees: 0.5 to 0.51.")),
        ((0.5, 0.8), BY_REPORT, ("between two of its reports", "differs: 0.5 (num_workers=1) to 0.8 (num_workers=2).")),
        ((0.5, 0.5), UNTIMED, ("Times are of whole trials", "Their last loss agrees: 0.5 to 0.5.")),
    ],
)
def test_the_report_says_what_was_timed_and_that_equal_work_is_not_proven(losses, source, sentences):
    workload = Workload.from_command("train.py {num_workers}")
    space = {"num_workers": grid(1, 2)}
    study = Study(workload=workload, name="s", space=space, baseline={"num_workers": 1})
    time_s = None if source == UNTIMED else 5.0
    results = [result_of(spec, losses[spec.config["num_workers"] - 1], time_s, source) for spec in study.trials()]
    details = " ".join(finding.detail for finding in analyse(study, results).warnings)
    assert all(sentence in details for sentence in sentences)
    assert "Equal work of the points is not proven" in details
