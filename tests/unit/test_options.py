"""The hyperparameters that raypar understands: values, defaults and conflicts; see also `bad_input`."""

import math

import pytest
from ray import tune

from raypar import Study, StudyError, Workload, grid
from raypar.execution.plan import make_plan
from raypar.run.cluster import Cluster
from raypar.study.options import (
    OPTIONS,
    Auto,
    known_options,
    resolve,
)
from raypar.study.script_settings import SCRIPT_SETTINGS
from raypar.study.space import choice, examples, loguniform, plain, problem, randint, uniform
from raypar.study.strategy import STRATEGIES, num_shares, pipeline_size, tensor_size
from raypar.study.validation import validate, validate_value
from raypar.study.workload import PLACEMENT_OPTIONS, one_of
from raypar.workloads import digits


def a_workload(**changes):
    return Workload(**{"name": "w", "model": lambda c: None, "data": lambda c: None, **changes})


def mistakes_of(chosen, swept=(), **workload):
    own = a_workload(**workload)
    mistakes = validate(resolve(own, chosen), own, swept=swept)
    assert all(m.hint for m in mistakes)
    return [f"{m.field}: {m.problem}" for m in mistakes]


@pytest.mark.parametrize("key", sorted(OPTIONS))
def test_every_option_says_what_it_is_and_has_a_valid_default(key):
    assert OPTIONS[key].doc and validate_value("field", key, OPTIONS[key].default, OPTIONS[key]) is None


@pytest.mark.parametrize(
    ("key", "values"),
    [
        *(("lr", (1,)), ("weight_decay", (0,)), ("num_samples", (None,)), ("device", ("cuda",))),
        *(("nodes", ("pack", "spread", 1, 7)), ("node_label", ("type = gpu",)), ("pipeline_split", (("2", "4"),))),
    ],
)
def test_a_valid_value_is_taken(key, values):
    assert [validate_value("field", key, value, OPTIONS[key]) for value in values] == [None] * len(values)


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("num_workers", (0, -1), "at least 1"),
        ("num_workers", (1.5, "two", True), "of type int, not "),
        ("epochs", (None,), "needs a value"),
        ("lr", (0.0, -0.1, math.nan, math.inf), "greater than 0"),
        ("lr", (True,), "of type float, not bool"),
        ("weight_decay", (-1.0, math.nan), "at least 0"),
        ("optimizer", ("adamm",), "did you mean 'adam' or 'adamw'?"),
        ("precision", ("fp8",), "choose from: bf16, fp16, fp32"),
        ("drop_last", (1,), "of type bool, not int"),
        ("num_warmup_steps", (-1,), "at least 0"),
        ("cpu_affinity", (0,), "at least 1"),
        ("cpu_affinity", (True, 1.5), "must be a count"),
        ("cpu_affinity", ("every other", "1-"), "write a count"),
        ("cpu_affinity", ("3-1",), "backwards"),
        ("cpu_affinity", ("0,0",), "twice"),
        ("cpu_affinity", ((),), "empty"),
        ("cpu_affinity", ((-1,),), "from 0"),
        ("nodes", ("all", "", 0, -1, True, 1.5, (1, 2)), 'must be "pack", "spread"'),
        ("node_label", ("type", "=gpu", "type=", "a=b=c", ""), 'type=gpu"'),
        ("pipeline_split", ("random", (), ("a", 1), 3), "a tuple of layer names"),
        ("zero_stage", (4,), "must be 0, 1, 2 or 3"),
    ],
)
def test_an_invalid_value_is_reported_with_the_option(key, values, message):
    for value in values:
        mistake = validate_value(f"config[{key!r}]", key, value, OPTIONS[key])
        assert mistake is not None
        assert message in str(mistake) and repr(value) in str(mistake) and f"config[{key!r}]" in str(mistake)
        assert OPTIONS[key].doc in mistake.hint


