"""Plan of an execution, from a study and its stored results."""

from dataclasses import replace
from pathlib import Path

import pytest

from raypar import RayparError, Study, StudyError, Workload, choice, grid, uniform
from raypar.execution.machine import fits_on, needs_only_gpus, trial_cores, within
from raypar.execution.plan import NOT_STARTED, check_data, make_plan
from raypar.run.cluster import Cluster, NodeType
from raypar.study.options import Auto
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialState
from raypar.train.affinity import Core
from raypar.workloads import digits


def own(cpus, cores=None, **changes):
    return Cluster(({"CPU": cpus, **changes.pop("more", {})},), is_own=True, cores=cores, **changes)


TWO_CORES = own(2, (Core(0, 0, 0), Core(1, 0, 1)))
TWO_GPUS = own(2, more={"GPU": 2})
UNBOUND = own(2, ())
ELSEWHERE = Cluster(({"CPU": 2},), is_own=False)


def a_study(**changes):
    return Study(**{"workload": digits, "name": "s", "space": {"num_workers": grid(1, 2)}, "num_repeats": 2, **changes})


def plan_of(cluster=TWO_CORES, **config):
    return make_plan(a_study(space={}, config=config), cluster, ())


def done(study, *orders, state=TrialState.FINISHED):
    return [TrialResult(study.trials()[i], state, wall_s=2.0) for i in orders]


def test_trials_without_a_complete_result_are_missing():
    study = a_study()
    plan = make_plan(study, TWO_CORES, [*done(study, 0, 3), *done(study, 1, state=TrialState.FAILED)])
    assert [spec.order for spec in plan.missing] == [1, 2]
    assert (plan.num_trials, plan.num_missing, len(plan.done)) == (4, 2, 2)
    without_one = make_plan(a_study(space={"num_workers": grid(2)}), TWO_CORES, done(study, 0, 1, 2, 3))
    assert {result.spec.config["num_workers"] for result in without_one.done} == {2}
    assert not without_one.missing


def test_points_that_share_their_trials_are_not_run_again():
    study = a_study(space={"device": grid("auto", "cpu")})
    assert make_plan(study, TWO_CORES, done(study, 0, 1, 2, 3)).num_missing == 0


ERROR, SKIPPED = (Failure(kind, "ValueError: no") for kind in (FailureKind.ERROR, FailureKind.SKIPPED))
OTHER = Failure(FailureKind.ERROR, "ValueError: another")
LOST = Failure(FailureKind.GANG_LOST, "its gang was lost")
CODE = {"s.py": "py3.11:1"}


@pytest.mark.parametrize(
    ("failures", "changes", "num_missing"),
    [
        ([ERROR, ERROR, SKIPPED], {}, 0),
        ([ERROR, ERROR], {}, 0),
        ([ERROR, ERROR, None], {}, 2),  # not stopped
        ([ERROR, SKIPPED], {}, 0),  # of one trial, started twice
        ([None, SKIPPED], {}, 1),
        ([ERROR, OTHER], {}, 2),
        ([LOST, LOST], {}, 2),
        ([ERROR], {}, 1),
        ([ERROR, ERROR, SKIPPED], {"code": {"": {"s.py": "py3.11:2"}}}, 3),  # perhaps they fixed it
        ([ERROR, ERROR, SKIPPED], {"retry_failed": True}, 3),
    ],
)
def test_stopped_points_are_tried_again_when_the_code_has_changed(failures, changes, num_missing):
    study = a_study(space={}, num_repeats=len(failures))
    stored = [
        TrialResult(spec, TrialState.FAILED if failure else TrialState.FINISHED, failure=failure, code=CODE)
        for spec, failure in zip(study.trials(), failures, strict=True)
    ]
    plan = make_plan(study, TWO_CORES, stored, **{"code": {"": CODE}, **changes})
    assert (plan.num_missing, len(plan.done)) == (num_missing, len(failures) - num_missing)


def gpus(num, cpus=16, **changes):
    """Return a machine with this many GPUs."""
    return own(cpus, more={"GPU": num} if num else {}, **changes)


