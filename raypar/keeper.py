"""What happens to a trial's result when it ends: kept, stored, and only then shown."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from raypar.analysis.analyse import pair_speedups
from raypar.analysis.breakdown import Profile, profile_of
from raypar.analysis.question import question_of
from raypar.masking import masked
from raypar.run.runner import ARTIFACT_FOLDER, Event, Listener, Notice, TrialEnded, TrialStarted
from raypar.signals import uninterrupted
from raypar.study.study import Study
from raypar.study.trial import TrialResult, TrialState
from raypar.track.recorder import Recorder
from raypar.track.system_metrics import SystemMonitor
from raypar.train.job import CHECKPOINT_FOLDER, PROFILE_FOLDER

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
