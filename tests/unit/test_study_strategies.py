"""Which options of strategies go together."""

from __future__ import annotations

import pytest

from raypar.study.options import (
    OPTIONS,
    STRATEGIES,
    num_shares,
    pipeline_size,
    resolve,
    tensor_size,
)
from raypar.study.space import Value
from raypar.study.validation import validate
from raypar.study.workload import Workload

WORKLOAD = Workload(name="own", model=lambda _: None, data=lambda _: None)  # type: ignore[arg-type,return-value]


def told(swept: tuple[str, ...] = (), **chosen: Value) -> list[str]:
    mistakes = validate(resolve(WORKLOAD, {"num_workers": 4, **chosen}), WORKLOAD, swept=swept)
    assert all(m.hint for m in mistakes)
    return [f"{m.field}: {m.problem}" for m in mistakes]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_fine_with_its_defaults(strategy: str) -> None:
    assert told(strategy=strategy) == []


@pytest.mark.parametrize("key", [key for key, option in OPTIONS.items() if option.strategies])
def test_an_option_of_another_strategy_has_no_effect_and_is_refused(key: str) -> None:
    others = {"bucket_mb": 1.0, "overlap": False, "compression": "fp16", "static_graph": True, "fsdp_reshard": False}
    other_values = {"pipeline_schedule": "gpipe", "pipeline_split": "measured", "zero_stage": 1, **others}
    value = other_values.get(key, 3)
    assert value != OPTIONS[key].default
    strategy = next(name for name in STRATEGIES if name not in OPTIONS[key].strategies)
    (mistake,) = told(strategy=strategy, **{key: value})
    assert mistake == f'{key}: has no effect with strategy="{strategy}"'


def test_where_the_strategy_is_swept_an_option_may_be_meant_for_one_of_them() -> None:
    assert told(("strategy",), strategy="ddp", sync_every=4) == []
    assert told(("strategy", "sync_every"), strategy="ddp", sync_every=4) != []


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"strategy": "hybrid", "tensor_size": 3}, "num_workers: is no multiple of tensor_size x pipeline_size = 3"),
        ({"strategy": "pipeline", "num_microbatches": 2}, "num_microbatches: is fewer than the 4 stages"),
        ({"strategy": "pipeline", "num_microbatches": 5}, "batch_size: can't be cut into num_microbatches=5"),
        (
            {"strategy": "pipeline", "pipeline_schedule": "interleaved", "num_microbatches": 9, "batch_size": 72},
            "num_microbatches: can't be dealt out in rounds of 4",
        ),
        ({"strategy": "pipeline", "accumulation_steps": 2}, "accumulation_steps: is what a pipeline does anyway"),
        (
            {"strategy": "hybrid", "pipeline_size": 2, "batch_size": 12},
            "batch_size: can't be cut into num_microbatches=4 of equal size on 2 replicas",
        ),
        ({"strategy": "fsdp", "precision": "fp16"}, "precision: scales its loss by rank"),
        ({"strategy": "tensor", "compile": True}, "compile: is not for strategy=tensor"),
        ({"strategy": "fsdp", "optimizer": "lars"}, "optimizer: needs whole layers' norms"),
        ({"static_graph": True, "accumulation_steps": 2}, "static_graph: does not go with accumulation_steps"),
    ],
)
def test_what_cannot_go_together_is_told(chosen: dict[str, Value], expected: str) -> None:
    (mistake,) = told(**chosen)
    assert mistake.startswith(expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_worker_needs_no_strategy_so_that_a_sweep_of_workers_has_its_baseline(strategy: str) -> None:
    assert told(strategy=strategy, num_workers=1, num_microbatches=7, swept=("strategy",)) == []


@pytest.mark.parametrize(
    ("chosen", "sizes"),
    [
        ({}, (4, 1, 1)),
        ({"strategy": "local_sgd"}, (4, 1, 1)),
        ({"strategy": "tensor"}, (1, 1, 4)),
        ({"strategy": "pipeline"}, (1, 4, 1)),
        ({"strategy": "hybrid", "tensor_size": 2}, (2, 1, 2)),
        ({"strategy": "hybrid", "tensor_size": 2, "pipeline_size": 2}, (1, 2, 2)),
    ],
)
def test_workers_are_replicas_times_stages_times_splits(chosen: dict[str, Value], sizes: tuple[int, int, int]) -> None:
    config = resolve(WORKLOAD, {"num_workers": 4, **chosen})
    assert (num_shares(config), pipeline_size(config), tensor_size(config)) == sizes


def test_a_batch_smaller_than_the_workers_is_fine_where_they_all_take_it_whole() -> None:
    assert told(strategy="tensor", batch_size=2) == []
    assert told(strategy="ddp", batch_size=2) != []


@pytest.mark.parametrize("value", ["random", (), ("a", 1), 3])
def test_a_pipeline_is_cut_by_work_by_time_or_before_named_layers(value: Value) -> None:
    assert OPTIONS["pipeline_split"].check(value) is not None
    assert OPTIONS["pipeline_split"].check(("2", "4")) is None
