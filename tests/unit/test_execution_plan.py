"""What an execution would do, from a study and what is done already."""

from __future__ import annotations

import pytest

from raypar import RayparError, Study, StudyError, Workload, choice, grid, uniform
from raypar.execution.plan import check_data, make_plan
from raypar.run.cluster import Cluster
from raypar.study.trial import TrialResult, TrialState
from raypar.train.affinity import Core
from raypar.workloads import digits

TWO_CORES = Cluster(({"CPU": 2},), is_own=True, cores=(Core(0, 0, 0), Core(1, 0, 1)))


def a_study(**changes: object) -> Study:
    asked: dict[str, object] = {"workload": digits, "name": "s", "space": {"num_workers": grid(1, 2)}, "num_repeats": 2}
    return Study(**{**asked, **changes})  # type: ignore[arg-type]


def done(study: Study, *orders: int, state: TrialState = TrialState.FINISHED) -> list[TrialResult]:
    return [TrialResult(study.trials()[i], state, wall_s=2.0) for i in orders]


def test_only_what_has_no_complete_result_is_missing() -> None:
    study = a_study()
    plan = make_plan(study, TWO_CORES, [*done(study, 0, 3), *done(study, 1, state=TrialState.FAILED)])
    assert [spec.order for spec in plan.missing] == [1, 2]
    assert (plan.num_trials, plan.num_missing, len(plan.done)) == (4, 2, 2)


def test_results_of_points_that_the_study_has_no_more_are_left_out() -> None:
    before, now = a_study(space={"num_workers": grid(1, 2)}), a_study(space={"num_workers": grid(2)})
    plan = make_plan(now, TWO_CORES, done(before, 0, 1, 2, 3))
    assert {result.spec.config["num_workers"] for result in plan.done} == {2}
    assert not plan.missing


def test_a_gang_that_never_fits_is_refused_with_the_numbers() -> None:
    with pytest.raises(StudyError) as told:
        make_plan(a_study(space={"num_workers": grid(1, 4)}), TWO_CORES, ())
    assert "needs 4 CPUs in one gang, the cluster has 2" in str(told.value)


def test_a_gang_that_does_not_fit_yet_is_planned_where_nodes_may_be_added() -> None:
    growing = Cluster(({"CPU": 2},), is_own=False, may_grow=True)
    assert make_plan(a_study(space={"num_workers": grid(1, 4)}), growing, ()).num_missing == 4


def test_a_gpu_is_refused_where_there_is_none_and_auto_takes_what_there_is() -> None:
    with pytest.raises(StudyError, match="GPU"):
        make_plan(a_study(config={"device": "cuda"}), TWO_CORES, ())
    with_gpu = Cluster(({"CPU": 2, "GPU": 2},), is_own=True)
    assert {spec.placement.device for spec in make_plan(a_study(), with_gpu, ()).specs} == {"cuda"}
    assert {spec.placement.device for spec in make_plan(a_study(), TWO_CORES, ()).specs} == {"cpu"}


def refused(cluster: Cluster = TWO_CORES, **config: object) -> str:
    with pytest.raises(StudyError) as told:
        make_plan(a_study(space={}, config=config), cluster, ())
    assert len(told.value.mistakes) == 1
    return str(told.value)


def test_a_gpu_that_is_not_there_is_told_with_the_way_out() -> None:
    told = refused(device="cuda")
    assert "needs 1 GPU in one gang, the cluster has 0" in told and "--set device=cpu" in told


def test_more_cores_than_there_are_is_one_mistake_whichever_way_they_are_asked_for() -> None:
    assert "needs 64 CPUs in one gang, the cluster has 2" in refused(cpu_affinity=64)
    told = refused(cpu_affinity="0-63")
    assert "there is no core 2-63: the machine's are 0-1" in told and "list cores of 0-1" in told


def test_listed_cores_are_planned_where_the_machines_are_not_known_yet() -> None:
    elsewhere = Cluster(({"CPU": 2},), is_own=False)
    assert make_plan(a_study(config={"cpu_affinity": "6-7"}), elsewhere, ()).num_missing == 4


@pytest.mark.parametrize("affinity", ["0", (1,), "spread", "compact"])
def test_an_affinity_is_refused_where_nothing_can_be_bound_to_cores(affinity: object) -> None:
    unbound = Cluster(({"CPU": 2},), is_own=True, cores=())
    assert "can't bind processes to cores" in refused(unbound, cpu_affinity=affinity)
    assert make_plan(a_study(space={}, config={"cpu_affinity": 2}), unbound, ()).num_missing == 2


