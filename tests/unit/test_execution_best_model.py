"""Which point the validation set chooses, and how the test set's word on it is kept and told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from results import make_result

from raypar.analysis.analyse import StudyAnalysis, analyse
from raypar.analysis.question import Question
from raypar.execution.best_model import FinalTest, chosen_point, stored_final_test, with_final_test


def study_of(mode: str, **accuracies: tuple[float, ...]) -> StudyAnalysis:
    question = Question("s", {}, ("lr",), mode=mode)
    results = [
        make_result({"lr": float(name[1:])}, repeat, accuracy=value)
        for name, values in accuracies.items()
        for repeat, value in enumerate(values)
    ]
    return analyse(question, results)


FINAL = FinalTest({"lr": 2.0}, "accuracy", ({"loss": 0.5, "accuracy": 0.8}, {"loss": 0.4, "accuracy": 0.9}))


@pytest.mark.parametrize(("mode", "lr"), [("max", 2.0), ("min", 1.0)])
def test_the_point_with_the_best_median_is_chosen(mode: str, lr: float) -> None:
    point = chosen_point(study_of(mode, x1=(0.1, 0.2, 0.99), x2=(0.5, 0.6, 0.7)))
    assert point is not None and point.point == {"lr": lr}


def test_of_equals_the_first_is_chosen() -> None:
    point = chosen_point(study_of("max", x1=(0.5, 0.5), x2=(0.5, 0.5)))
    assert point is not None and point.point == {"lr": 1.0}


def test_without_a_metric_nothing_is_chosen() -> None:
    assert chosen_point(analyse(Question("s", {}, ("lr",)), [])) is None


def test_a_final_test_is_told_from_what_was_stored_of_it() -> None:
    analysis = with_final_test(study_of("max", x1=(0.5,)), stored_final_test(FINAL.to_json()))
    told = analysis.verdicts[-1]
    assert "seen once, by the 2 models" in told and "lr=2" in told and "85.0 %" in told


@pytest.mark.parametrize(
    "stored", [None, "", "{", "{}", '{"point": {}, "metric": "f1", "scores": [{"loss": 1}], "look": 1}']
)
def test_where_no_final_test_is_stored_nothing_is_said_of_one(stored: str | None) -> None:
    analysis = study_of("max", x1=(0.5,))
    assert with_final_test(analysis, stored_final_test(stored)) == analysis


def test_a_study_that_looks_at_the_loss_is_told_the_loss_on_the_test_set() -> None:
    assert "loss 0.45" in FinalTest({"lr": 2.0}, "val_loss", FINAL.scores).sentence()


def test_a_second_look_at_the_test_set_is_not_called_the_only_one() -> None:
    told = replace(FINAL, look=2).sentence()
    assert "seen once" not in told and "looked at 2 times" in told
