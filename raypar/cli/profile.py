"""Command that profiles the steps of one point."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from raypar import units
from raypar.cli import common
from raypar.cli.flags import takes
from raypar.cli.study import check_can_profile, executed, load, options_here
from raypar.cli.target import Grids, Target, study_file
from raypar.errors import RayparError
from raypar.execution.flags import NUM_PROFILED_STEPS, RunFlags
from raypar.signals import handle_signals

if TYPE_CHECKING:
    from raypar.execution.options import Options
    from raypar.study.loader import LoadedStudy
    from raypar.study.observation import ObservedRank
    from raypar.study.space import Value
    from raypar.study.study import Study


MAX_STEPS = 1000  # longer traces don't fit into memory


@takes("set", "steps", "no_ray", "address", "data_dir", "tracking_uri", "trial_timeout")
def profile(
    target: Target,
    flags: RunFlags,
    grid: Grids = None,
    steps: Annotated[int | None, common.what(metavar="N", help="Number of steps to profile. (default: 20)")] = None,
) -> None:
    """Show what each worker spends a step's time on.

    The profiled point is the one with the most workers, unless --set chooses another.

    Examples:  raypar model profile studies/strong_scaling.py --set num_workers=2    raypar model profile train.py
    """
    with handle_signals():
        num_steps = NUM_PROFILED_STEPS if steps is None else steps
        if not 1 <= num_steps <= MAX_STEPS:
            raise RayparError(f"--steps {num_steps}: must be from 1 to {MAX_STEPS}", hint="leave it out, or write 20")
        loaded = load(study_file(target, grid, None, None), flags)
        check_can_profile(loaded.study, "raypar model profile")
        point = point_of(loaded.study)
        options = options_here(replace(flags, fresh=True, num_profiled_steps=num_steps), instead_of_training=True)
        _run(_only(loaded, point), options, point)


def point_of(study: Study) -> dict[str, Value]:
    """Return the study's baseline, or its first point, but with the most workers, where communication costs most.

    Drawn hyperparameters have their first value.
    """
    from raypar.study.space import examples

    values = {key: examples(domain) for key, domain in study.space.items()}
    point = {**{key: each[0] for key, each in values.items()}, **study.baseline}
    if counts := [count for count in values.get("num_workers", ()) if isinstance(count, int)]:
        point["num_workers"] = max(counts)
    return point


def _only(loaded: LoadedStudy, point: dict[str, Value]) -> LoadedStudy:
    """Return a study of only this point. Its name keeps its trials apart from timed ones."""
    from raypar.study.workload import Workload

    study = loaded.study
    one_point = replace(
        study,
        name=f"{study.name}-profile",
        space={},
        baseline={},
        config={**study.config, **point, **({"keep_model": False} if isinstance(study.workload, Workload) else {})},
        num_repeats=1,
        price_per_node_hour=None,
        until="",
        budget=None,
        searcher=None,
        scheduler=None,
        description=f"Where a step's time goes in {study.name}.",
    )
    return replace(loaded, study=one_point)


def _run(loaded: LoadedStudy, options: Options, point: dict[str, Value]) -> None:
    from raypar.reporting.profile import print_profile
    from raypar.study.trial import point_label
    from raypar.train.job import ARTIFACT_FOLDER, PROFILE_FOLDER

    with executed(loaded, options) as (console, outcome):
        trials = list(outcome.results.values())
        ranks = [rank for r in trials if r.observation for rank in r.observation.ranks]
        for _, profile in outcome.analysis.profiles:
            settings = " ".join([*([point_label(point)] if point else []), *options.flags.set])
            at = f" at {settings}" if settings else ""
            of_all = "" if ranks else f" of {options.profiling.num_steps}"
            taken = f"mean of {profile.num_steps}{of_all} steps"
            title = f"{loaded.study.name}{at}: where a step's time goes ({taken})"
            folders = sorted(outcome.log_dir.glob(f"*/{ARTIFACT_FOLDER}/{PROFILE_FOLDER}"))
            traces = common.path_from_here(folders[0]) if folders else ""
            print_profile(console, title, profile, traces, ranks[0].operations if ranks else ())
            if ranks and not ranks[0].operations:
                common.say(console, f"There is no trace: {_why_no_trace(ranks[0])}")
            name = loaded.study.name
            common.say(console, f"`raypar ui` shows the run in MLflow, with the traces and breakdown.json, as {name}")
        for reason in dict.fromkeys(reason for r in trials for reason in r.conditions.of_ranks("not_observed")):
            common.say(console, f"No step was profiled: {reason}")
    common.exit_as(outcome)


def _why_no_trace(rank: ObservedRank) -> str:
    from raypar.observe.profiler import NUM_SETTLING_STEPS

    few = f"the script made {units.counted(rank.num_steps, 'step')}, and profiling begins after {NUM_SETTLING_STEPS}"
    return next(iter(rank.problems), few)