def growing(*types, nodes=({"CPU": 4},)):
    return Cluster(nodes, is_own=False, node_types=types)


DRIVER = "the installed torch is built for CUDA 13.0, which needs driver 580.65.06 or later; installed: 535.1"
NO_TORCH = f"device=auto: cpu, because {DRIVER}; --set device=cuda uses it anyway"
TOO_FEW = (
    "device=auto: cpu, because num_workers=2 needs 2 GPUs in one gang, the cluster has 1; "
    "--set num_workers=1 runs on cuda"
)
GPU_NODE = {"CPU": 12, "GPU": 4}
STILL_TO_ADD = "device=auto: cuda, on GPU nodes that the cluster still has to add; --set device=cpu needs none"
ONE_WORKER = {"space": {"lr": grid(0.1, 0.2)}}
DRAWN = {"space": {"num_workers": choice(1, 2)}}


@pytest.mark.parametrize(
    ("cluster", "study", "placements", "notices"),
    [
        (gpus(0), {}, {("cpu", 1)}, ()),
        (gpus(1), {}, {("cpu", 1)}, (TOO_FEW,)),
        (gpus(2), {}, {("cuda", 8)}, ()),
        (gpus(8), {}, {("cuda", 2)}, ()),
        (gpus(1), ONE_WORKER, {("cuda", 16)}, ()),
        (gpus(1), {"config": {"num_workers": 2}, "space": {}}, {("cpu", 1)}, (TOO_FEW.partition(";")[0],)),
        (gpus(1), {"config": {"device": "cpu"}}, {("cpu", 1)}, ()),
        (gpus(2), {"config": {"device": "cuda", "cpus_per_worker": 3}}, {("cuda", 3)}, ()),
        (gpus(2), {"config": {"cpu_affinity": 4}}, {("cuda", 4)}, ()),
        (gpus(2), {"space": {"device": grid("cpu", "cuda")}}, {("cpu", 1), ("cuda", 8)}, ()),
        (
            gpus(2, gpu_problem=DRIVER),
            {},
            {("cpu", 1)},
            (f"device=auto: cpu, because {DRIVER}; --set device=cuda uses it anyway",),
        ),
        (gpus(1), DRAWN, {("cpu", 1)}, (TOO_FEW,)),
        (gpus(2), DRAWN, {("cuda", 8)}, ()),
        (growing(NodeType(0, 1, GPU_NODE)), {}, {("cpu", 1)}, (NOT_STARTED,)),
        (growing(NodeType(1, 1, GPU_NODE)), {}, {("cuda", 3)}, (STILL_TO_ADD,)),
        (growing(NodeType(0, 2, GPU_NODE), nodes=(GPU_NODE,)), {}, {("cuda", 3)}, ()),
        (growing(NodeType(0, 1, {"CPU": 4, "GPU": 1})), {}, {("cpu", 1)}, (TOO_FEW,)),
        (growing(NodeType(1, 2, {"CPU": 4, "GPU": 1})), {}, {("cuda", 4)}, (STILL_TO_ADD,)),
        (growing(NodeType(0, 2, {"CPU": 8})), {}, {("cpu", 1)}, ()),
        (
            growing(nodes=({"CPU": 1, "GPU": 2}, {"CPU": 8})),
            {"config": {"nodes": 1}},
            {("cpu", 1)},
            (
                "device=auto: cpu, because num_workers=2 needs 2 workers with CPU 1, GPU 1 each, evenly on 1 nodes; "
                "1 of the cluster's nodes can hold one; --set num_workers=1 runs on cuda",
            ),
        ),
    ],
)
def test_device_auto_is_cuda_if_every_gang_fits(cluster, study, placements, notices):
    plan = make_plan(a_study(**study), cluster, ())
    used = plan.specs or [plan.study.trial(point, 0, auto=plan.auto) for point in ({}, {"num_workers": 2})]
    assert {(spec.placement.device, spec.placement.cpus_per_worker) for spec in used} == placements
    assert plan.notices == notices
    assert all(spec.config["num_threads"] == spec.config["cpus_per_worker"] for spec in used)


