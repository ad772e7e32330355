"""Results of an execution, stored as they arrive and then shown, and the record of the execution."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from raypar import units
from raypar.analysis.analyse import StudyAnalysis, analyse, pair_speedups, trusted_speedups
from raypar.analysis.comparison import Outcome
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import (
    PointKey,
    Question,
    after_first_sentence,
    current_results,
    first_sentence,
    point_key,
    question_to_dict,
)
from raypar.analysis.settle import Stopped
from raypar.analysis.verdict import BaselineComparison
from raypar.errors import BrokeOff, StoreError, WorkloadError
from raypar.execution.options import Options, ResumeFlags
from raypar.execution.origin import CodeOrigin
from raypar.execution.plan import ExecutionPlan
from raypar.masking import masked
from raypar.provenance import provenance
from raypar.reporting.export import answer_markdown
from raypar.reporting.points import estimates_of, standing_of
from raypar.reporting.view import StudyView
from raypar.run.locks import Holder
from raypar.run.runner import Event, Listener, Notice, TrialEnded, TrialStarted
from raypar.signals import Interrupted, uninterrupted
from raypar.study.blocks import repeats_text
from raypar.study.loader import LoadedStudy
from raypar.study.space import Choice, Domain, Grid
from raypar.study.study import Study
from raypar.study.trial import FailureKind, TrialResult
from raypar.track.names import short_label
from raypar.track.recorder import Execution, Recorder, Status
from raypar.track.runs import PointRun, run_params, swept_numbers
from raypar.track.view import MEDIAN
from raypar.train.job import ARTIFACT_FOLDER, CHECKPOINT_FOLDER, PROFILE_FOLDER
from raypar.units import value_of

PARTIAL = "Partial: {} when {} of {} were done."
BESIDE = "{} also runs trials on this machine: the trials of both are marked"
BREAKDOWN_FILE = "breakdown.json"
log = logging.getLogger(__name__)
SPEEDUP = "scaling/speedup"
COMPARED = ("speedup", "efficiency")  # estimates that compare the times of two points
ENDS = ("", "_low", "_high")  # of the metrics of an estimate: its value, and its interval's ends
MAX_CURVES = 6
MAX_NOTE_POINTS = 30
SUMMARY_AFTER_S = 60.0  # before the first summary, which takes time on a core that a trial may need
MAX_SUMMARY_SHARE = 0.01


@dataclass
class ExecutionOutcome:
    """Results of an execution, and how it ended.

    Attributes:
        log_dir: folder with the ranks' output, one folder per trial.
        results: results so far by identity, including failures and those of earlier executions.
        failures: failures of this execution, and of the stopped points that it did not try again.
        num_unsent: number of records that are not in the store yet.
        interrupted_by: number of the signal that ended it; None: no signal.
        broke_off: why it could not continue; None: it could.
        stopped: why a study that runs until it is settled got no further block, if its results don't show it.
    """

    plan: ExecutionPlan
    log_dir: Path
    results: dict[str, TrialResult]
    failures: list[TrialResult] = field(default_factory=list)
    num_unsent: int = 0
    interrupted_by: int | None = None
    broke_off: BrokeOff | None = None
    stopped: Stopped | None = None

    @cached_property
    def analysis(self) -> StudyAnalysis:
        """Analysis of the results at the time of the first access."""
        return analyse(self.plan.question, tuple(self.results.values()), self.stopped)

    @property
    def num_done(self) -> int:
        return len(self.results)

    @property
    def num_finished(self) -> int:
        """Number of trials that this execution finished."""
        before = {result.spec.identity for result in self.plan.done if result.is_complete}
        return sum(result.is_complete for identity, result in self.results.items() if identity not in before)

    @property
    def was_interrupted(self) -> bool:
        return self.interrupted_by is not None

    @property
    def status(self) -> Status:
        if self.was_interrupted:
            return "killed"
        return "failed" if self.failures or self.broke_off else "finished"

    @property
    def partial(self) -> str:
        """Sentence for a report on what is missing from it; empty if nothing is."""
        num_trials = self.plan.num_trials
        if not (self.was_interrupted or self.broke_off) or self.num_done >= num_trials:
            return ""
        how = "interrupted" if self.was_interrupted else "broke off"
        return PARTIAL.format(how, self.num_done, units.counted(num_trials, "trial"))

    @contextlib.contextmanager
    def noting_the_end(self) -> Iterator[None]:
        """Note a signal, or the loss of the runner or the store, if that ends the block. Other errors propagate."""
        try:
            yield
        except KeyboardInterrupt as error:
            self.interrupted_by = (error if isinstance(error, Interrupted) else Interrupted()).signal_number
        except (BrokeOff, StoreError) as error:  # every result is stored, or its loss was reported
            self.broke_off = self.broke_off or BrokeOff.by(error)


@dataclass
class ResultHandler:
    """Listener of a run that adds every result to an outcome and to the store, and then passes events to a view.

    Attributes:
        neighbours: returns the other studies currently running trials on this machine.
    """

    outcome: ExecutionOutcome
    recorder: Recorder
    view: Listener
    neighbours: Callable[[], frozenset[Holder]] = frozenset

    def __post_init__(self) -> None:
        self._question = self.outcome.plan.question
        results = tuple(self.outcome.results.values())
        self._paired: set[str] = set(pair_speedups(self._question, results))
        # Trials of a block that are compared with each other: those at a baseline, and the others.
        self._blocks: defaultdict[tuple[int, PointKey], tuple[list[TrialResult], list[TrialResult]]]
        self._blocks = defaultdict(lambda: ([], []))
        for result in results:
            self._compared_with(result)
        self._has_trained = False  # at least one trial has ended
        self._announced: frozenset[Holder] = frozenset()
        self._shared_with: defaultdict[str, set[str]] = defaultdict(set)  # by trial identity
        self._summary_due_s = time.monotonic() + SUMMARY_AFTER_S

    def __call__(self, event: Event) -> None:
        with uninterrupted():
            if isinstance(event, TrialStarted):
                self._note_neighbours(event.spec.identity)
            if isinstance(event, TrialEnded):
                failure = event.result.failure
                if failure is not None and failure.kind is FailureKind.INVALID:
                    # One message and no results, because every other trial would fail the same way.
                    error = WorkloadError(masked(failure.message))
                    raise BrokeOff.by(error) if self._has_trained else error
                self._has_trained = True
                self._note_neighbours(event.result.spec.identity)
                result = self._with_neighbours(_without_secrets(event.result))
                event = replace(event, result=replace(result, code=self.outcome.plan.code_of(result.spec)))
                self._keep(event)
                self._drop_checkpoints(event.result.spec.identity)
                self._summarise()
            self.view(event)
            if isinstance(event, TrialStarted):
                self.recorder.upload()  # on other cores than the trial's, before its timed steps

    def _note_neighbours(self, identity: str) -> None:
        """Note the other studies on this machine when a trial starts or ends."""
        neighbours = self.neighbours()
        for new in sorted(neighbours - self._announced, key=str):
            self.view(Notice(BESIDE.format(new)))
        self._announced |= neighbours
        self._shared_with[identity].update(neighbour.study for neighbour in neighbours)

    def _with_neighbours(self, result: TrialResult) -> TrialResult:
        studies = self._shared_with.pop(result.spec.identity)
        return replace(result, conditions=replace(result.conditions, shared_with=", ".join(sorted(studies))))

    def _summarise(self) -> None:
        """Update the study's answer in the store, but not after every trial."""
        if (begun_s := time.monotonic()) >= self._summary_due_s:
            results = tuple(self.outcome.results.values())
            record_summary(self.recorder, lambda: analyse(self._question, results), max_points=MAX_NOTE_POINTS)
            self._summary_due_s = begun_s + max(SUMMARY_AFTER_S, (time.monotonic() - begun_s) / MAX_SUMMARY_SHARE)

    def close(self) -> None:
        """Remove checkpoints of interrupted trials, which later executions can't use."""
        self._drop_checkpoints("*")

    def _drop_checkpoints(self, identity: str) -> None:
        """Remove checkpoints that failed ranks left on this machine. Ranks that finish remove their own."""
        for folder in self.outcome.log_dir.glob(f"{identity}/{CHECKPOINT_FOLDER}"):
            shutil.rmtree(folder, ignore_errors=True)

    def _keep(self, event: TrialEnded) -> None:
        folder = self.outcome.log_dir / event.result.spec.identity / ARTIFACT_FOLDER
        artifact_dir = folder if folder.is_dir() else None
        profile = event.result.profile
        if profile is not None and artifact_dir is not None:
            with contextlib.suppress(OSError):  # a full disk must not lose the result, which has the profile too
                (artifact_dir / PROFILE_FOLDER).mkdir(exist_ok=True)
                (artifact_dir / PROFILE_FOLDER / BREAKDOWN_FILE).write_text(json.dumps(profile.to_stored(), indent=1))
        self.recorder.record(event.result, artifact_dir=artifact_dir)
        result = replace(event.result, load=())
        if not result.is_complete:
            self.outcome.failures.append(result)
        self.outcome.results[result.spec.identity] = result
        if profile is not None:
            self.recorder.record_trial_metrics({result.spec.identity: profile.metrics()})
        self._record_speedups(result)

    def _compared_with(self, result: TrialResult) -> list[TrialResult]:
        """Return a new result with those that it is compared with, however many others there are."""
        question = self._question
        for current in current_results(question, [result]).results if question.baseline else ():
            baseline = point_key(question.baseline_of(current.spec.point))
            at_baseline, others = self._blocks[current.spec.repeat, baseline]
            is_baseline = point_key(current.spec.point) == baseline
            (at_baseline if is_baseline else others).append(current)
            return [*others, current] if is_baseline else [*at_baseline, current]
        return []

    def _record_speedups(self, result: TrialResult) -> None:
        results, base = self.outcome.results, self._question.baseline.get("num_workers")
        # MLflow sorts by them, with nothing beside a number that says how far it can be trusted.
        speedups = trusted_speedups(self._question, self._compared_with(result))
        metrics: dict[str, dict[str, float]] = {}
        for identity in speedups.keys() - self._paired:
            metrics[identity] = {"speedup": _rounded(speedups[identity])}
            if isinstance(base, int):
                num_workers = results[identity].spec.placement.num_workers
                metrics[identity]["efficiency"] = _rounded(speedups[identity] * base / num_workers)
        self._paired |= metrics.keys()
        self.recorder.record_trial_metrics(metrics)


