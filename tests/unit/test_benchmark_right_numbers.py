"""benchmarks/right_numbers.py reports wrong numbers, needless refusals and refusals without a fix."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from right_numbers import verdict_of
from truth import FAILED, REFUSED, RIGHT, WRONG, Done, Outcome, Stored, Training, User, cases, differences, loaded

CASES = {case.slug: case for case in cases()}
CASE = CASES["no_metric_classes"]


@dataclass(frozen=True)
class Recorded(User):
    """A user whose commands have already ended."""

    done: Done = field(default_factory=lambda: Done(0, ""))
    trials: list = field(default_factory=list)

    def study(self, file, *arguments, folder=""):
        return self.done

    def stored(self, name, study, *, is_shown=False):
        if not self.trials:
            raise LookupError
        points = [{"point": {}, "metric": {"value": self.trials[0]["final.accuracy"]}}]
        return Stored(self.trials, {"metric": "accuracy", "points": points}, study.output)


@pytest.fixture
def right(tmp_path):
    """Return a user with a trial whose numbers are right."""
    config = {"epochs": 2, "batch_size": 32, "lr": 0.1}
    trained = CASE.plain.train(loaded(User(tmp_path).write("study.py", CASE.text())), config)
    final = {**trained.reports[-1], "accuracy": CASE.truths["accuracy"](trained.outputs, trained.targets)}
    trial = {"state": "finished", "seed": 0, **{f"config.{key}": value for key, value in config.items()}}
    return Recorded(tmp_path, trials=[{**trial, **{f"final.{key}": value for key, value in final.items()}}])


def test_the_numbers_of_plain_torch_are_right(right):
    assert CASE.judge(right) == Outcome(RIGHT)


@pytest.mark.parametrize("name", ["train_loss", "val_loss", "accuracy"])
@pytest.mark.parametrize("factor", [1.001, float("nan"), None])
def test_a_deviating_number_is_wrong(right, name, factor):
    key = f"final.{name}"
    right.trials[0][key] = factor and right.trials[0][key] * factor
    outcome = CASE.judge(right)
    assert outcome.got == WRONG
    assert name in outcome.text
    assert verdict_of(CASE, outcome) == "wrong number"


def test_a_share_above_one_is_wrong_wherever_it_is_shown(right):
    outcome = CASE.judge(replace(right, done=Done(0, "efficiency 104 %, accuracy 9,321.0 %")))
    assert outcome == Outcome(WRONG, "a share of 9321.0 %")


@pytest.mark.parametrize(
    ("code", "text", "expected", "got", "verdict"),
    [
        (2, "error: use one worker", RIGHT, REFUSED, "refused without need"),
        (2, "error: use one worker", REFUSED, REFUSED, "ok"),
        (2, "error: no", REFUSED, FAILED, "failed"),
        (1, "error: use one worker", REFUSED, FAILED, "failed"),
    ],
)
def test_a_refusal_must_be_expected_and_name_the_fix(tmp_path, code, text, expected, got, verdict):
    case = replace(CASE, expected=expected, words=("one worker",))
    outcome = case.judge(Recorded(tmp_path, done=Done(code, text)))
    assert (outcome.got, verdict_of(case, outcome)) == (got, verdict)


def test_non_finite_numbers_are_right_only_if_the_truth_is_non_finite():
    nan = float("nan")
    assert not differences({"loss": nan}, {"loss": nan}, "trial")
    assert differences({"loss": nan}, {"loss": 1.0}, "trial")
    assert differences({"loss": 1.0}, {"loss": nan}, "trial")


@pytest.mark.parametrize("slug", [slug for slug, case in CASES.items() if isinstance(case, Training)])
def test_every_study_file_defines_a_study(tmp_path, slug):
    module = loaded(User(tmp_path).write("study.py", CASES[slug].text()))
    assert module.study.workload.name == slug
    assert isinstance(module.model({}), torch.nn.Module)