def test_a_workload_brings_options_with_their_type_or_check_and_other_defaults():
    sizes = one_of("tiny", ("tiny", "small"))
    options = known_options(a_workload(options={"width": 3, "size": sizes}, defaults={"lr": 0.5}))
    assert options["lr"].default == 0.5
    wrong = {key: validate_value("f", key, v, options[key]) for key, v in {"lr": -1.0, "width": "x"}.items()}
    assert all(wrong.values())
    assert validate_value("f", "width", 4, options["width"]) is None
    assert validate_value("f", "size", "small", options["size"]) is None
    assert "did you mean 'small'?" in str(validate_value("f", "size", "smal", options["size"]))


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"lr": 1, "cpus_per_worker": 2}, {"lr": 1.0, "device": "cuda", "num_threads": 2, "batch_size": 96}),
        ({"device": "cpu", "num_threads": 1, "cpus_per_worker": 4}, {"device": "cpu", "num_threads": 1}),
        ({}, {"device": "cuda", "cpus_per_worker": 6, "num_threads": 6}),
        ({"device": "cpu"}, {"cpus_per_worker": 1, "num_threads": 1}),
        ({"per_worker_batch_size": 32, "num_workers": 4}, {"batch_size": 128}),
        ({"batch_size": 512}, {"lr_base_batch_size": 96}),
        ({"batch_size": 512, "lr_base_batch_size": 256}, {"lr_base_batch_size": 256}),
        ({"cpu_affinity": 2, "num_workers": 4}, {"cpus_per_worker": 2, "num_threads": 2}),
        ({"cpu_affinity": (0, 3)}, {"cpus_per_worker": 2}),
        ({"cpu_affinity": "0-3", "num_workers": 2}, {"cpus_per_worker": 2}),
        ({"cpu_affinity": "4,6", "num_workers": 2}, {"cpus_per_worker": 1}),
        ({"cpu_affinity": "spread", "cpus_per_worker": 3}, {"cpus_per_worker": 3}),
        ({"cpu_affinity": "spread"}, {"cpus_per_worker": 6}),
        ({"cpu_affinity": "off", "cpus_per_worker": 3}, {"cpus_per_worker": 3}),
    ],
)
def test_a_config_is_completed_from_the_chosen_values(chosen, expected):
    config = resolve(a_workload(options={"width": 3}, defaults={"batch_size": 96}), chosen, Auto("cuda", 6))
    assert set(config) == {*OPTIONS, "width"} and isinstance(config["lr"], float)
    assert {key: config[key] for key in expected} == expected


def test_the_workloads_own_number_of_cores_comes_before_a_gpus_share():
    config = resolve(a_workload(defaults={"cpus_per_worker": 2}), {"device": "cuda"}, Auto("cuda", 6))
    assert config["cpus_per_worker"] == 2


def test_a_train_loop_has_only_the_options_that_place_it_and_settings_of_its_script():
    known = known_options(Workload.from_train_loop(lambda config: None))
    assert set(known) == {*PLACEMENT_OPTIONS, *SCRIPT_SETTINGS}


INTERLEAVED = {"strategy": "pipeline", "pipeline_schedule": "interleaved", "num_microbatches": 9, "batch_size": 72}
KEPT = {"checkpoint_every_epochs": 1}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"batch_size": 2}, "batch_size: is smaller than num_workers=4"),
        ({"batch_size": 101}, "batch_size: is larger than the training set of 100 samples"),
        ({"num_samples": 50}, "batch_size: is larger than the training set of 50 samples"),
        ({"num_samples": 101}, "num_samples: is more than the 100 training samples"),
        ({"num_loader_workers": 2}, 'num_loader_workers: has no effect with loader="resident"'),
        ({"pin_memory": True}, 'pin_memory: has no effect with loader="resident"'),
        ({"loader": "dataloader", "prefetch_factor": 2}, "prefetch_factor: has no effect without loader processes"),
        ({"compile": True, "num_warmup_steps": 0}, "num_warmup_steps: would time the compilation"),
        ({"cpu_affinity": (0, 1, 2)}, "cpu_affinity: 3 cores can't be shared out evenly among num_workers=4"),
        ({"nodes": 5}, "nodes: is more than num_workers=4"),
        ({"device": "mps"}, "num_workers: can't share the one MPS device"),
        ({"device": "mps", "precision": "fp64", "num_workers": 1}, "precision: is unavailable on MPS"),
        ({"strategy": "gather_broadcast", "precision": "fp16"}, "precision: scales its loss by rank: gather_broadcast"),
        (
            {"strategy": "hybrid", "tensor_size": 3},
            "num_workers: must be a multiple of tensor_size x pipeline_size = 3",
        ),
        ({"strategy": "pipeline", "num_microbatches": 2}, "num_microbatches: is fewer than the 4 stages"),
        ({"strategy": "pipeline", "num_microbatches": 5}, "batch_size: can't be cut into num_microbatches=5"),
        (INTERLEAVED, "num_microbatches: can't be dealt out in rounds of 4"),
        ({"strategy": "pipeline", "accumulation_steps": 2}, "accumulation_steps: is what a pipeline does anyway"),
        (
            {"strategy": "hybrid", "pipeline_size": 2, "batch_size": 12},
            "batch_size: can't be cut into num_microbatches",
        ),
        ({"strategy": "tensor", "compile": True}, "compile: is not for strategy=tensor"),
        ({"strategy": "fsdp", "optimizer": "lars"}, "optimizer: needs the norms of whole layers"),
        ({"static_graph": True, "accumulation_steps": 2}, "static_graph: does not go with accumulation_steps"),
        ({"static_graph": True, "find_unused_parameters": True}, "find_unused_parameters: is what static_graph does"),
        ({"noise_scale": True, "compression": "powersgd"}, "noise_scale: does not go with PowerSGD"),
        ({"noise_scale": True, "num_workers": 1}, "noise_scale: compares the gradients of parts of a batch"),
        ({"noise_scale": True, "strategy": "fsdp"}, 'noise_scale: has no effect with strategy="fsdp"'),
        ({**KEPT, "strategy": "deepspeed"}, "checkpoint_every_epochs: does not go with deepspeed"),
        ({**KEPT, "compression": "powersgd"}, "checkpoint_every_epochs: does not go with PowerSGD"),
        ({**KEPT, "loader": "dataloader", "eval_every_steps": 2}, "checkpoint_every_epochs: does not go with eval_ev"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:40],
)
def test_values_that_do_not_go_together_are_one_mistake_with_a_hint(chosen, message):
    [mistake] = mistakes_of({"num_workers": 4, **chosen}, num_train_samples=100)
    assert mistake.startswith(message)