def _without_secrets(result: TrialResult) -> TrialResult:
    """Mask passwords and keys in the error of a trial's code."""
    if (failure := result.failure) is None:
        return result
    failure = replace(failure, message=masked(failure.message), traceback=masked(failure.traceback))
    return replace(result, failure=failure)


def describe(study: Study, command: Sequence[str] = ()) -> str:
    """Describe a study in Markdown: description without the question, workload, space, baseline, metric, command."""
    workload, metric = study.workload, study.judged_by
    what = "; ".join(text for text in (workload.description, workload.dataset) if text)
    points = len(study.points())
    timed = f"{units.counted(points, 'point')} × {repeats_text(study)}, timed"
    facts = {
        "Trains": f"`{workload.name}`" + (f" ({what})" if what else ""),
        "Sweeps": "; ".join(f"`{key}` {domain_text(domain)}" for key, domain in study.space.items()) or "nothing",
        "Runs": f"{study.num_trials * points} trials at drawn points" if study.is_search else timed,
        "Compares with": _pairs(study.baseline) + " (otherwise equal)" if study.baseline else "",
        "Judges by": f"{metric.name} ({metric.text.partition(', ')[2]})",
        "Holds fixed": _pairs(study.config),
        "Run by": f"`{' '.join(command)}`" if command else "",
    }
    lines = "\n".join(f"- **{name}:** {text}" for name, text in facts.items() if text)
    return "\n\n".join(filter(None, [after_first_sentence(study.description), lines]))