def test_mps_is_only_used_on_request():
    (placement,) = plan_of(own(2, has_mps=True), device="mps").placements
    assert placement.device == "mps"


ONE_CORE = "each GPU worker has 1 core, shared by its main thread, autograd, loader processes and NCCL: "


@pytest.mark.parametrize(
    ("cluster", "study", "notices"),
    [
        (gpus(4, cpus=4), {}, (f"{ONE_CORE}the nodes have no more per GPU",)),
        (gpus(2), {"config": {"cpus_per_worker": 1}}, (f"{ONE_CORE}set cpus_per_worker=8",)),
        (gpus(2), {"config": {"cpus_per_worker": 1, "device": "cuda"}}, (f"{ONE_CORE}set cpus_per_worker=8",)),
        (gpus(2), {"config": {"cpus_per_worker": 1, "device": "cpu"}}, ()),
        (gpus(2), {"space": {"cpus_per_worker": grid(1, 2)}}, ()),
        (gpus(2), {"space": {"cpu_affinity": grid(1, 2)}}, ()),
    ],
)
def test_one_core_per_gpu_causes_a_notice(cluster, study, notices):
    assert make_plan(a_study(**study), cluster, ()).notices == notices


def ran(auto, study=None, started_at=0.0, num=1):
    """Return the first trials of a study (default: this one) as stored by an earlier execution."""
    specs = (study or a_study()).trials(auto=auto)[:num]
    return [TrialResult(spec, TrialState.FINISHED, started_at=started_at) for spec in specs]


CPU, EIGHT, FOUR = Auto(), Auto("cuda", 8), Auto("cuda", 4)
ON_CUDA = a_study(config={"device": "cuda"})


@pytest.mark.parametrize(
    ("stored", "cluster", "study", "auto"),
    [
        (ran(Auto("cuda", 3)), growing(NodeType(0, 1, GPU_NODE)), {}, Auto("cuda", 3)),  # it has scaled down since
        (ran(CPU), gpus(2), {}, Auto("cpu", 8)),
        (ran(EIGHT), gpus(2), {}, EIGHT),
        (ran(FOUR), gpus(2), {}, FOUR),
        ([*ran(CPU, started_at=1.0), *ran(EIGHT)], gpus(2), {}, EIGHT),  # both: what is best now
        ([*ran(FOUR, started_at=1.0), *ran(Auto("cuda", 2))], gpus(2), {}, FOUR),  # neither: the last
        (ran(CPU, a_study(config={"epochs": 9})), gpus(2), {}, EIGHT),  # another question
        (ran(Auto("mps")), gpus(2), {}, EIGHT),  # was asked for
        ([replace(r, state=TrialState.FAILED) for r in ran(CPU)], gpus(2), {}, EIGHT),
        (ran(FOUR, ON_CUDA), gpus(2), {"config": {"device": "cuda"}}, FOUR),
    ],
)
def test_values_of_stored_trials_are_kept(stored, cluster, study, auto):
    plan = make_plan(a_study(**study), cluster, stored)
    assert plan.auto == auto
    assert all(result in plan.done for result in stored if result.spec.config["device"] == auto.device == "cpu")


def test_a_study_with_cpu_trials_stays_on_the_cpu():
    plan = make_plan(a_study(), gpus(2), ran(CPU, num=3))
    assert (plan.num_missing, {spec.placement.device for spec in plan.specs}) == (1, {"cpu"})
    assert plan.notices == ("device=auto: cpu, to match 3 stored trials; --fresh chooses again",)
    assert make_plan(a_study(), gpus(0), ran(CPU, num=3)).notices == ()
    settling = a_study(until="settled", baseline={"num_workers": 1})
    plan = make_plan(settling, gpus(2), ran(CPU, settling, num=6))
    assert {spec.placement.device for spec in plan.missing} == {"cpu"} and plan.missing[0].repeat == 3