def test_the_size_of_a_training_set_may_be_unknown_or_depend_on_the_config():
    assert mistakes_of({"batch_size": 10**6}) == []
    assert "training set of 50 samples" in mistakes_of({"num_samples": 50})[0]
    sized = {"options": {"width": 100}, "num_train_samples": lambda config: config["width"]}
    assert mistakes_of({}, **sized) == []
    assert "training set of 50 samples" in mistakes_of({"width": 50}, **sized)[0]
    assert mistakes_of({}, loaders=("dataloader",)) == ["loader: is not for workload w"]  # too large for memory


# ---- strategies


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_fine_with_its_defaults_and_one_worker_needs_none(strategy):
    assert mistakes_of({"num_workers": 4, "strategy": strategy}) == []
    assert mistakes_of({"num_microbatches": 7, "strategy": strategy}, ["strategy"]) == []


@pytest.mark.parametrize("key", [key for key, option in OPTIONS.items() if option.strategies])
def test_an_option_of_another_strategy_has_no_effect_and_is_refused(key):
    others = {"bucket_mb": 1.0, "overlap": False, "compression": "fp16", "static_graph": True, "fsdp_reshard": False}
    value = {"pipeline_schedule": "gpipe", "pipeline_split": "measured", "zero_stage": 1, **others}.get(key, 3)
    assert value != OPTIONS[key].default
    strategy = next(name for name in STRATEGIES if name not in OPTIONS[key].strategies)
    mistakes = mistakes_of({"num_workers": 4, "strategy": strategy, key: value})
    assert mistakes == [f'{key}: has no effect with strategy="{strategy}"']


def test_where_the_strategy_is_swept_an_option_may_be_meant_for_one_of_them():
    chosen = {"num_workers": 4, "strategy": "ddp", "sync_every": 4}
    assert mistakes_of(chosen, ["strategy"]) == [] != mistakes_of(chosen, ["strategy", "sync_every"])


@pytest.mark.parametrize(
    ("chosen", "sizes"),
    [
        ({}, (4, 1, 1)),
        ({"strategy": "local_sgd"}, (4, 1, 1)),
        ({"strategy": "tensor", "batch_size": 2}, (1, 1, 4)),
        ({"strategy": "pipeline"}, (1, 4, 1)),
        ({"strategy": "hybrid", "tensor_size": 2}, (2, 1, 2)),
        ({"strategy": "hybrid", "tensor_size": 2, "pipeline_size": 2}, (1, 2, 2)),
    ],
)
def test_workers_are_replicas_times_stages_times_splits(chosen, sizes):
    config = resolve(a_workload(), {"num_workers": 4, **chosen})
    assert (num_shares(config), pipeline_size(config), tensor_size(config)) == sizes
    assert mistakes_of({"num_workers": 4, **chosen}) == []


# ---- domains


