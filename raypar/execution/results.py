"""Results of an execution as they come in: stored first, then shown."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from raypar.analysis.analyse import StudyAnalysis, pair_speedups
from raypar.analysis.breakdown import Profile, profile_of
from raypar.analysis.question import question_of
from raypar.analysis.stats import Estimate
from raypar.execution.options import Options, ResumeFlags
from raypar.masking import masked
from raypar.provenance import provenance
from raypar.run.runner import Event, Listener, Notice, TrialEnded, TrialStarted
from raypar.signals import uninterrupted
from raypar.study.loader import LoadedStudy
from raypar.study.space import Choice, Domain, Grid, Value
from raypar.study.study import Study
from raypar.study.trial import TrialResult, TrialState
from raypar.track.recorder import Execution, Recorder
from raypar.track.system_metrics import SystemMonitor
from raypar.track.view import IDEAL
from raypar.train.job import ARTIFACT_FOLDER, CHECKPOINT_FOLDER, PROFILE_FOLDER
from raypar.units import value_of

NOT_KEPT = "{}: what it kept beside its numbers was not unpacked whole, {}"
BREAKDOWN_FILE = "breakdown.json"


class Keeper:
    """Listens to a run: keeps and stores every result, and passes everything on to whoever shows it."""

    def __init__(
        self,
        study: Study,
        results: dict[str, TrialResult],
        recorder: Recorder,
        view: Listener,
        log_dir: Path,
        monitor: SystemMonitor | None = None,
        code: Mapping[str, str] | None = None,
    ) -> None:
        self._monitor, self._code = monitor, code or {}
        self._question = question_of(study)
        self._results, self._recorder, self._view, self._log_dir = results, recorder, view, log_dir
        self._paired: set[str] = set(pair_speedups(self._question, tuple(results.values())))
        self.failures: list[TrialResult] = []

    def __call__(self, event: Event) -> None:
        with uninterrupted():
            if isinstance(event, TrialStarted) and self._monitor:
                self._monitor.begin(event.spec.identity)
            if isinstance(event, TrialEnded):
                event = replace(event, result=replace(_without_secrets(event.result), code=self._code))
                self._keep(event)
                self._drop_checkpoints(event.result.spec.identity)
            self._view(event)

    def close(self) -> None:
        """The run is over: what an interrupted trial has left to go on from is of no use to a later one."""
        self._drop_checkpoints("*")

    def _drop_checkpoints(self, identity: str) -> None:
        """Ranks that reach their end remove their own; those of failed ones are left, on this machine."""
        for folder in self._log_dir.glob(f"{identity}/{CHECKPOINT_FOLDER}"):
            shutil.rmtree(folder, ignore_errors=True)

    def _keep(self, event: TrialEnded) -> None:
        system = self._monitor.end(event.result.spec.identity) if self._monitor else ()
        artifact_dir = self._artifact_dir(event)
        result, profile = _with_profile(event.result)
        if profile is not None and artifact_dir is not None:
            (artifact_dir / PROFILE_FOLDER).mkdir(exist_ok=True)
            (artifact_dir / PROFILE_FOLDER / BREAKDOWN_FILE).write_text(json.dumps(profile.to_dict(), indent=1))
        self._recorder.record(result, artifact_dir=artifact_dir, system=system)
        if profile is not None:
            self._recorder.record_trial_metrics({result.spec.identity: profile.metrics()})
        if result.state is TrialState.FAILED:
            self.failures.append(result)
        self._results[result.spec.identity] = result
        self._record_speedups()

    def _artifact_dir(self, ended: TrialEnded) -> Path | None:
        """The folder of what the trial has kept beside its numbers, if it has."""
        folder = self._log_dir / ended.result.spec.identity / ARTIFACT_FOLDER
        if ended.artifacts:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                # Not compressed, as `raypar.train.saved_model.pack` makes it: a few bytes can't become a full disk.
                with tarfile.open(fileobj=io.BytesIO(ended.artifacts), mode="r:") as tar:
                    tar.extractall(folder, filter=_plain_file)
            except (tarfile.TarError, OSError, ValueError) as error:
                self._view(Notice(NOT_KEPT.format(ended.result.spec.label, f"{type(error).__name__}: {error}")))
        return folder if folder.is_dir() else None

    def _record_speedups(self) -> None:
        speedups = pair_speedups(self._question, tuple(self._results.values()))
        fresh = {identity: s for identity, s in speedups.items() if identity not in self._paired}
        if not fresh:
            return
        self._paired |= fresh.keys()
        metrics: dict[str, Mapping[str, float]] = {}
        for identity, speedup in fresh.items():
            spec = self._results[identity].spec
            metrics[identity] = {"speedup": speedup}
            base = self._question.baseline.get("num_workers")
            if isinstance(base, int):
                metrics[identity] = {"speedup": speedup, "efficiency": speedup * base / spec.placement.num_workers}
        self._recorder.record_trial_metrics(metrics)


def _plain_file(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """What a trial keeps are files in folders: no links, no devices, none with holes, none outside."""
    if not (member.isfile() or member.isdir()) or member.issparse():
        return None
    return tarfile.data_filter(member, folder)


def _without_secrets(result: TrialResult) -> TrialResult:
    """The result; what its code raised may quote a password or a key."""
    if (failure := result.failure) is None:
        return result
    return replace(
        result, failure=replace(failure, message=masked(failure.message), traceback=masked(failure.traceback))
    )


def _with_profile(result: TrialResult) -> tuple[TrialResult, Profile | None]:
    """The result, with what its ranks recorded taken together."""
    recorded = result.profile.get("recorded")
    profile = profile_of(recorded, result.spec.config) if recorded else None
    return replace(result, profile=profile.to_dict() if profile else {}), profile


def about(study: Study, command: Sequence[str] = ()) -> str:
    """Question, workload, space, baseline, repeats, metric, fixed hyperparameters and the command that ran it last."""
    workload = study.workload
    what = "; ".join(text for text in (workload.description, workload.dataset) if text)
    facts = {
        "Trains": f"`{workload.name}`" + (f" ({what})" if what else ""),
        "Sweeps": "; ".join(f"`{key}` {domain_text(domain)}" for key, domain in study.space.items()) or "nothing",
        "Runs": _runs(study),
        "Compares with": _pairs(study.baseline) + " (else alike)" if study.baseline else "",
        "Judges by": f"{study.metric} (the {'higher' if study.mode == 'max' else 'lower'} the better)",
        "Holds fixed": _pairs(study.config),
        "Run by": f"`{' '.join(command)}`" if command else "",
    }
    lines = "\n".join(f"- **{name}:** {text}" for name, text in facts.items() if text)
    return f"{study.description}\n\n{lines}" if study.description else lines


def _runs(study: Study) -> str:
    points = len(study.points())
    if study.is_search:
        return f"{study.num_trials * points} trials, whose points are drawn"
    return f"{points} point{'s' * (points > 1)} × {study.num_repeats} repeat{'s' * (study.num_repeats > 1)}, timed"


def domain_text(domain: Domain) -> str:
    """``1, 2, 4`` for a grid; what a search draws from as a study file says it: ``loguniform(0.001, 1)``."""
    match domain:
        case Grid(values):
            return ", ".join(map(value_of, values))
        case Choice(values):
            return f"choice({', '.join(map(value_of, values))})"
        case _:
            return f"{type(domain).__name__.lower()}({value_of(domain.low)}, {value_of(domain.high)})"


def _pairs(chosen: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}` {value_of(value)}" for key, value in chosen.items())


def execution_record(loaded: LoadedStudy, options: Options) -> Execution:
    """A new execution of the study, with all that ``raypar resume`` needs to go on with it."""
    study = loaded.study
    started_at = datetime.now().timestamp()
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
            "raypar.question": json.dumps(asdict(question_of(study)), separators=(",", ":")),
            ResumeFlags.TAG: ResumeFlags.of(loaded, options, started_at).to_json(),
        },
        description=masked(study.description),
        about=masked(about(study, options.command)),
        score=study.metric,
        compares=bool(study.baseline),
        study_file=loaded.path,
        study_source=loaded.source,
    )


def scaling_metrics(analysis: StudyAnalysis) -> list[tuple[str, float, int]]:
    """Speedup, efficiency and serial fraction as metrics over the number of workers, so that MLflow draws curves.

    Beside them the ideal speedup, where the baseline is a number of workers.
    """
    found: list[tuple[str, float, int]] = []

    def add(name: str, point: Mapping[str, Value], estimate: Estimate, num_workers: int) -> None:
        name = f"scaling/{name}" + "".join(f" {k} {v}" for k, v in point.items() if k != "num_workers")
        found.append((name, estimate.value, num_workers))
        for side, value in (("low", estimate.low), ("high", estimate.high)):
            if value is not None:
                found.append((f"{name} {side}", value, num_workers))

    for point in analysis.points:
        for name, estimate in (("speedup", point.speedup), ("efficiency", point.efficiency)):
            if estimate is not None and point.num_workers is not None:
                add(name, point.point, estimate, point.num_workers)
    for group in analysis.worker_groups:
        for num_workers, fraction in group.karp_flatt.items():
            add("karp_flatt", group.point, fraction, num_workers)
    base = analysis.baseline.get("num_workers")
    if isinstance(base, int):
        counts = {point.num_workers for point in analysis.points if point.speedup is not None and point.num_workers}
        found += [(IDEAL, num_workers / base, num_workers) for num_workers in sorted(counts)]
    return found
