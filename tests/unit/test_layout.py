"""Layouts: every listed one can be planned, every other one is refused, and times follow from the formulas."""

import itertools
import math
from dataclasses import replace

import pytest
from command import refused

from raypar.analysis.comparison import Comparison
from raypar.analysis.stats import Estimate, Method
from raypar.cli.layout import _with_memory
from raypar.errors import RayparError
from raypar.parallel.strategy import check_compatible
from raypar.predict.layout import (
    BASELINE,
    Message,
    RankStep,
    StepLayout,
    leading,
    legal_layouts,
    message_s,
    ranked,
    step_s,
)
from raypar.predict.network import Network
from raypar.predict.rank_steps import rank_steps
from raypar.reporting.layout import LayoutView, RankedLayout
from raypar.run.cluster import Cluster
from raypar.study.memory_fit import MemoryFit
from raypar.study.options import OPTIONS, resolve
from raypar.study.validation import validate
from raypar.workloads import transformer, wide_mlp

MACHINE = Cluster(({"CPU": 4.0},), is_own=True, cores=None)
SPLIT_TWICE = {"strategy": "hybrid", "tensor_size": 2, "pipeline_size": 2, "num_microbatches": 2}
SMALL = {"width": 16, "num_features": 8, "num_points": 64, "batch_size": 16, "depth": 3}


def layouts(workload=wide_mlp, num_workers=4, **fixed):
    return legal_layouts(workload, {"num_workers": num_workers, **fixed}, {}, MACHINE, check_compatible)


def test_every_listed_layout_is_accepted_and_every_other_combination_is_refused():
    fixed = {**SMALL, "num_workers": 4, "depth": 2}  # three layers and their activations: too few for some pipelines
    listed = {frozenset(each.shown.items()) for each in layouts(**fixed)}
    found = set()
    sizes = [
        {},
        {"strategy": "fsdp"},
        {"strategy": "fsdp", "shard_size": 2},
        {"strategy": "tensor"},
        *({"strategy": "pipeline", "num_microbatches": m} for m in (4, 8, 16)),
        {"strategy": "hybrid", "tensor_size": 2},
        *({"strategy": "hybrid", "pipeline_size": 2, "num_microbatches": m} for m in (2, 4, 8)),
        *({"strategy": "hybrid", "pipeline_size": 2, "tensor_size": 2, "num_microbatches": m} for m in (2, 4, 8)),
    ]
    for way, schedule, parts, again in itertools.product(sizes, ("1f1b", "interleaved"), (1, 4), (False, True)):
        chosen = {**way, "pipeline_schedule": schedule, "accumulation_steps": parts, "activation_checkpointing": again}
        settings = {key: chosen.get(key, OPTIONS[key].default) for key in (*KEYS,)}
        config = resolve(wide_mlp, {**fixed, **settings})
        if not validate(config, wide_mlp, MACHINE, swept=KEYS, must_fit=False, check_strategy=check_compatible):
            found.add(frozenset(StepLayout(settings, config).shown.items()))
    assert listed == found
    assert frozenset({"strategy": "fsdp", "shard_size": 2}.items()) in listed


KEYS = (
    *("strategy", "accumulation_steps", "activation_checkpointing", "shard_size", "tensor_size", "pipeline_size"),
    *("pipeline_schedule", "num_microbatches"),
)


def test_a_model_that_can_not_be_split_has_only_data_parallel_layouts():
    heads = layouts(transformer, num_heads=3, width=48, num_workers=2)  # 3 heads can't be split by 2
    assert {each.settings["strategy"] for each in heads} == {"ddp", "fsdp", "pipeline"}


def test_missing_data_are_named_instead_of_a_lack_of_layouts():
    def prepare(config):
        raise RayparError("train.csv: no such file")

    with pytest.raises(RayparError, match=r"train\.csv: no such file"):
        layouts(replace(wide_mlp, prepare=prepare), **SMALL)


def test_messages_cost_what_rings_do():
    network = Network(1e-3, 1e6)
    assert message_s(Message("all_gather", 4_000_000, 4), network, on_gpu=True) == pytest.approx(3 * 1e-3 + 3.0)
    assert message_s(Message("all_reduce", 4_000_000, 4), network, on_gpu=True) >= 6.0
    on_cpu, on_gpu = (message_s(Message("reduce_scatter", 4_000_000, 4), network, on_gpu=on) for on in (False, True))
    assert on_cpu > 1.9 * on_gpu
    assert message_s(Message("recv", 1_000_000, 4), network, on_gpu=False) == pytest.approx(1.001)
    assert message_s(Message("all_reduce", 1_000_000, 1), network, on_gpu=True) == 0


def test_a_pipeline_has_bubbles_that_other_ranks_fill_on_shared_cores():
    network = Network(0.0, math.inf)
    config = resolve(wide_mlp, {"num_workers": 4, "strategy": "pipeline", "num_microbatches": 8})
    steps = [RankStep(t) for t in (1.0, 2.0, 1.0, 1.0)]
    assert step_s(config, steps, network, math.inf, on_gpu=False) == pytest.approx(2 + 3 / 8)
    assert step_s(config, steps, network, 1, on_gpu=False) == pytest.approx(5)
    interleaved = {**config, "pipeline_schedule": "interleaved", "stages_per_worker": 2}
    assert step_s(interleaved, steps, network, 4, on_gpu=False) == pytest.approx(2 + 3 / 16)
    assert step_s({**config, "strategy": "ddp"}, steps[:1], network, 2, on_gpu=False) == pytest.approx(2)


