"""Commands and train loops as workloads: templates, output, hooks, step times, and invalid ones."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import stored_conditions

from raypar import Study, StudyError, Workload, choice, grid, hooks, uniform
from raypar.analysis.analyse import analyse
from raypar.analysis.question import WALL_TIME, question_of
from raypar.analysis.recommend import Constraints, recommend
from raypar.analysis.time_to_target import Start, Target
from raypar.init.script import NUMBER
from raypar.measure.laps import BY_REPORT, BY_STEP, UNTIMED, LapTimer, StepTimes
from raypar.reporting.points import legend
from raypar.reporting.recommend import recommended_lines
from raypar.study.command import Command
from raypar.study.metric import Metric
from raypar.study.options import resolve
from raypar.study.trial import TrialResult, TrialState
from raypar.train.command import OutputReader, lines_of_other_ranks, without_other_ranks

TORCHRUN = "torchrun --nproc-per-node={num_workers} train.py --lr {lr}"


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_a_value_is_one_word_whatever_is_in_it(value):
    assert Command("run --note={note} x").filled({"note": value}) == ("run", f"--note={value}", "x")


@given(st.text(st.characters(codec="ascii", exclude_characters="\0\r"), min_size=1))
def test_a_shell_gets_a_value_as_one_word_too(value):
    *_, text = Command("printf %s {note}", shell=True).filled({"note": value})
    assert subprocess.run(["/bin/sh", "-c", text], capture_output=True, check=True).stdout.decode() == value


def test_a_template_has_the_quotes_of_a_shell_and_the_doubled_braces_of_python():
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
        ("train.py {a.b}", {}, {}, "{a.b} is not the name of a hyperparameter"),
        ("", {}, {}, "must be a command line"),
        ("  \n", {}, {}, "must be a command line"),
        ((), {}, {}, "must be a command line"),
        (3, {}, {}, "must be a command line"),
        (None, {"name": "x"}, {}, "must be a command line"),
        (("", "train.py"), {}, {}, "must be a command line"),
        ("  ", {"shell": True}, {}, "must be a command line"),
        ("train.py {lr:d}", {}, {"lr": 0.5}, "can't be filled in with lr=0.5: Unknown format code 'd'"),
        ("train.py {lr:.2f}", {}, {"lr": "fast"}, "can't be filled in with lr='fast'"),
        ("train.py {lr:{width}}", {}, {"lr": 0.5}, "width = None: is in braces in the command and has no value"),
        ("train.py {lr:{width}}", {}, {"lr": 0.5, "width": "x"}, "can't be filled in with lr=0.5, width='x'"),
        ("train.py {lr:{a.b}}", {}, {"lr": 0.5}, "{a.b} is not the name of a hyperparameter"),
        ("train.py", {"folder": "run{lr:d}"}, {"lr": 0.5}, "can't be filled in with lr=0.5"),
        ("train.py {seed:.1f} {output_dir:d}", {}, {}, "can't be filled in"),
        ("{program} train.py", {}, {"program": " "}, "begins with an empty word"),
        ("train.py {note}", {}, {"note": "a\0b"}, "holds a null character"),
        ("train.py {note}", {}, {"note": "x" * 200_000}, "has a word of 200,000 bytes; at most 131,071 are allowed"),
        ("train.py", {"metrics": {"loss": "loss"}}, {}, "has no group for the value"),
        ("train.py", {"metrics": {"loss": "("}}, {}, "is not a regular expression"),
        ("train.py", {"defaults": {"epochs": 3}}, {}, "unknown option 'epochs'"),
    ],
)
def test_a_faulty_command_is_refused_before_anything_starts(command, more, config, message):
    with pytest.raises(StudyError) as error:
        Study(workload=Workload.from_command(command, **more), name="s", config=config)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "space",
    [{"lr": grid(1, 0.5)}, {"lr": choice(1, 0.5)}, {"lr": uniform(0.0, 1.0)}, {"lr": grid(1), "a": choice(1, 0.5)}],
)
def test_every_point_is_filled_in_before_anything_starts(space):
    workload = Workload.from_command("train.py {lr:d} {a:d}")
    with pytest.raises(StudyError, match="Unknown format code 'd'"):
        Study(workload=workload, name="s", config={} if "a" in space else {"a": 1}, space=space)
    assert Command("train.py {lr:{width}}").filled({"lr": 0.5, "width": 5}) == ("train.py", "  0.5")


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
        (
            {"epoch": r"epoch (\d+)", "train": r"train loss (\S+)", "val": r"val loss (\S+)"},
            ["epoch 1 train loss 3", "epoch 1 val loss 4", "epoch 2", "train loss 2", "epoch 3 train loss 1"],
            [{"epoch": 1, "train": 3, "val": 4}, {"epoch": 2, "train": 2}],
        ),
    ],
)
def test_reports_are_read_from_output(patterns, lines, reports):
    reader = OutputReader(patterns)
    read = [report for line in lines for report, _ in reader.reports(line)]
    assert read == reports
    rest = list(reader.rest())
    assert [str(r) for r, _ in rest] == (["{'loss': nan}"] if "acc 0.5" in lines else []) or "epoch" in patterns


def test_a_report_is_as_old_as_the_last_line_that_it_has_a_value_from():
    reader = OutputReader({"loss": r"^loss (\S+)", "val": r"val (\S+)"})
    lines = [("loss 3", 1.0), ("nothing", 2.0), ("loss 2", 5.0), ("val 1", 7.0)]
    assert [report for line, at_s in lines for report in reader.reports(line, at_s)] == [
        ({"loss": 3}, 1.0),
        ({"loss": 2, "val": 1}, 7.0),
    ]


@pytest.mark.parametrize(
    ("printed", "value"),
    [
        ("1.25E-05", 1.25e-05),
        ("1.25e+3", 1250),
        ("12,345.6", 12345.6),
        ("1,234,567", 1234567),
        ("12_345.6", 12345.6),
        ("93.21%", 93.21),
        ("-0.5", -0.5),
        ("+.5", 0.5),
        ("3.", 3),
        ("0.5, 7", 0.5),
        ("0.5,0.7", 0.5),
        ("7/10", 7),
        ("10-20", 10),
        ("15.25s", 15.25),
        ("-inf", -math.inf),
    ],
)
@pytest.mark.parametrize("pattern", [r"loss: ([-+\d.]*\d|\S+)", r"loss:(.*)", NUMBER])
def test_a_number_is_read_whole_whatever_part_of_it_the_expression_takes(printed, value, pattern):
    reader = OutputReader({"loss": pattern if pattern != NUMBER else rf"loss: {NUMBER}"})
    assert [report["loss"] for report, _ in reader.reports(f"epoch 1,2 loss: {printed}")] == [value]


def test_torchrun_prints_the_first_rank_alone_and_the_others_are_in_files(tmp_path):
    code = "import os, sys; rank = os.environ['RANK']; print('loss', rank); print('acc', rank, file=sys.stderr)"
    (tmp_path / "train.py").write_text(code)
    environment = {**os.environ, **without_other_ranks(tmp_path / "ranks"), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "loss 0\n" and "acc 0" in done.stderr and "1" not in done.stderr.split("acc ")[1]
    assert list(lines_of_other_ranks(tmp_path / "ranks")) == ["[local rank 1] loss 1", "[local rank 1] acc 1"]


def test_the_first_step_counts_as_an_average_one_and_the_time_around_a_report_is_in_no_step():
    laps = LapTimer()
    for at_s in (10, 11, 13):
        laps.step(at_s)
    laps.report({}, 20, until_s=21)  # evaluated before, and reported for a second
    laps.step(22)
    assert laps.result() == StepTimes(BY_STEP, "", (1, 2, 1), 4 / 3 * 4)


@pytest.mark.parametrize("num_steps", [2, 4, 8])
def test_the_time_of_all_steps_is_in_proportion_to_their_number(num_steps):
    laps = LapTimer()
    for i in range(num_steps):
        laps.step(10 + 0.5 * i)
    assert laps.result().train_time_s == 0.5 * num_steps


def test_a_report_in_the_output_begins_no_step_as_it_may_be_read_late():
    laps = LapTimer()
    laps.step(10)
    laps.report({}, 13, is_ordered=False)  # written before the next step, and read after it
    laps.step(12)
    laps.step(14)
    assert laps.result().times_s == (2, 2)


def laps_of(*reports):
    laps = LapTimer()
    for at_s, counts in reports:
        laps.report(counts, at_s)
    return laps.result()


def test_reports_that_count_steps_give_the_mean_step_time_between_two_of_them():
    laps = laps_of((0, {"step": 100}), (10, {"step": 200}), (14, {"step": 204}))
    assert (laps.times_s, laps.train_time_s, laps.source) == ((0.1, 1.0), 14, BY_REPORT)
    assert laps.cover == "steps 100 to 204" and laps_of((0, {"global_step": 1}), (3, {"global_step": 2})).times_s


def test_one_report_for_each_epoch_gives_the_times_of_all_epochs_but_the_first():
    laps = laps_of((5, {}), (7, {"epoch": 1}), (9, {"epoch": 2}), (12, {"epoch": 3}), (20, {"test_loss": 1}))
    assert (laps.times_s, laps.train_time_s, laps.cover) == ((2, 3), 5, "epochs 1 to 3")


@pytest.mark.parametrize(
    "reports",
    [
        [(0, {}), (1, {}), (2, {})],  # every 100 batches, for example
        [(0, {"epoch": 0}), (1, {"epoch": 0}), (2, {"epoch": 1}), (3, {"epoch": 1})],
        [(0, {"epoch": 0}), (1, {"epoch": 2})],
        [(0, {"epoch": 0.5}), (1, {"epoch": 1.5})],
        [(0, {"epoch": 0}), (1, {}), (2, {"epoch": 1})],
        [(0, {"epoch": 0}), (1, {"epoch": 1}), (2, {"epoch": 0}), (3, {"epoch": 1})],  # the next fold
        [(0, {"step": 5}), (1, {"step": 5})],
        [(0, {"epoch": 1})],
        [],
    ],
)
def test_reports_that_do_not_show_the_work_between_them_give_no_times(reports):
    assert laps_of(*reports) == StepTimes()


def batches(num_batches, step_s, every, epochs, last):
    """Yield the times at which a script prints after every `every` batches."""
    at_s = 5.0
    for epoch in range(epochs):
        for i in range(num_batches):
            at_s += step_s
            if (i + 1) % every == 0 if last else i % every == 0:
                yield at_s, {"epoch": epoch}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("num_batches", "every", "epochs"),
    [(350, 100, 1), (350, 100, 3), (1250, 500, 1), (938, 10, 2), (190, 100, 2), (350, 350, 3), (400, 200, 3)],
)
def test_reports_at_regular_intervals_give_the_true_speedup_or_none(num_batches, every, epochs, last):
    one, two = (
        laps_of(*batches(num, step_s, every, epochs, last))
        for num, step_s in ((num_batches, 0.010), (math.ceil(num_batches / 2), 0.0065))
    )
    if one.train_time_s and two.train_time_s and one.cover == two.cover:
        assert one.train_time_s / two.train_time_s == pytest.approx(num_batches / math.ceil(num_batches / 2) / 0.65)
    else:
        assert num_batches != every or last


def test_the_files_of_a_command_are_its_scripts_and_modules():
    command = Command("python -m parts.train --config a.yaml helpers/run.py /opt/other.py")
    assert command.files == ("helpers/run.py", "parts/train.py") and command.title == "run.py"
    absolute = Command("/usr/bin/python /home/me/train.py --lr {lr}")
    assert absolute.files == () and absolute.title == "train.py"


def test_a_command_its_words_and_its_folders_may_be_paths():
    for command in (Path("parts/run.py"), [Path("parts/run.py")]):
        workload = Workload.from_command(command, folder=Path("there"), tensorboard=Path("runs"))
        assert (workload.name, workload.files) == ("run.py", ("there/parts/run.py",))
        Study(workload=workload, name="s")


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


def test_only_the_first_rank_of_a_command_writes_and_only_numbers(tmp_path):
    path = tmp_path / "reports"
    code = "import raypar; raypar.step(); raypar.report({'loss': 1.5, 'name': 'x', 'ok': True, 'list': [1]})"
    for rank in ("0", "1"):
        path.touch()
        environment = {**os.environ, hooks.REPORT_FILE: str(path), "RANK": rank}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    step, report = map(json.loads, path.read_text().splitlines())
    assert report["report"] == {"loss": 1.5} and report["at_s"] >= step["at_s"]


def result_of(spec, loss, time_s, environment):
    reports = ({"epoch": 1.0, "loss": loss},)
    return TrialResult(
        spec,
        TrialState.FINISHED,
        wall_s=9.0,
        train_time_s=time_s,
        reports=reports,
        conditions=stored_conditions(environment),
    )


def analysed(of_workers, **parts):
    """Return the analysis of two points, each with the loss, time and environment of its trials."""
    workload = Workload.from_command("train.py {num_workers}", **parts)
    space = {"num_workers": grid(1, 2)}
    study = Study(workload=workload, name="s", space=space, baseline={"num_workers": 1})
    return analyse(study, [result_of(spec, *of_workers[spec.config["num_workers"] - 1]) for spec in study.trials()])


BY_EPOCH = {"steps_from": ["reports", ""], "laps_cover": ["epochs 1 to 4", ""]}


@pytest.mark.parametrize(
    ("losses", "environment", "sentences"),
    [
        (
            (0.5, 0.51),
            {"steps_from": [BY_STEP]},
            ("between two calls of raypar.step", "Their last loss agrees: 0.5 to 0.51."),
        ),
        (
            (0.5, 0.8),
            BY_EPOCH,
            ("between two reports", "epochs 1 to 4", "differs: 0.5 (num_workers=1) to 0.8 (num_workers=2)."),
        ),
        ((0.5, 0.5), {"steps_from": [UNTIMED]}, ("Times are of whole trials", "Their last loss agrees: 0.5 to 0.5.")),
    ],
)
def test_the_report_says_what_was_timed_and_that_equal_work_is_not_proven(losses, environment, sentences):
    time_s = None if environment["steps_from"] == [UNTIMED] else 5.0
    analysis = analysed([(loss, time_s, environment) for loss in losses])
    details = " ".join(finding.detail for finding in analysis.warnings)
    assert all(sentence in details for sentence in sentences)
    assert "Equal work of the points is not proven" in details
    what = {None: "the whole trial, from launch to exit", 5.0: "epochs 1 to 4"}[time_s]
    assert f"time: {what}" in legend(analysis) or environment["steps_from"] == [BY_STEP]


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (BY_EPOCH, {"steps_from": ["reports"], "laps_cover": ["epochs 1 to 8"]}, "(epochs 1 to 4, epochs 1 to 8)"),
        (BY_EPOCH, {"steps_from": [BY_STEP], "laps_cover": [""]}, "(epochs 1 to 4, raypar.step)"),
        # Results of earlier versions, whose laps may cover anything.
        ({"steps_from": ["reports"]}, {"steps_from": ["reports"]}, "can't instrument this training code"),
    ],
)
def test_laps_of_other_work_are_not_compared_but_whole_trials_are(first, second, why):
    analysis = analysed([(0.5, 5.0, first), (0.5, 1.0, second)])
    assert analysis.time_metric == WALL_TIME and [p.time_s.value for p in analysis.points] == [9.0, 9.0]
    assert analysis.points[1].speedup.value == 1
    assert any("Times are of whole trials" in each.detail and why in each.detail for each in analysis.warnings)


@pytest.mark.parametrize(
    ("parts", "chooser"),
    [
        ({}, "raypar"),
        ({"metric": "loss"}, None),
        ({"metric": "loss", "metric_chosen_by": "raypar init"}, "raypar init"),
        ({"metric": "accuracy", "metric_chosen_by": "raypar init"}, None),  # which no trial reports
    ],
)
def test_a_recommendation_says_if_the_user_did_not_choose_the_metric(parts, chooser):
    analysis = analysed([(0.5, 5.0, BY_EPOCH), (0.5, 1.0, BY_EPOCH)], **parts)
    lines = " ".join(recommended_lines(analysis.verdict))
    assert ("It is based on loss" in lines) == (chooser is not None)
    assert chooser is None or f"which {chooser} chose, not you" in lines


def test_a_study_that_names_another_metric_has_chosen_it():
    workload = Workload.from_command("train.py")
    assert question_of(Study(workload=workload, name="s", metric="accuracy")).metric_chosen_by == ""
    assert question_of(Study(workload=workload, name="s")).metric_chosen_by == "raypar"


def test_the_time_to_a_target_of_a_script_is_from_launch_to_the_report_that_reaches_it():
    study = Study(workload=Workload.from_command("train.py {num_workers}"), name="s", space={"num_workers": grid(1, 2)})
    results = []
    for spec in study.trials():
        at_s = 10.0 / spec.config["num_workers"]
        reports = tuple({"epoch": i, "loss": 1.0 / i, "since_launch_s": at_s * i} for i in (1, 2, 3))
        made = result_of(spec, 0.5, None, {"steps_from": [UNTIMED]})
        results.append(replace(made, reports=reports))
    advice = recommend(question_of(study), results, Constraints(target=Target("loss", 0.5, "min")))
    assert [c.time_s.value for c in advice.candidates] == [20.0, 10.0]
    assert advice.constraints.start is Start.LAUNCH and advice.chosen.point == {"num_workers": 2}