def domain_text(domain: Domain) -> str:
    """Return ``1, 2, 4`` for a grid, and other domains as in a study file, for example ``loguniform(0.001, 1)``."""
    match domain:
        case Grid(values):
            return ", ".join(map(value_of, values))
        case Choice(values):
            return f"choice({', '.join(map(value_of, values))})"
        case _:
            return f"{type(domain).__name__.lower()}({value_of(domain.low)}, {value_of(domain.high)})"


def _pairs(chosen: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}` {value_of(value)}" for key, value in chosen.items())


def execution_record(loaded: LoadedStudy, options: Options, question: Question, answer: str = "") -> Execution:
    """Return a new execution of the study, with everything that ``raypar store resume`` needs.

    Args:
        answer: answer so far, from `note_of`; empty: none.
    """
    study, started_at = loaded.study, time.time()
    return Execution(
        uid=uuid.uuid4().hex,
        study=study.name,
        started_at=started_at,
        params={
            "workload": study.workload.name,
            "num_repeats": str(study.num_repeats),
            "seed": str(study.seed),
            **{key: masked(str(value)) for key, value in study.config.items()},
            **{f"space.{key}": masked(domain_text(domain)) for key, domain in study.space.items()},
            **{f"baseline.{key}": masked(str(value)) for key, value in study.baseline.items()},
        },
        tags={
            **provenance(loaded.path, options.command),
            "raypar.question": json.dumps(question_to_dict(question), separators=(",", ":")),
            CodeOrigin.TAG: masked(CodeOrigin.of(loaded.path, options.tracking_uri, loaded.code).to_json()),
            ResumeFlags.TAG: ResumeFlags.of(loaded, options, started_at).to_json(),
        },
        description=masked(study.description),
        about=masked(describe(study, options.command)),
        answer=answer or masked(first_sentence(study.description)),
        score=study.judged_by.name,
        mode=study.judged_by.mode,
        compares=bool(study.baseline),
        has_points=not study.is_search,
        study_file=loaded.path,
        study_source=loaded.source,
    )


def record_summary(
    recorder: Recorder, analysis_of: Callable[[], StudyAnalysis], *, max_points: int | None = None
) -> None:
    """Record a study's answer and points. An error in the analysis is only logged.

    Args:
        max_points: if there are more points, record none of them, since each takes 20 ms; None: no limit.
    """
    try:
        analysis = analysis_of()
        has_few = max_points is None or len(analysis.points) <= max_points
        answer, points = note_of(analysis), point_runs(analysis) if has_few else []
    except Exception:
        log.exception("the study's answer was not stored")
    else:
        recorder.record_summary(answer, points)


def note_of(analysis: StudyAnalysis) -> str:
    """Return a study's answer with its caveats, in Markdown for MLflow's pages."""
    # MLflow shows tables without gaps between columns.
    view = StudyView(analysis)
    text = re.sub(r"(?<![-:]) \| ", "&emsp; | ", answer_markdown(view, MAX_NOTE_POINTS))
    return masked("\n\n".join(filter(None, [text, view.caveats, view.brief_legend])))


def point_runs(analysis: StudyAnalysis) -> list[PointRun]:
    """Return the points with results for MLflow; none for a search, whose trials are its points."""
    comparisons = analysis.verdict.comparisons
    compared = {
        point_key(c.point.point): f"{_outcome(analysis, c)}: {units.ratio_interval(c.point.speedup)}"
        for c in comparisons
    }
    runs = []
    for point in analysis.points if not analysis.question.is_search else ():
        if point.results:
            standing = standing_of(analysis, point)
            compared_as = "baseline" if point.is_baseline else compared.get(point_key(point.point), "")
            note = [standing, compared_as, str(point.outcome or "")]
            spec = point.results[-1].spec
            tags = {
                "raypar.recommended": "yes" if standing == "recommended" else "no",
                "mlflow.note.content": "; ".join(filter(None, note)),
            }
            metrics = {**swept_numbers(spec), **_medians(analysis, point)}
            withdrawn = () if _has_comparison(analysis, point) else [f"{MEDIAN}{k}{e}" for k in COMPARED for e in ENDS]
            name = short_label(point.point)
            runs.append(PointRun(spec.point_identity, name, run_params(spec), metrics, tags, withdrawn))
    return runs


def _has_comparison(analysis: StudyAnalysis, point: PointAnalysis) -> bool:
    """Return whether MLflow may sort a point by its speedup."""
    return point_key(point.point) not in analysis.evidence.doubtful


def _outcome(analysis: StudyAnalysis, compared: BaselineComparison) -> Outcome:
    return compared.outcome if _has_comparison(analysis, compared.point) else Outcome.DISTURBED


def _medians(analysis: StudyAnalysis, point: PointAnalysis) -> dict[str, float]:
    """Return a point's estimates with the ends of their intervals, rounded, and the number of its finished trials.

    Omits ends of intervals that are only noise, and comparisons of doubtful times, by which MLflow would sort.
    """
    values: dict[str, float] = {"num_trials": len(point.samples)}
    for key, estimate in estimates_of(analysis, point).items():
        if estimate is not None and (key not in COMPARED or _has_comparison(analysis, point)):
            bounds = (None, None) if units.is_noise(estimate) else (estimate.low, estimate.high)
            ends = zip(ENDS, (estimate.value, *bounds), strict=True)
            values |= {f"{MEDIAN}{key}{end}": value for end, value in ends if value is not None}
    return {key: _rounded(value) for key, value in values.items() if math.isfinite(value)}


def _rounded(value: float) -> float:
    """Round to four significant digits for MLflow's tables."""
    return float(f"{value:.4g}")


def speedup_curves(analysis: StudyAnalysis) -> list[tuple[str, float, int]]:
    """Return the speedup of each setting as (key, value, number of workers), which MLflow draws as a curve.

    MLflow has no error bars, so at each number of workers the curve visits both ends of the interval. Points whose
    interval is only noise are omitted, as are points whose times are doubtful.
    """
    curves: dict[str, list[tuple[float, int]]] = {}
    for point in analysis.points:
        if point.speedup is None or units.is_noise(point.speedup) or not _has_comparison(analysis, point):
            continue
        if "num_workers" in point.point and point.num_workers is not None:
            setting = {key: value for key, value in point.point.items() if key != "num_workers"}
            key = f"{SPEEDUP} {short_label(setting).replace('=', ' ')}" if setting else SPEEDUP
            median, low, high = point.speedup.value, point.speedup.low, point.speedup.high
            path = [median] if low is None or high is None or low == high else [median, low, high, median]
            curves.setdefault(key, []).extend((value, point.num_workers) for value in path)
    shown = list(curves.items())[:MAX_CURVES]
    return [(key, value, num_workers) for key, curve in shown for value, num_workers in curve]
