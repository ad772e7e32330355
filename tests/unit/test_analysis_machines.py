"""Machines of a study's trials, by kind."""

from dataclasses import replace

from results import make_result, stored_conditions

from raypar.analysis.machines import MachineKind, machine_kinds
from raypar.reporting.sentences import machine_lines


def ran_on(repeat, nodes, cores, model, device="cpu", gpus=None):
    """Return a result with a rank on each node."""
    stored = {"node": nodes, "num_node_cores": [cores] * len(nodes), "cpu_model": [model] * len(nodes)}
    config = {"num_workers": len(nodes), "device": device}
    return replace(make_result(config, repeat, 8.0, 0.9), conditions=stored_conditions({**stored, "device_name": gpus}))


def test_machines_of_a_kind_are_named_together():
    results = [
        ran_on(0, ["b", "a"], 64, "EPYC", "cuda", ["A100", "A100"]),
        ran_on(1, ["a"], 64, "EPYC", "cuda", ["A100"]),
        ran_on(2, ["c"], 8, "Xeon", gpus=["cpu"]),
    ]
    kinds = machine_kinds(results)
    assert kinds == (MachineKind("EPYC", 64, ("A100",), ("a", "b"), 2), MachineKind("Xeon", 8, (), ("c",), 1))
    assert machine_lines(kinds) == [
        (0, "Ran on a, b (64 cores, EPYC, A100): 2 trials."),
        (0, "Ran on c (8 cores, Xeon): 1 trial."),
    ]


def test_without_conditions_there_are_no_machines():
    assert machine_kinds([make_result({"num_workers": 1}, 0, 8.0, 0.9)]) == ()


def test_a_trial_that_lost_ranks_names_no_machine():
    result = ran_on(0, ["a", "b"], 8, "Xeon")
    lost = replace(result.conditions, ranks=result.conditions.ranks[1:])
    assert machine_kinds([replace(result, conditions=lost)]) == ()