def test_a_search_continues_on_its_device():
    search = a_study(**DRAWN, num_trials=4)
    stored = [TrialResult(search.trial({"num_workers": 1}, 0, auto=auto), TrialState.FINISHED) for auto in (CPU, EIGHT)]
    for auto, result in zip((CPU, EIGHT), stored, strict=True):
        plan = make_plan(search, gpus(2), [result])
        assert (plan.auto.device, plan.num_missing) == (auto.device, 3)
    assert make_plan(search, gpus(2), stored).done == (stored[1],)


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        (gpus(0), "this machine has no GPU"),
        (gpus(1), "num_workers=2 needs 2 GPUs in one gang, the cluster has 1"),
        (gpus(2, gpu_problem=DRIVER), DRIVER),
        (gpus(2, cpus=8), "num_workers=2 needs 16 CPUs in one gang, the cluster has 8"),
    ],
)
def test_gpu_trials_are_not_silently_repeated_on_the_cpu(cluster, problem):
    with pytest.raises(RayparError) as refused:
        make_plan(a_study(), cluster, ran(EIGHT, num=2), where="s.py")
    assert refused.value.message == f"device=auto: cuda, to match 2 stored trials, but {problem}"
    assert "`raypar study s.py --set device=cpu`" in refused.value.hint and "--fresh" in refused.value.hint
    assert make_plan(a_study(config={"device": "cpu"}), cluster, ran(EIGHT)).num_missing == 4


REFUSED = [
    (TWO_CORES, {"num_workers": 4}, "needs 4 CPUs in one gang, the cluster has 2"),
    *((TWO_CORES, {"device": "cuda"}, words) for words in ("needs 1 GPU in one gang, the cluster has 0", "device=cpu")),
    (TWO_CORES, {"device": "mps"}, "needs macOS on arm64"),
    (TWO_CORES, {"cpu_affinity": 64}, "needs 64 CPUs in one gang, the cluster has 2"),
    (TWO_CORES, {"cpu_affinity": "0-63"}, "there is no core 2-63: the machine's are 0-1"),
    (TWO_CORES, {"cpu_affinity": "0-63"}, "list cores of 0-1"),
    *((UNBOUND, {"cpu_affinity": a}, "can't bind processes to cores") for a in ("0", (1,), "spread", "compact")),
    (TWO_CORES, {"precision": "tf32"}, "NVIDIA GPUs only"),
    (TWO_GPUS, {"precision": "tf32", "device": "cpu"}, "NVIDIA GPUs only, and the device is cpu"),
]


@pytest.mark.parametrize(("cluster", "config", "problem"), REFUSED)
def test_impossible_trials_are_one_mistake(cluster, config, problem):
    with pytest.raises(StudyError) as refused:
        plan_of(cluster, **config)
    assert len(refused.value.mistakes) == 1 and problem in str(refused.value)


@pytest.mark.parametrize(
    ("space", "config"),
    [
        ({"num_workers": grid(1, 2)}, {"noise_scale": True}),
        ({"strategy": grid("ddp", "tensor"), "num_workers": grid(2)}, {"static_graph": True}),
    ],
)
def test_a_fixed_option_may_be_meant_for_some_of_the_points(space, config):
    study = Study(workload=digits, space=space, config=config, num_repeats=1)
    assert make_plan(study, TWO_CORES, ()).num_missing == 2


def test_trials_that_may_become_possible_are_planned():
    growing = Cluster(({"CPU": 2},), is_own=False, node_types=(NodeType(0, 1, {"CPU": 4}),))
    assert plan_of(growing, num_workers=4).num_missing == 2
    assert plan_of(ELSEWHERE, cpu_affinity="6-7").num_missing == 2  # its machines are not known yet
    assert all(plan_of(UNBOUND, cpu_affinity=unbound).num_missing == 2 for unbound in (2, "off"))
    assert plan_of(TWO_GPUS, precision="tf32").num_missing == 2
    loop = Workload.from_train_loop(lambda config: None)  # may call what it likes tf32
    assert make_plan(a_study(workload=loop, config={"precision": "tf32"}), TWO_CORES, ()).num_missing == 4


