"""The hyperparameters that raypar understands."""

from __future__ import annotations

import pytest

from raypar import Workload
from raypar.study.options import OPTIONS, known_options, resolve
from raypar.study.space import Value
from raypar.study.validation import validate, validate_value
from raypar.study.workload import one_of


def a_workload(**changes: object) -> Workload:
    return Workload(**{"name": "w", "model": lambda c: None, "data": lambda c: None, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("key", sorted(OPTIONS))
def test_every_default_is_a_valid_value_of_its_option(key: str) -> None:
    assert validate_value("field", key, OPTIONS[key].default, OPTIONS[key]) is None


@pytest.mark.parametrize("key", sorted(OPTIONS))
def test_every_option_says_what_it_is(key: str) -> None:
    assert OPTIONS[key].doc


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", 1), ("weight_decay", 0), ("num_samples", None), ("num_threads", None), ("device", "cuda"), ("epochs", 1)],
)
def test_a_valid_value_is_taken(key: str, value: Value) -> None:
    assert validate_value("field", key, value, OPTIONS[key]) is None


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
        ("optimizer", "adamm", "did you mean 'adam'?"),
        ("device", "tpu", "did you mean 'cpu'?"),
        ("precision", "fp8", "choose from: bf16, fp16, fp32"),
        ("drop_last", 1, "of type bool, not int"),
        ("num_warmup_steps", -1, "at least 0"),
    ],
)
def test_an_invalid_value_is_told_with_field_value_and_what_the_option_is(key: str, value: Value, told: str) -> None:
    mistake = validate_value(f"config[{key!r}]", key, value, OPTIONS[key])
    assert mistake is not None
    assert told in str(mistake) and repr(value) in str(mistake) and f"config[{key!r}]" in str(mistake)
    assert OPTIONS[key].doc in (mistake.hint or "")


def test_a_workloads_default_replaces_raypars_and_keeps_the_check() -> None:
    known = known_options(a_workload(defaults={"lr": 0.5}))
    assert known["lr"].default == 0.5
    assert validate_value("f", "lr", -1.0, known["lr"]) is not None


def test_a_workloads_own_option_takes_the_type_of_its_default() -> None:
    known = known_options(a_workload(options={"width": 3}))
    assert validate_value("f", "width", "wide", known["width"]) is not None
    assert validate_value("f", "width", 4, known["width"]) is None


def test_a_train_loop_knows_only_what_raypar_needs_to_place_it() -> None:
    loop = Workload.from_train_loop(lambda config: None)
    where = {"num_workers", "device", "cpus_per_worker", "cpu_affinity", "num_threads", "nodes", "node_label"}
    assert set(known_options(loop)) == where


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
        ({"pin_memory": True}, 100, 'no effect with loader="resident"'),
        ({"loader": "dataloader", "prefetch_factor": 2}, 100, "has no effect without loader processes"),
        ({"compile": True, "num_warmup_steps": 0}, 100, "time the compilation"),
        ({"cpu_affinity": (0, 1, 2), "num_workers": 2}, 100, "3 cores can't be shared out evenly among num_workers=2"),
        ({"device": "mps", "num_workers": 2}, 100, "the one MPS device"),
        ({"device": "mps", "precision": "fp64"}, 100, "unavailable on MPS"),
        ({"strategy": "gather_broadcast", "precision": "fp16", "num_workers": 2}, 100, "mix the scales"),
    ],
)
def test_values_that_do_not_go_together_are_told_with_a_way_out(
    chosen: dict[str, Value], size: int | None, told: str
) -> None:
    [mistake] = validate(resolve(a_workload(), chosen), a_workload(num_train_samples=size))
    assert told in mistake.problem and mistake.hint


def test_an_unknown_training_set_size_is_no_mistake() -> None:
    assert validate(resolve(a_workload(), {"batch_size": 10**6}), a_workload()) == []


def test_a_set_too_large_for_memory_has_no_resident_loader() -> None:
    [mistake] = validate(resolve(a_workload(), {}), a_workload(loaders=("dataloader",)))
    assert "not for workload" in mistake.problem and "dataloader" in (mistake.hint or "")


def test_the_lr_is_meant_for_the_workloads_own_batch_unless_told_otherwise() -> None:
    own = a_workload(defaults={"batch_size": 96})
    assert resolve(own, {"batch_size": 512})["lr_base_batch_size"] == 96
    assert resolve(own, {"batch_size": 512, "lr_base_batch_size": 256})["lr_base_batch_size"] == 256


@pytest.mark.parametrize(
    ("affinity", "num_workers", "width"), [(2, 4, 2), ((0, 3), 1, 2), ("0-3", 2, 2), ("4,6", 2, 1)]
)
def test_an_affinity_of_cores_says_how_many_each_worker_has(affinity: Value, num_workers: int, width: int) -> None:
    config = resolve(a_workload(), {"cpu_affinity": affinity, "num_workers": num_workers})
    assert config["cpus_per_worker"] == width and config["num_threads"] == width


@pytest.mark.parametrize("affinity", [None, "spread", "compact"])
def test_a_layout_leaves_the_number_of_cores_to_cpus_per_worker(affinity: Value) -> None:
    assert resolve(a_workload(), {"cpu_affinity": affinity, "cpus_per_worker": 3})["cpus_per_worker"] == 3


@pytest.mark.parametrize(
    ("affinity", "told"),
    [
        (0, "at least 1"),
        (True, "must be a count"),
        (1.5, "must be a count"),
        ("every other", "write a count"),
        ("3-1", "backwards"),
        ("1-", "write a count"),
        ("0,0", "twice"),
        ((), "empty"),
        ((-1,), "from 0"),
    ],
)
def test_an_affinity_that_names_no_cores_is_told(affinity: Value, told: str) -> None:
    mistake = validate_value("config['cpu_affinity']", "cpu_affinity", affinity, OPTIONS["cpu_affinity"])
    assert mistake is not None and told in mistake.problem


def test_a_workloads_option_may_bring_its_own_check() -> None:
    known = known_options(a_workload(options={"size": one_of("tiny", ("tiny", "small"))}))
    assert validate_value("f", "size", "small", known["size"]) is None
    wrong = validate_value("f", "size", "smal", known["size"])
    assert wrong is not None and "did you mean 'small'?" in wrong.problem


def test_the_size_of_a_training_set_may_depend_on_the_config() -> None:
    own = a_workload(options={"width": 100}, num_train_samples=lambda config: config["width"])
    assert validate(resolve(own, {"batch_size": 64}), own) == []
    [mistake] = validate(resolve(own, {"width": 50, "batch_size": 64}), own)
    assert "training set of 50 samples" in mistake.problem
