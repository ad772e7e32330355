"""What ranks counted, taken together: every machine's counters once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from results import make_spec

from raypar.run.ranks import RankEnd, trial_result
from raypar.study.trial import TrialResult
from raypar.train.job import RankOutcome
from raypar.train.telemetry import RankCounters, energy, other_loads

RANK = RankCounters("a", 8, elapsed_s=2.0, busy_s=6.0, own_s=2.0)


def merged(*counters: RankCounters | None) -> TrialResult:
    ends = {rank: RankEnd(RankOutcome(train_time_s=2.0, counters=c)) for rank, c in enumerate(counters)}
    spec = make_spec({"num_workers": len(counters)})
    return trial_result(spec, ends, environment={"node": ["n"]})


def test_the_work_of_all_ranks_on_a_machine_is_the_trials_own() -> None:
    ranks = [RANK, replace(RANK, machine="b", busy_s=3.0), replace(RANK, own_s=3.0)]
    assert other_loads(ranks) == pytest.approx([0.5, 0.5, 0.5])


def test_each_machine_has_a_load_of_its_own_and_the_worst_is_the_trials() -> None:
    result = merged(RANK, replace(RANK, machine="b", busy_s=5.0), replace(RANK, own_s=3.0, num_cores=8))
    assert result.environment["other_load_cores"] == pytest.approx([0.5, 1.5, 0.5])
    assert result.environment["num_node_cores"] == [8, 8, 8]
    assert result.other_load_cores == pytest.approx(1.5)


def test_a_load_that_no_machine_can_tell_is_not_told() -> None:
    result = merged(replace(RANK, elapsed_s=0.01))
    assert result.other_load_cores is None
    assert "other_load_cores" not in result.environment


def test_packages_count_once_a_machine_and_machines_add_up() -> None:
    ranks = [replace(RANK, package_j=100.0), replace(RANK, package_j=101.0), replace(RANK, machine="b", package_j=7.0)]
    assert energy(ranks) == (107.0, "CPU packages")


def test_packages_that_one_machine_hides_leave_the_trial_without_an_energy() -> None:
    result = merged(replace(RANK, package_j=100.0), replace(RANK, machine="b", no_energy=("may not be read",)))
    assert result.energy_j is None
    assert result.environment["no_energy"] == "may not be read"
    assert "energy_of" not in result.environment


def test_gpus_count_once_each_with_the_packages_that_all_machines_tell() -> None:
    gpu = replace(RANK, gpu="G", gpu_j=50.0)
    shared = replace(gpu, gpu_j=51.0)  # two ranks on one
    other = replace(gpu, machine="b", gpu_j=70.0)
    assert energy([gpu, shared, replace(gpu, gpu="H", gpu_j=60.0), other]) == (180.0, "GPUs")
    packages = [replace(rank, package_j=10.0) for rank in (gpu, shared, other)]
    assert energy(packages) == (140.0, "CPU packages and GPUs")
    assert energy([*packages[:2], other]) == (120.0, "GPUs")


def test_a_gpu_without_a_counter_leaves_the_trial_without_an_energy() -> None:
    ranks = [replace(RANK, gpu=uuid, gpu_j=joules, package_j=9.0) for uuid, joules in (("G", 50.0), ("H", None))]
    assert energy(ranks) is None


def test_a_rank_that_counted_nothing_leaves_the_trial_without_any_of_it() -> None:
    result = merged(replace(RANK, package_j=100.0), None)
    assert (result.energy_j, result.other_load_cores) == (None, None)
    assert result.environment == {"node": ["n"]}


def test_energy_survives_the_way_to_the_store_and_back() -> None:
    result = merged(replace(RANK, package_j=100.0))
    assert (result.energy_j, result.environment["energy_of"]) == (100.0, "CPU packages")
    assert TrialResult.from_json(result.to_json()).energy_j == 100.0


def test_results_of_before_energy_was_measured_are_read() -> None:
    text = merged(RANK).to_json().replace('"energy_j":null,', "")
    assert "energy_j" not in text
    assert TrialResult.from_json(text).energy_j is None
