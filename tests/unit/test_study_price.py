"""Prices of a node-hour: one for all nodes, or one for each kind of node, so that kinds are compared by cost."""

import json
import math
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from results import make_result
from rich.console import Console
from scipy import stats

from raypar import Study, StudyError, grid
from raypar.analysis.analyse import analyse
from raypar.analysis.question import Question, question_from_dict, question_of, question_to_dict
from raypar.analysis.recommend import Constraints, recommend
from raypar.reporting.console import print_report
from raypar.reporting.documents import to_json
from raypar.reporting.points import estimates_of
from raypar.reporting.recommend import RecommendView, print_recommendation
from raypar.reporting.view import StudyView
from raypar.study.overrides import with_flags
from raypar.study.price import price_of, price_text
from raypar.workloads import digits

L4, A100 = "ray.io/accelerator-type=L4", "ray.io/accelerator-type=A100"
PRICES = {L4: 0.8, A100: 4.1}
KINDS = Question("kinds", {"node_label": L4}, ("node_label",), price_per_node_hour=PRICES)
# Seconds by kind and repeat, on two nodes each.
TIMES = {L4: (900.0, 927.0, 873.0), A100: (360.0, 365.4, 356.4)}
NODES = {"node": ["a", "b"]}


def printed(show, *args):
    console = Console(file=StringIO(), width=200)
    show(console, *args)
    return " ".join(console.file.getvalue().split())


def trials(times=TIMES, **point):
    return [
        make_result({"node_label": label, **point}, r, time_s, environment=NODES)
        for label, of_kind in times.items()
        for r, time_s in enumerate(of_kind)
    ]


def by_label(points):
    return {p.point["node_label"]: p for p in points}


def test_a_point_costs_its_time_on_its_nodes_at_the_price_of_their_kind():
    points = by_label(analyse(KINDS, trials()).points)
    for label, price in PRICES.items():
        logs = np.log(TIMES[label])
        half = stats.t.ppf(0.975, 2) * logs.std(ddof=1) / math.sqrt(3)
        expected = [math.exp(logs.mean() + d) / 3600 * 2 * price for d in (-half, half)]
        cost, time_s = points[label].cost, points[label].time_s
        assert cost.value == pytest.approx(sorted(TIMES[label])[1] / 3600 * 2 * price)
        assert [cost.low, cost.high] == pytest.approx([time_s.low / 3600 * 2 * price, time_s.high / 3600 * 2 * price])
        assert [cost.low, cost.high] == pytest.approx(expected, rel=0.05)
    assert points[L4].cost.value == pytest.approx(0.4) and points[A100].cost.value == pytest.approx(0.82)


def test_one_price_is_that_of_every_kind():
    points = by_label(analyse(replace(KINDS, price_per_node_hour=3.6), trials()).points)
    assert {label: p.cost.value for label, p in points.items()} == pytest.approx({L4: 1.8, A100: 0.72})


def test_a_kind_without_a_price_or_a_label_has_no_cost():
    assert price_of(PRICES, "ray.io/accelerator-type = L4") == 0.8  # as `node_label` reads it
    assert price_of(PRICES, None) is price_of(PRICES, "host=node1") is price_of(None, L4) is None


def test_report_recommendation_json_and_export_have_the_cost_of_each_kind():
    analysis = analyse(KINDS, trials())
    text = printed(lambda console: print_report(StudyView(analysis), console, verbose=True))
    assert "0.400 [" in text and "0.820 [" in text
    assert "× 0.8 (ray.io/accelerator-type=L4) or 4.1 (ray.io/accelerator-type=A100), the price" in text
    advice = recommend(KINDS, trials(), Constraints())
    shown = printed(print_recommendation, RecommendView(advice))
    costs = {label: p.cost for label, p in by_label(advice.candidates).items()}
    assert all(f"{c.value:.3f} [{c.low:.3f}, {c.high:.3f}]" in shown for c in costs.values())
    assert {p.point["node_label"] for p in advice.candidates if p.is_on_front} == {L4, A100}  # cheap, or fast
    assert recommend(KINDS, trials(), Constraints(limits={"cost": 0.5})).chosen.point == {"node_label": L4}
    document = json.loads(to_json(StudyView(analysis)))
    assert document["price_per_node_hour"] == PRICES
    assert {p["point"]["node_label"]: p["cost"]["value"] for p in document["points"]} == pytest.approx(
        {L4: 0.4, A100: 0.82}
    )
    # What MLflow and notebooks have.
    assert {estimates_of(analysis, p)["cost"] for p in analysis.points} == set(costs.values())