def test_the_leading_ones_are_the_baseline_and_the_best_of_each_family():
    def made(seconds, fit=MemoryFit.YES, **settings):
        settings = {"strategy": "ddp", "accumulation_steps": 1, "activation_checkpointing": False, **settings}
        return StepLayout(settings, {}, fit=fit, predicted_s=seconds)

    slow, fast = made(3.0), made(1.0, strategy="fsdp")
    second, tensor = made(1.1, strategy="fsdp", accumulation_steps=4), made(5.0, strategy="tensor")
    too_large, unknown = made(0.1, MemoryFit.NO, strategy="pipeline"), made(None, strategy="hybrid")
    order = ranked([too_large, unknown, tensor, slow, second, fast])
    assert order == [fast, second, slow, tensor, unknown]
    assert leading(order, 3) == [slow, fast, tensor]
    assert leading(order, 9) == [slow, fast, tensor, unknown, second]


@pytest.mark.parametrize(
    ("settings", "kind", "num_bytes"),
    [
        ({"strategy": "ddp"}, "all_reduce", 4),
        ({"strategy": "fsdp"}, "reduce_scatter", 4),
        ({"strategy": "hybrid", "pipeline_size": 2, "num_microbatches": 2}, "recv", None),
    ],
)
def test_a_rank_alone_has_the_messages_of_its_gang(settings, kind, num_bytes):
    config = resolve(wide_mlp, {**SMALL, "num_workers": 2, "device": "cpu", **settings})
    steps = rank_steps(wide_mlp, config, 0, wide_mlp.data(config))
    assert len(steps) == (2 if kind == "recv" else 1) and all(step.compute_s > 0 for step in steps)
    num = sum(p.numel() for p in wide_mlp.model(config).parameters())
    sent = [m for step in steps for m in step.messages if m.kind == kind]
    assert sent
    if num_bytes:
        assert sum(m.num_bytes for m in sent) == pytest.approx(num_bytes * num, rel=0.02)
    else:  # an activation forward and its gradient backward, for each micro-batch
        assert [m.num_bytes for m in sent] == [4 * SMALL["batch_size"] // 2 * SMALL["width"]] * 4


def test_each_stage_of_split_layers_sends_to_the_ranks_of_its_own_group():
    config = resolve(wide_mlp, {**SMALL, "num_workers": 4, "device": "cpu", **SPLIT_TWICE})
    steps = rank_steps(wide_mlp, config, 0, wide_mlp.data(config))
    assert len(steps) == 2
    for step in steps:
        assert {m.num_ranks for m in step.messages if m.kind == "all_reduce"} == {2}


def test_a_memory_without_a_prediction_is_named_and_not_judged():
    config = resolve(wide_mlp, {**SMALL, "num_workers": 2, "device": "cpu"})
    layouts = [
        StepLayout({"strategy": "ddp"}, config),
        StepLayout({"strategy": "fsdp"}, {**config, "strategy": "fsdp"}),
    ]

    def model(config):
        if config["strategy"] == "fsdp":
            raise ValueError("no such width")
        return wide_mlp.model(config)

    predicted, notes = _with_memory(replace(wide_mlp, model=model), layouts, 0, 80e9)
    assert [each.fit for each in predicted] == [MemoryFit.YES, None]
    assert notes == ["The memory of 1 layout is unknown: ValueError: no such width."]


@pytest.mark.parametrize(
    ("layouts", "answer", "chosen"),
    [
        (
            [("fsdp", 0.01, 2.0, 1.8, 2.2), ("ddp", 0.02)],
            "Use strategy=fsdp: 10.0 ms a step, 2.00× [1.80, 2.20] as fast as ddp.",
            "fsdp",
        ),
        (
            [("fsdp", 0.019, 1.05, 0.9, 1.2), ("ddp", 0.02)],
            "No layout is shown to be faster than strategy=ddp, 20.0 ms a step. The fastest, strategy=fsdp, takes "
            "19.0 ms, 1.05× [0.90, 1.20] as fast as ddp (inconclusive).",
            "ddp",
        ),
        ([("ddp", 0.02), ("fsdp", 0.03, 0.7, 0.6, 0.8)], "Use strategy=ddp: 20.0 ms a step.", "ddp"),
        ([("fsdp", 0.03)], "Use strategy=fsdp: 30.0 ms a step.", "fsdp"),
        ([("fsdp", None)], "Try strategy=fsdp: predicted 1.00 s a step. Nothing has run.", "fsdp"),
    ],
)
def test_a_layout_is_advised_if_it_is_shown_to_be_faster_than_plain_data_parallelism(layouts, answer, chosen):
    def ranked_layout(strategy, step_s, speedup=None, low=None, high=None):
        config = resolve(wide_mlp, {"strategy": strategy, "num_workers": 2})
        layout = StepLayout({**BASELINE, "strategy": strategy}, config, predicted_s=1.0)
        compared = None if speedup is None else Comparison(Estimate(speedup, low, high, 3, 0.95, Method.PUBLISHED))
        return RankedLayout(layout, step_s, compared, 3)

    view = LayoutView("study", 2, [ranked_layout(*each) for each in layouts])
    assert view.answer == answer
    assert view.chosen.settings["strategy"] == chosen


def test_bad_numbers_are_refused():
    refused("--workers 1: must be at least 2", "model", "layout", "x.py", "--workers", "1")