def test_the_cores_of_the_trials_are_told_so_that_others_keep_off_them() -> None:
    four = Cluster(({"CPU": 4},), is_own=True, cores=tuple(Core(n, n // 2, n) for n in range(4)))
    elsewhere = Cluster(({"CPU": 4},), is_own=False)

    def told(cluster: Cluster, **space: object) -> set[int]:
        return set(make_plan(a_study(space=space), cluster, ()).trial_cores)

    assert told(four, num_workers=grid(1, 2)) == {0, 1}
    assert told(four, cpu_affinity=grid((3,), "1")) == {1, 3}
    assert told(four, cpu_affinity=grid("spread"), num_workers=grid(2)) == {0, 2}
    assert told(four, lr=choice(0.1, 0.2)) == told(elsewhere, num_workers=grid(1, 2)) == set()


def test_mps_is_for_machines_that_have_it_and_no_gpu_that_ray_counts() -> None:
    assert "needs macOS on arm64" in refused(device="mps")
    apple = Cluster(({"CPU": 2},), is_own=True, has_mps=True)
    (placement,) = make_plan(a_study(space={}, config={"device": "mps"}), apple, ()).placements
    assert placement.device == "mps"


def test_tf32_is_refused_off_nvidia_gpus_even_where_auto_decides() -> None:
    assert "NVIDIA GPUs only" in refused(precision="tf32")
    with_gpu = Cluster(({"CPU": 2, "GPU": 1},), is_own=True)
    assert "NVIDIA GPUs only, and the device is cpu" in refused(with_gpu, precision="tf32", device="cpu")
    assert make_plan(a_study(space={}, config={"precision": "tf32"}), with_gpu, ()).num_missing == 2


def test_a_train_loop_may_call_what_it_likes_tf32() -> None:
    loop = Workload.from_train_loop(lambda config: None)
    assert make_plan(a_study(workload=loop, config={"precision": "tf32"}), TWO_CORES, ()).num_missing == 4


def test_what_a_search_could_draw_and_never_run_is_refused_before_it_starts() -> None:
    space = {"precision": choice("fp32", "tf32"), "cpu_affinity": choice(None, "5")}
    with pytest.raises(StudyError) as told:
        make_plan(a_study(space=space), TWO_CORES, ())
    assert {mistake.field for mistake in told.value.mistakes} == {"precision", "cpu_affinity"}


def test_a_search_counts_its_draws_for_every_grid_point() -> None:
    study = a_study(space={"num_workers": grid(1, 2), "lr": choice(0.1, 0.2)}, num_trials=5)
    done = TrialResult(study.trial({"num_workers": 1, "lr": 0.1}, 0), TrialState.FINISHED)
    plan = make_plan(study, TWO_CORES, [done])
    assert (plan.num_trials, plan.num_missing) == (10, 9)


def test_a_search_without_ray_is_refused() -> None:
    with pytest.raises(RayparError, match="needs Ray"):
        make_plan(a_study(space={"lr": choice(0.1, 0.2)}), TWO_CORES, (), with_ray=False)


def test_the_time_to_come_is_told_from_trials_of_the_same_placement() -> None:
    study = a_study()
    assert make_plan(study, TWO_CORES, ()).estimated_s() is None
    assert make_plan(study, TWO_CORES, done(study, 0)).estimated_s() == pytest.approx(6.0)


def test_a_workload_prepares_for_a_complete_config_once_for_each_that_needs_other_data() -> None:
    asked: list[dict[str, object]] = []
    workload = Workload(
        name="w",
        model=lambda c: None,  # type: ignore[arg-type, return-value]
        data=lambda c: None,  # type: ignore[arg-type, return-value]
        options={"folder": "a"},
        prepare=lambda config: asked.append(dict(config)),
    )
    check_data(Study(workload=workload, space={"lr": uniform(0.1, 0.2)}, config={"folder": "b"}))
    assert [(c["folder"], c["loader"], c["batch_size"]) for c in asked] == [("b", "resident", 64)]
    asked.clear()
    check_data(Study(workload=workload, space={"loader": grid("resident", "dataloader"), "lr": grid(0.1, 0.2)}))
    assert [(c["folder"], c["loader"]) for c in asked] == [("a", "resident"), ("a", "dataloader")]
