"""Models at the end of a study: the best one is selected on the validation set and tested once; logged on request."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.points import PointAnalysis
from raypar.analysis.stats import median_estimate
from raypar.errors import RayparError
from raypar.provenance import versions
from raypar.run.runner import Listener, Notice
from raypar.study.metric import Metric
from raypar.study.space import Value
from raypar.study.study import Study
from raypar.study.trial import TrialResult, TrialSpec, best_first, best_report, gain, point_label
from raypar.study.workload import Workload
from raypar.track.recorder import Recorder
from raypar.track.runs import BEST_MODEL, CHECKPOINT_MODEL, KEPT_MODEL
from raypar.track.store import Store
from raypar.train.job import REPORTS_FOLDER

FINAL_TEST_FILE = "test.json"
MAX_PROBLEMS = 2  # named in a notice


@dataclass(frozen=True)
class FinalTest:
    """Scores of each model of the chosen point on the test set, which played no part in the choice.

    Attributes:
        metric: metric on the validation set by which the point was chosen.
        look: 1 for the first use of the test set. A study that continues uses it again.
    """

    point: Mapping[str, Value]
    metric: str
    scores: tuple[Mapping[str, float], ...]
    look: int = 1

    def sentence(self, unit: str = "") -> str:
        """Return the sentence for reports; empty without a finite score. `unit`: the metric's unit in trials."""
        key = self.metric.removeprefix("val_")
        values = [score[key] for score in self.scores if math.isfinite(score.get(key, math.nan))]
        if not values:
            return ""
        estimate = median_estimate(values, log_scale=False)
        shown = Metric(key, unit=unit).read_from(values).show_interval(estimate)
        seen = "seen once" if self.look == 1 else f"used {self.look} times, less reliable each time"
        return (
            f"Test set, {seen}, by the {units.counted(len(values), 'model')} of the point that is best on the "
            f"validation set ({point_label(self.point)}): {key} {shown}."
        )


def last_final_test(store: Store, study_name: str) -> FinalTest | None:
    """Return the final test of the latest execution that had one; None if there is none, or it is damaged."""
    raw = _stored_json(store, study_name, FINAL_TEST_FILE)
    try:
        scores = tuple({key: float(value) for key, value in score.items()} for score in raw["scores"])
        return FinalTest(dict(raw["point"]), str(raw["metric"]), scores, int(raw["look"]))
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        return None