@pytest.mark.parametrize(
    ("domain", "values"),
    [
        *((grid(1, 2, 4), (1, 2, 4)), (choice("sgd", "adam"), ("sgd", "adam")), (uniform(0.1, 0.9), (0.1, 0.9))),
        *((loguniform(1e-4, 1e-1), (1e-4, 1e-1)), (randint(1, 9), (1, 8))),
        (grid("a" * 200 + "b" + "a" * 200, "a" * 401), ("a" * 200 + "b" + "a" * 200, "a" * 401)),
        (choice(1, 1, 2), (1, 1, 2)),  # the first is likelier
    ],
)
def test_a_domain_is_judged_by_all_of_its_values_or_by_both_ends(domain, values):
    assert problem(domain) is None and examples(domain) == values


@pytest.mark.parametrize(
    ("written", "domain"),
    [
        *((tune.uniform(0.1, 0.9), uniform(0.1, 0.9)), (tune.loguniform(1e-4, 1e-1), loguniform(1e-4, 1e-1))),
        *((tune.randint(1, 9), randint(1, 9)), (tune.choice(["sgd", "adam"]), choice("sgd", "adam"))),
        (tune.grid_search([1, 2, 4]), grid(1, 2, 4)),
    ],
)
def test_a_domain_of_ray_tune_is_the_same_one_of_raypar(written, domain):
    assert Study(workload=Workload.from_train_loop(len), space={"x": written}).space == {"x": domain}


@pytest.mark.parametrize(
    "written", [tune.quniform(0, 1, 0.1), tune.lograndint(1, 9), tune.randn(), tune.sample_from(len)]
)
def test_a_domain_that_raypar_lacks_is_left_as_it_is(written):
    assert plain(written) is written


@pytest.mark.parametrize(
    ("domains", "message"),
    [
        ((grid(), choice()), "is empty"),
        ((grid(1, 2, 1),), "duplicate values: 1"),
        ((grid("a", "b", "b", "a"),), "duplicate values: a, b"),
        ((grid(1, 2, True), grid(1, True, "1")), "count as the same: 1 and True"),
        ((grid(1, 1.0), choice(1, 1.0, 2)), "count as the same: 1 and 1.0"),
        ((grid(0.0, -0.0),), "count as the same: 0.0 and -0.0"),
        ((grid((1, 2), (1.0, 2)),), "count as the same: (1, 2) and (1.0, 2)"),
        ((grid(None, "None", 2), choice(None, "None")), "count as the same: None and 'None'"),
        ((uniform(1.0, 1.0), randint(5, 5)), "low < high"),
        ((uniform(2.0, 1.0),), "has 2.0 and 1.0"),
        ((loguniform(0.0, 1.0), loguniform(-1.0, 1.0), loguniform(1.0, 0.1)), "0 < low < high, has "),
        ((uniform("a", 1), uniform(0, math.inf), loguniform(math.nan, 1)), "needs two numbers, has "),
        ((randint(1, 2.5),), "needs two whole numbers"),
    ],
)
def test_a_domain_that_holds_nothing_or_duplicates_says_so(domains, message):
    assert all(message in (problem(domain) or "") for domain in domains)


# ---- nodes

ONE = Cluster(({"CPU": 4.0},), is_own=True)
TWO = Cluster(({"CPU": 0.0}, {"CPU": 2.0}, {"CPU": 2.0}), is_own=False, labels=({}, {"type": "a"}, {"type": "b"}))


@pytest.mark.parametrize(
    ("cluster", "nodes", "label", "expected"),
    [
        (ONE, ("pack", "spread"), None, "there is one node, and nothing to spread over"),
        (ONE, (1, 2), None, "evenly on 2 nodes; 1 of the cluster's nodes can hold one"),
        (ONE, ("pack",), "type=a", "no node has the label type=a"),
        (TWO, ("pack", "spread", 1, 2), None, 4),
        (TWO, ("pack", 1), "type=b", 2),
        (TWO, (2,), "type=b", "evenly on 2 nodes; 1 of the nodes with type=b can hold one"),
    ],
)
def test_a_plan_needs_the_nodes_that_its_trials_ask_for(cluster, nodes, label, expected):
    config = {"num_workers": 2, "node_label": label}
    study = Study(workload=digits, name="s", num_repeats=1, space={"nodes": grid(*nodes)}, config=config)
    if isinstance(expected, int):
        assert len(make_plan(study, cluster, ()).specs) == expected
    else:
        with pytest.raises(StudyError, match=expected):
            make_plan(study, cluster, ())


def test_a_mistake_of_many_points_is_reported_for_each_point_once():
    with pytest.raises(StudyError) as caught:
        Study(workload=digits, name="s", space={"num_workers": grid(1, 2), "batch_size": grid(1, 64)})
    assert [m.field for m in caught.value.mistakes] == ["num_workers=2 batch_size=1.batch_size"]
