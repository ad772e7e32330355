"""The hyperparameters that raypar understands."""

from __future__ import annotations

import pytest

from raypar import Workload
from raypar.study.options import OPTIONS, check_together, check_value, known_options
from raypar.study.space import Value
from raypar.study.study import resolve


def a_workload(**changes: object) -> Workload:
    return Workload(**{"name": "w", "model": lambda c: None, "data": lambda c: None, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("key", sorted(OPTIONS))
def test_every_default_is_a_valid_value_of_its_option(key: str) -> None:
    assert check_value("field", key, OPTIONS[key].default, OPTIONS[key]) is None


@pytest.mark.parametrize("key", sorted(OPTIONS))
def test_every_option_says_what_it_is(key: str) -> None:
    assert OPTIONS[key].doc


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", 1), ("weight_decay", 0), ("num_samples", None), ("num_threads", None), ("device", "cuda"), ("epochs", 1)],
)
def test_a_valid_value_is_taken(key: str, value: Value) -> None:
    assert check_value("field", key, value, OPTIONS[key]) is None


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("num_workers", 0, "at least 1"),
        ("num_workers", 1.5, "of type int, not float"),
        ("num_workers", "two", "of type int, not str"),
        ("num_workers", True, "of type int, not bool"),
        ("epochs", None, "needs a value"),
        ("lr", 0.0, "greater than 0"),
        ("lr", -0.1, "greater than 0"),
        ("lr", float("nan"), "greater than 0"),
        ("lr", float("inf"), "greater than 0"),
        ("lr", True, "of type float, not bool"),
        ("weight_decay", float("nan"), "at least 0"),
        ("optimizer", "adamm", "did you mean `adam`?"),
        ("device", "tpu", "did you mean `cpu`?"),
        ("precision", "fp8", "known: bf16, fp16, fp32"),
        ("drop_last", 1, "of type bool, not int"),
        ("num_warmup_steps", -1, "at least 0"),
    ],
)
def test_an_invalid_value_is_told_with_field_value_and_what_the_option_is(key: str, value: Value, told: str) -> None:
    mistake = check_value(f"config[{key!r}]", key, value, OPTIONS[key])
    assert mistake is not None
    assert told in str(mistake) and repr(value) in str(mistake) and f"config[{key!r}]" in str(mistake)
    assert OPTIONS[key].doc in (mistake.hint or "")


def test_a_workloads_default_replaces_raypars_and_keeps_the_check() -> None:
    known = known_options(a_workload(defaults={"lr": 0.5}))
    assert known["lr"].default == 0.5
    assert check_value("f", "lr", -1.0, known["lr"]) is not None


def test_a_workloads_own_option_takes_the_type_of_its_default() -> None:
    known = known_options(a_workload(options={"width": 3}))
    assert check_value("f", "width", "wide", known["width"]) is not None
    assert check_value("f", "width", 4, known["width"]) is None


def test_a_train_loop_knows_only_what_raypar_needs_to_place_it() -> None:
    loop = Workload.from_train_loop(lambda config: None)
    assert set(known_options(loop)) == {"num_workers", "device", "cpus_per_worker", "num_threads"}


def test_a_config_is_complete_and_whole_numbers_of_float_options_become_floats() -> None:
    config = resolve(a_workload(options={"width": 3}), {"lr": 1, "cpus_per_worker": 2}, "cuda")
    assert set(config) == {*OPTIONS, "width"}
    assert isinstance(config["lr"], float) and config["lr"] == 1.0
    assert config["device"] == "cuda" and config["num_threads"] == 2 and config["width"] == 3


def test_an_explicit_device_and_thread_count_stay() -> None:
    config = resolve(a_workload(), {"device": "cpu", "num_threads": 1, "cpus_per_worker": 4}, "cuda")
    assert config["device"] == "cpu" and config["num_threads"] == 1


def test_the_global_batch_is_the_workers_batches_together() -> None:
    assert resolve(a_workload(), {"per_worker_batch_size": 32, "num_workers": 4})["batch_size"] == 128


@pytest.mark.parametrize(
    ("chosen", "size", "told"),
    [
        ({"batch_size": 2, "num_workers": 4}, 100, "smaller than num_workers=4"),
        ({"batch_size": 101}, 100, "larger than the training set of 100 samples"),
        ({"batch_size": 64, "num_samples": 50}, 100, "larger than the training set of 50 samples"),
        ({"batch_size": 64, "num_samples": 50}, None, "larger than the training set of 50 samples"),
        ({"num_samples": 101}, 100, "more than the 100 training samples"),
        ({"num_loader_workers": 2}, 100, 'no effect with loader="resident"'),
    ],
)
def test_values_that_do_not_go_together_are_told_with_a_way_out(
    chosen: dict[str, Value], size: int | None, told: str
) -> None:
    [mistake] = check_together("point", resolve(a_workload(), chosen), size)
    assert told in mistake.problem and mistake.hint


def test_an_unknown_training_set_size_is_no_mistake() -> None:
    assert check_together("point", resolve(a_workload(), {"batch_size": 10**6}), None) == []