def _stored_json(store: Store, study_name: str, file: str) -> dict[str, Any]:
    """Return a JSON object from the files of a study's executions; empty if missing or damaged."""
    try:
        value = json.loads(store.artifact(study_name, file) or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def with_final_test(analysis: StudyAnalysis, final: FinalTest | None) -> StudyAnalysis:
    """Return the analysis with the outcome of a final test, if there was one."""
    sentence = final.sentence(analysis.question.unit) if final else ""
    return replace(analysis, verdict=replace(analysis.verdict, final_test=sentence))


def chosen_point(analysis: StudyAnalysis) -> PointAnalysis | None:
    """Return the first point with the best median of the study's metric, without diverged trials; None: none has it."""
    scored = [(p, p.metric) for p in analysis.points if p.metric is not None and not p.unusable]
    return max(scored, key=lambda entry: gain(analysis.question.mode, entry[1].value))[0] if scored else None


FINAL_MODEL_FILE, ALL_MODELS_FILE = "model.json", "models.json"
OTHER_TRIALS = "to log models, each trial has to keep its own: {} in the store without a model will run again"
NOT_LOGGED = "no model was logged: {}"
LOGGING = "logging {} in MLflow"
SOME_NOT_LOGGED = "{} not logged: {}"


def check_can_log(study: Study, asked: str = "--log-model") -> None:
    """Raise RayparError if the study's trials keep no model that can be logged. `asked`: the flag that asks for it."""
    workload = study.workload
    if not isinstance(workload, Workload):
        problem = f"{asked}: workload {workload.name} is a {workload.kind}, whose model raypar can't access"
        hint = "call mlflow.pytorch.log_model in its code, or make a Workload of model and data"
        raise RayparError(problem, hint=hint)
    if workload.save is not None:
        problem = f"{asked}: workload {workload.name} saves its models itself"
        hint = "use --set keep_model=true: the trial's files in the store include the saved model"
        raise RayparError(problem, hint=hint)


def with_models(study: Study) -> Study:
    """Return the study with trials that keep their models."""
    return study if "keep_model" in study.space else replace(study, config={**study.config, "keep_model": True})


def other_trials(stored: Sequence[TrialResult], missing: Sequence[TrialSpec]) -> str:
    """Return the notice of stored results that lack only their model; empty if there are none."""
    identities = {spec.identity for spec in missing}
    kept = [replace(r.spec, config={**r.spec.config, "keep_model": True}) for r in stored if r.is_complete]
    num = sum(spec.identity in identities for spec in kept)
    return OTHER_TRIALS.format(units.counted(num, "trial")) if num else ""


def is_logged(study: Study, analysis: StudyAnalysis, results: Mapping[str, TrialResult], store: Store) -> bool:
    """Return whether the model of the current best trial is already logged."""
    best = _best(analysis, results)
    logged = _stored_json(store, study.name, FINAL_MODEL_FILE)
    return best is not None and logged.get("identity") == best.spec.identity


def log_final_model(
    study: Study,
    analysis: StudyAnalysis,
    results: Mapping[str, TrialResult],
    store: Store,
    recorder: Recorder,
    folder: Path,
    notice: Listener,
) -> None:
    """Log the model of the best trial of the best point. A failure only causes a notice.

    Args:
        folder: path of a temporary folder.
    """
    best = _best(analysis, results)
    if best is None:
        notice(Notice(NOT_LOGGED.format(f"no trial reported {analysis.question.metric}")))
        return
    if problem := _log(study, best, store, recorder, folder, BEST_MODEL):
        notice(Notice(NOT_LOGGED.format(problem)))
    else:
        recorder.add_artifact(FINAL_MODEL_FILE, json.dumps(_about(study, best)))


def unlogged(study: Study, results: Mapping[str, TrialResult], store: Store) -> list[TrialResult]:
    """Return the trials with a kept model that is not yet logged as one of all."""
    logged = _stored_json(store, study.name, ALL_MODELS_FILE)
    keeping = [r for r in results.values() if r.state.traits.is_usable and r.spec.config.get("keep_model")]
    return [r for r in keeping if logged.get(r.spec.identity) != r.started_at]


def log_all_models(
    study: Study,
    results: Mapping[str, TrialResult],
    store: Store,
    recorder: Recorder,
    folder: Path,
    notice: Listener,
) -> None:
    """Log the models of each trial whose models are not yet logged. Failures only cause a notice.

    Args:
        folder: path of a temporary folder.
    """
    logged = _stored_json(store, study.name, ALL_MODELS_FILE)
    problems: list[str] = []
    if not (missing := unlogged(study, results, store)):
        return
    notice(Notice(LOGGING.format(units.counted(len(missing), "model"))))
    for result in missing:
        identity = result.spec.identity
        where = folder / identity
        problem = _log(study, result, store, recorder, where, KEPT_MODEL) or next(
            filter(None, _log_checkpoints(study, result, store, recorder, where.with_name(f"{identity}-reports"))), ""
        )
        if problem:
            problems.append(problem)
        else:
            logged[identity] = result.started_at
    if len(problems) < len(missing):
        recorder.add_artifact(ALL_MODELS_FILE, json.dumps(logged))
    if problems:
        num_models = f"{len(problems)} of {units.counted(len(missing), 'model')}"
        notice(Notice(SOME_NOT_LOGGED.format(num_models, units.listed(list(dict.fromkeys(problems)), MAX_PROBLEMS))))


def _about(study: Study, result: TrialResult) -> dict[str, str]:
    return {"study": study.name, "trial": result.spec.label, "identity": result.spec.identity}


def _log(study: Study, result: TrialResult, store: Store, recorder: Recorder, folder: Path, name: str) -> str:
    """Log the model that a trial has kept. Return why that failed; empty if it did not."""
    kept, metric = store.model_folder(study.name, result.spec.identity), study.workload.metric_of()
    best = best_report(result.reports, metric.name, metric.mode)
    if kept is None or best is None:
        return f"{result.spec.label} kept none"
    return _log_report(study, result, recorder, kept, folder, name, best)


def _log_checkpoints(
    study: Study, result: TrialResult, store: Store, recorder: Recorder, folder: Path
) -> Iterator[str]:
    """Log the model of each report that a trial has kept, and yield for each why that failed; empty if it did not."""
    if not result.spec.config.get("keep_checkpoints"):
        return
    kept = store.model_folder(study.name, result.spec.identity, REPORTS_FOLDER)
    for index in range(len(result.reports)):
        if kept is not None and (there := kept / str(index)).is_dir():  # a report that diverged has none
            yield _log_report(study, result, recorder, there, folder / str(index), CHECKPOINT_MODEL, index)


def _log_report(
    study: Study, result: TrialResult, recorder: Recorder, kept: Path, folder: Path, name: str, report: int
) -> str:
    """Log the model in the folder `kept` as that of a report. Return why that failed; empty if it did not."""
    try:
        from raypar.track.client import save_model
        from raypar.train.saved_model import exported

        assert isinstance(study.workload, Workload)  # see `check_can_log`
        model, inputs, outputs = exported(study.workload, result.spec.config, kept)
        shutil.rmtree(folder, ignore_errors=True)
        save_model(model, inputs, outputs, folder, metadata=_about(study, result), versions=versions())
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first}; the weights of {result.spec.label} are kept"
    recorder.record_model(result, folder, name, report)
    return ""


