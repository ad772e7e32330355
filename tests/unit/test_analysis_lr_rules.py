"""Rules that scale the learning rate: the advice of a report, and the comparisons behind it."""

from dataclasses import replace

from results import make_result

from raypar.analysis.analyse import Question, analyse
from raypar.study.trial import TrialState

QUESTION = Question("s", {"lr_scaling": "none"}, ("batch_size", "lr_scaling"))
SECONDS = {"train_time_s": 2.0, "throughput_samples_per_s": 500.0}


def trial(rule, repeat, accuracies, batch_size=512, **more):
    """A trial with a report of each accuracy, after 1,000 samples each."""
    point = {"batch_size": batch_size, "lr_scaling": rule}
    made = make_result(point, repeat, 2.0 * len(accuracies), num_samples=1000 * len(accuracies), **more)
    return replace(made, reports=tuple({**SECONDS, "accuracy": value} for value in accuracies))


def rising(num_epochs, top=0.95, total=20):
    """Accuracies that reach their top after a number of epochs."""
    return [min(top, 0.3 + (top - 0.3) * (i + 1) / num_epochs) for i in range(total)]


def answers(*results):
    return analyse(QUESTION, list(results)).answers


def test_the_rule_with_the_fewest_samples_is_recommended_with_its_interval():
    every = [
        trial(rule, r, rising(num + r % 2))
        for rule, num in {"none": 16, "sqrt": 8, "linear": 4}.items()
        for r in range(8)
    ]
    advice, why = answers(*every)
    assert advice == "Use lr_scaling=linear: no other rule beats it."
    assert why.startswith("At batch_size=512, lr_scaling=linear needs the fewest samples to accuracy 94.5 %: ")
    assert "none needs 3.69× [" in why and "sqrt needs 1.90× [" in why and "inconclusive" not in why


def test_each_batch_has_its_own_rule_and_a_rule_that_fails_is_named():
    every = [
        *(trial(rule, r, rising(num), 128) for rule, num in (("sqrt", 9), ("linear", 3)) for r in range(6)),
        *(trial("sqrt", r, rising(9)) for r in range(6)),
        *(trial("linear", r, rising(2, top=0.5 + r / 100)) for r in range(6)),
        *(replace(trial("none", r, rising(9)), state=TrialState.DIVERGED) for r in range(6)),
    ]
    advice, small, large = answers(*every)
    assert advice == "Use lr_scaling=linear at batch_size=128; sqrt at batch_size=512."
    assert "sqrt needs 3.00×" in small and "inconclusive" not in small
    assert "to accuracy 94.5 %: linear misses it in 6 of 6 trials and ends -42.5 points [" in large
    assert large.endswith("; none diverges.")


def test_rules_that_differ_by_chance_are_inconclusive():
    every = [
        trial(rule, r, rising(n))
        for rule, ns in {"sqrt": (7, 9, 8, 6), "linear": (8, 7, 6, 8)}.items()
        for r, n in enumerate(ns)
    ]
    advice, why = answers(*every)
    assert advice == "Which lr_scaling is best is inconclusive: nothing beats linear or sqrt."
    assert "(inconclusive)" in why


def test_a_target_reached_at_once_leaves_the_metric_to_decide():
    every = [trial(rule, r, [top + r / 1000]) for rule, top in {"sqrt": 0.7, "linear": 0.9}.items() for r in range(8)]
    advice, why = answers(*every)
    assert advice == "Use lr_scaling=linear: no other rule beats it."
    assert why.startswith("At batch_size=512, lr_scaling=linear has the best accuracy: sqrt ends -20.0")


def test_rules_that_coincide_and_other_studies_give_no_advice():
    assert answers(*(trial(rule, r, rising(5)) for rule in ("sqrt", "linear") for r in range(3))) == ()
    assert answers(*(trial("sqrt", r, rising(5), size) for size in (64, 128) for r in range(3))) == ()


def test_a_rule_that_misses_the_target_by_chance_is_not_beaten():
    tops = {"sqrt": (0.95, 0.95, 0.95, 0.93), "linear": (0.951, 0.95, 0.95, 0.95)}
    every = [trial(rule, r, rising(5, top)) for rule, of in tops.items() for r, top in enumerate(of)]
    advice, why = answers(*every)
    assert advice == "Which lr_scaling is best is inconclusive: nothing beats linear or sqrt."
    assert "sqrt misses it in 1 of 4 trials" in why and why.endswith("(inconclusive).")