FOUR_CORES = tuple(Core(n, n // 2, n) for n in range(4))


@pytest.mark.parametrize(
    ("cores", "space", "chosen"),
    [
        ((0, 1, 2, 3), {"num_workers": grid(1, 2)}, {0, 1}),
        ((1, 2, 3), {"num_workers": grid(1, 2)}, {1, 2}),
        ((0, 1, 2, 3), {"cpu_affinity": grid((3,), "1")}, {1, 3}),
        ((0, 1, 2, 3), {"cpu_affinity": grid("spread"), "num_workers": grid(2)}, {0, 2}),
        ((1, 2, 3), {"cpu_affinity": grid("spread"), "num_workers": grid(2)}, {1, 2}),
        ((2, 3), {"lr": choice(0.1, 0.2)}, {2}),
        ((2, 3), {"num_workers": choice(1, 2)}, {2, 3}),
        ((0, 1, 2, 3), {"num_workers": choice(1, 9)}, {0, 1, 2, 3}),  # it takes them all, and refuses the draw
    ],
)
def test_trials_use_the_cores_of_the_largest(cores, space, chosen):
    plan = make_plan(a_study(space=space), own(4, FOUR_CORES), ())
    assert trial_cores(plan, [core for core in FOUR_CORES if core.number in cores]) == chosen


@pytest.mark.parametrize(
    ("cores", "space", "fits"),
    [
        ((3,), {"num_workers": grid(1, 2)}, False),
        ((2, 3), {"num_workers": grid(1, 2)}, True),
        ((0, 1, 2), {"cpu_affinity": grid((3,), "1")}, False),
        ((1, 3), {"cpu_affinity": grid((3,), "1")}, True),
        ((1, 2, 3), {"num_workers": choice(1, 9)}, False),
    ],
)
def test_a_study_fits_on_cores_for_its_widest_trial_and_listed_ones(cores, space, fits):
    assert fits_on(make_plan(a_study(space=space), own(4, FOUR_CORES), ()), cores) == fits


def test_gpu_trials_prefer_cores_near_their_gpu(monkeypatch):
    monkeypatch.setattr(
        "raypar.run.placement.cores_near_gpu", lambda index: {0: frozenset((2, 3)), 1: frozenset((1,))}[index]
    )
    for num_workers, chosen in ((1, {2}), (2, {1, 2})):
        two_gpus = own(4, FOUR_CORES, more={"GPU": 2})
        plan = plan_of(two_gpus, device="cuda", num_workers=num_workers, cpus_per_worker=1)
        assert needs_only_gpus(plan) and trial_cores(plan, FOUR_CORES) == chosen


def test_concurrent_trials_take_cores_for_their_maximum_number():
    plan = make_plan(a_study(max_concurrent_trials=3, space={"lr": choice(0.1, 0.2)}), own(4, FOUR_CORES), ())
    assert [len(trial_cores(plan, FOUR_CORES[:count])) for count in (1, 2, 3, 4)] == [1, 2, 3, 3]


def test_finished_trials_take_no_cores():
    study = a_study()
    wide = [spec for spec in study.trials() if spec.placement.num_workers == 2]
    plan = make_plan(study, own(4, FOUR_CORES), [TrialResult(spec, TrialState.FINISHED) for spec in wide])
    assert trial_cores(plan, FOUR_CORES) == {0} and not needs_only_gpus(plan)
    kept = within(plan, {2, 3}).cluster
    assert (kept.num_cpus, kept.cores) == (2, FOUR_CORES[2:])


def test_a_search_is_refused_for_impossible_draws():
    space = {"precision": choice("fp32", "tf32"), "cpu_affinity": choice(None, "5")}
    with pytest.raises(StudyError) as refused:
        make_plan(a_study(space=space), TWO_CORES, ())
    assert {mistake.field for mistake in refused.value.mistakes} == {"precision", "cpu_affinity"}


def test_a_search_counts_its_draws_for_every_grid_point():
    study = a_study(space={"num_workers": grid(1, 2), "lr": choice(0.1, 0.2)}, num_trials=5)
    spec = study.trial({"num_workers": 1, "lr": 0.1}, 0)
    plan = make_plan(study, TWO_CORES, [TrialResult(spec, TrialState.FINISHED)])
    assert (plan.num_trials, plan.num_missing) == (10, 9)


def timed(wall_s, study="s", *, repeat=9, state=TrialState.FINISHED, train_time_s=None, **config):
    """Return a stored trial of this study or another one."""
    spec = a_study(name=study, space={}, config=config).trial({}, repeat)
    return TrialResult(spec, state, wall_s=wall_s, train_time_s=train_time_s)


ONE, TWO = (
    [timed(wall_s, repeat=r, num_workers=n) for r, wall_s in enumerate(walls)]
    for n, walls in ((1, (2.0, 3.0, 9.0)), (2, (5.0,)))
)


@pytest.mark.parametrize(
    ("stored", "estimate"),
    [
        ([], None),
        ([timed(2.0, state=TrialState.FAILED)], None),
        ([*ONE, *TWO], (2 * 3.0 + 2 * 5.0, 4)),  # the median of each point
        (ONE, (4 * 3.0, 3)),  # no trial of two workers
        ([timed(4.0, num_workers=1, epochs=4, train_time_s=3.0), *TWO], (2 * (4.0 + 3.0) + 2 * 5.0, 2)),  # scaled
        ([timed(4.0, num_workers=1, lr=0.5), timed(8.0, num_workers=2, lr=0.5)], (2 * 4.0 + 2 * 8.0, 2)),
    ],
    ids=["none", "failed", "points", "all", "epochs", "placement"],
)
def test_the_estimated_time_is_from_the_most_similar_trials(stored, estimate):
    plan = make_plan(a_study(config={"epochs": 8}), TWO_CORES, ())
    stored = [
        replace(r, spec=replace(r.spec, config={**r.spec.config, "epochs": 8})) if r.train_time_s is None else r
        for r in stored
    ]
    assert plan.estimate(stored) == (None if estimate is None else pytest.approx((*estimate, "")))


def test_trials_of_other_studies_may_only_differ_in_epochs():
    plan = make_plan(a_study(), TWO_CORES, ())
    alike = [timed(2.0, "other", num_workers=1), timed(3.0, "other", num_workers=2)]
    assert plan.estimate(alike, only_alike=True)[:2] == (10.0, 2)
    assert plan.estimate(alike[:1], only_alike=True) is None
    assert plan.estimate([timed(2.0, "other", num_workers=1, lr=0.5), alike[1]], only_alike=True) is None


def test_the_estimate_of_a_search_is_the_median_of_its_trials():
    plan = make_plan(a_study(space={"lr": choice(0.1, 0.2)}, num_trials=5), TWO_CORES, ())
    assert plan.estimate([timed(2.0, lr=0.1), timed(4.0, lr=0.2)])[:2] == (15.0, 2)


def test_a_missing_script_is_refused_unless_a_shell_runs_it(tmp_path):
    def check(command, **parts):
        check_data(Study(workload=Workload.from_command(command, **parts), name="s"), tmp_path / "s.py")

    with pytest.raises(RayparError, match=r"s.py: workload.command: parts/train.py: there is no such file in"):
        check("python train.py", folder="parts")
    check("python train.py", shell=True)
    check(["python", "-m", "json.tool", "/opt/train.py", "--config=a.py"])
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "train.py").touch()
    check("python train.py", folder="parts")


def test_prepare_is_called_once_for_each_data_set():
    asked = []
    functions = {"model": lambda c: None, "data": lambda c: None, "prepare": asked.append}
    workload = Workload(name="w", **functions, options={"folder": "a"})

    def configs(**study):
        asked.clear()
        check_data(Study(workload=workload, **study), Path("s.py"))
        return [(c["folder"], c["loader"], c["batch_size"]) for c in asked]

    assert configs(space={"lr": uniform(0.1, 0.2)}, config={"folder": "b"}) == [("b", "resident", 64)]
    space = {"loader": grid("resident", "dataloader"), "lr": grid(0.1, 0.2)}
    assert configs(space=space) == [("a", "resident", 64), ("a", "dataloader", 64)]
    assert len(configs(space={"folder": grid("a", "b")}, num_repeats=2)) == 2
