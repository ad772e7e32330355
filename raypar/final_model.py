"""The end of a study with ``--log-model``: the model of its best trial becomes a model in MLflow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.chosen import chosen_point
from raypar.errors import RayparError
from raypar.provenance import versions
from raypar.run.runner import Listener, Notice
from raypar.study.study import Study
from raypar.study.trial import TrialResult, TrialSpec, best_first
from raypar.track.recorder import Recorder
from raypar.track.store import Store

FINAL_MODEL_FILE = "model.json"
OTHER_TRIALS = (
    "--log-model keeps each trial's model, which makes it another trial: {} without a model in the store are not "
    "taken instead"
)
NOT_LOGGED = "no model was logged: {}"


def check_can_log(study: Study) -> None:
    """Raises RayparError where trials keep nothing that could be logged as a model."""
    workload, asked = study.workload, "--log-model"
    if workload.is_train_loop:
        raise RayparError(
            f"{asked}: workload {workload.name} is a train loop, whose model raypar can't look into",
            hint="call mlflow.pytorch.log_model in the loop, or make a Workload of model and data",
        )
    if workload.save is not None:
        raise RayparError(
            f"{asked}: workload {workload.name} saves its models in a way of its own",
            hint="say --set keep_model=true: what it saves is among the trial's files in the store",
        )


def with_models(study: Study) -> Study:
    """The study whose trials keep their models."""
    if "keep_model" in study.space:
        return study
    return replace(study, config={**study.config, "keep_model": True})


def other_trials(stored: Sequence[TrialResult], missing: Sequence[TrialSpec]) -> str:
    """What to tell of results that would do but for their model; empty if there are none."""
    wanted = {spec.identity for spec in missing}
    kept = [replace(r.spec, config={**r.spec.config, "keep_model": True}) for r in stored if r.is_complete]
    num = sum(spec.identity in wanted for spec in kept)
    return OTHER_TRIALS.format(units.counted(num, "trial")) if num else ""


def is_logged(study: Study, analysis: StudyAnalysis, results: Mapping[str, TrialResult], store: Store) -> bool:
    """Whether the model of what is the best trial now has been logged before."""
    best = _best(analysis, results)
    logged = store.artifact(study.name, FINAL_MODEL_FILE)
    return bool(best and logged and json.loads(logged).get("identity") == best.spec.identity)


def log_final_model(
    study: Study,
    analysis: StudyAnalysis,
    results: Mapping[str, TrialResult],
    store: Store,
    recorder: Recorder,
    folder: Path,
    notice: Listener,
) -> None:
    """Log the model of the best trial of the best point. What goes wrong with it is told, and costs nothing else.

    Args:
        folder: where it is written first; it stays there until the store has it.
    """
    best = _best(analysis, results)
    if best is None:
        notice(Notice(NOT_LOGGED.format(f"no trial has reported {analysis.metric}")))
        return
    kept = store.model_folder(study.name, best.spec.identity)
    if kept is None:
        notice(Notice(NOT_LOGGED.format(f"{best.spec.label}, the best trial, has kept none")))
        return
    try:
        from raypar.track.client import save_model
        from raypar.train.saved_model import exported

        whole = exported(study.workload, best.spec.config, kept)
        shutil.rmtree(folder, ignore_errors=True)
        about = {"study": study.name, "trial": best.spec.label, "identity": best.spec.identity}
        save_model(whole.module, whole.inputs, whole.outputs, folder, metadata=about, versions=versions())
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        notice(Notice(NOT_LOGGED.format(f"{type(error).__name__}: {first}; the weights of {best.spec.label} are kept")))
        return
    recorder.record_model(best.spec.identity, folder)
    recorder.add_artifact(FINAL_MODEL_FILE, json.dumps(about))


def _best(analysis: StudyAnalysis, results: Mapping[str, TrialResult]) -> TrialResult | None:
    """Of the best point's trials the one whose kept weights scored best."""
    point = chosen_point(analysis)
    mine = [r for r in results.values() if point and r.spec.point == point.point]
    return next(iter(best_first(mine, analysis.metric, analysis.mode)), None)