def _best(analysis: StudyAnalysis, results: Mapping[str, TrialResult]) -> TrialResult | None:
    """Return the trial of the best point whose saved weights scored best."""
    point = chosen_point(analysis)
    mine = [r for r in results.values() if point and r.spec.point == point.point]
    return next(iter(best_first(mine, analysis.question.metric, analysis.question.mode)), None)


def final_test(
    study: Study, analysis: StudyAnalysis, results: Mapping[str, TrialResult], store: Store, recorder: Recorder
) -> StudyAnalysis:
    """Test the models of the best point's trials, and return the analysis with the outcome.

    The scores become metrics of the trials (``test/accuracy``), and a file of the execution for later reports.
    """
    if (point := chosen_point(analysis)) is None:
        return analysis
    mine = [r.spec for r in results.values() if r.is_measured and r.spec.point == point.point]
    folders = [(spec, store.model_folder(study.name, spec.identity)) for spec in mine]
    from raypar.train.evaluate import evaluate_test_split
    from raypar.train.saved_model import WEIGHTS_FILE

    assert isinstance(study.workload, Workload)  # others have no test split
    scores = {
        spec.identity: evaluate_test_split(study.workload, spec.config, folder)
        for spec, folder in folders
        if folder is not None and (folder / WEIGHTS_FILE).is_file()
    }
    if not scores:
        return analysis
    metrics = {identity: {f"test/{key}": value for key, value in of.items()} for identity, of in scores.items()}
    recorder.record_trial_metrics(metrics)
    recorder.record_trial_inputs([results[identity] for identity in scores], ("test",))
    before = last_final_test(store, study.name)
    look = before.look + 1 if before else 1
    outcome = FinalTest(point.point, analysis.question.metric, tuple(scores.values()), look=look)
    recorder.add_artifact(FINAL_TEST_FILE, json.dumps(asdict(outcome)))
    return with_final_test(analysis, outcome)