def test_of_kinds_that_take_equal_times_the_cheaper_one_is_recommended():
    times = {A100: (100.0, 101.0, 99.0), L4: (101.0, 99.5, 100.5)}
    equal = [
        make_result({"node_label": label, "num_workers": workers}, r, time_s, environment={"node": ["a"]})
        for (label, of_kind), workers in zip(times.items(), (1, 2), strict=True)
        for r, time_s in enumerate(of_kind)
    ]
    question = replace(KINDS, space_keys=("node_label", "num_workers"))
    advice = recommend(question, equal, Constraints())
    assert advice.chosen.point["node_label"] == L4
    assert f"machines of node_label={L4} num_workers=2 cost the least" in " ".join(RecommendView(advice).answer_lines)
    # Without the prices, fewer workers are cheaper.
    one_price = replace(question, price_per_node_hour=2.5)
    assert recommend(one_price, equal, Constraints()).chosen.point["node_label"] == A100


def test_a_speedup_over_another_kind_is_no_parallel_efficiency():
    times = {L4: {1: 100.0, 2: 60.0}, A100: {1: 40.0, 2: 25.0}}
    results = [
        make_result({"node_label": label, "num_workers": n}, r, time_s * (1 + r / 100), environment={"node": ["a"]})
        for label, of_kind in times.items()
        for n, time_s in of_kind.items()
        for r in range(3)
    ]
    keys = ("node_label", "num_workers")
    one_base = analyse(Question("s", {"node_label": L4, "num_workers": 1}, keys), results)
    found = {(p.point["node_label"], p.point["num_workers"]): p for p in one_base.points}
    assert found[A100, 2].speedup.value == pytest.approx(4.0) and found[A100, 2].efficiency is None
    assert found[A100, 1].efficiency is None and found[L4, 2].efficiency.value == pytest.approx(100 / 60 / 2)
    each_base = analyse(Question("s", {"num_workers": 1}, keys), results)
    found = {(p.point["node_label"], p.point["num_workers"]): p for p in each_base.points}
    assert found[A100, 2].efficiency.value == pytest.approx(40 / 25 / 2)
    assert {group.label: group.speedups[2].value for group in one_base.worker_groups} == pytest.approx(
        {f"node_label={L4}": 100 / 60, f"node_label={A100}": 1.6}
    )


def study_of(*labels, price=PRICES, **fields):
    return Study(workload=digits, name="s", space={"node_label": grid(*labels)}, price_per_node_hour=price, **fields)


def test_a_question_is_stored_with_its_prices():
    question = question_of(study_of(L4, A100))
    assert question_from_dict(json.loads(json.dumps(question_to_dict(question)))) == question
    assert question.price_per_node_hour == PRICES


@pytest.mark.parametrize(("value", "left"), [(L4, {L4: 0.8}), (f"{L4},{A100}", PRICES)])
def test_set_keeps_the_prices_of_the_kinds_that_it_leaves(value, left):
    assert with_flags(study_of(L4, A100), [f"node_label={value}"]).price_per_node_hour == left


def test_set_refuses_a_kind_without_a_price():
    with pytest.raises(StudyError, match="'host=node1': has no price"):
        with_flags(study_of(L4, A100), ["node_label=host=node1"])


def test_a_fixed_label_may_have_its_price():
    config = {"node_label": "host = node1"}
    study = Study(workload=digits, name="s", config=config, price_per_node_hour={"host=node1": 2.5})
    assert study.price_per_node_hour == {"host=node1": 2.5}


@pytest.mark.parametrize(
    ("labels", "price", "words"),
    [
        ((L4, A100), {L4: 0.8}, [f"space['node_label'] = '{A100}': has no price"]),
        ((L4,), {L4: 0.8, "ray.io/accelerator-type=L5": 1}, ["no point has this node_label", f"choose from: {L4}"]),
        ((L4,), {L4: -1}, [f"price_per_node_hour['{L4}'] = -1: must be a number greater than 0"]),
        ((L4,), {L4: True}, ["= True: must be a number"]),
        ((L4, None), {L4: 1}, ["space['node_label'] = None: any node: its price is unknown"]),
        ((L4,), {"L4": 1}, ["['L4'] = 1: its key must be a label and its value", "has no price"]),
        ((L4,), {}, ["has no price"]),
    ],
)
def test_prices_and_labels_that_do_not_match_are_refused(labels, price, words):
    with pytest.raises(StudyError) as caught:
        study_of(*labels, price=price)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_prices_by_kind_need_a_label():
    with pytest.raises(StudyError, match="needs points that name their kind") as caught:
        Study(workload=digits, name="s", price_per_node_hour=PRICES)
    assert len(caught.value.mistakes) == 1


def test_prices_as_text():
    assert (price_text(2.5), price_text(None)) == ("2.5", "0")
    assert price_text({"a=b": 0.8, "a=c": 4.0}) == "0.8 (a=b) or 4 (a=c)"
