"""What an execution leaves in the store about itself: what was asked and how, and what came out, as metrics."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime

from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.question import question_of
from raypar.analysis.stats import Estimate
from raypar.masking import masked
from raypar.options import Options, ResumeFlags
from raypar.provenance import provenance
from raypar.study.about import about, domain_text
from raypar.study.loader import LoadedStudy
from raypar.study.space import Value
from raypar.track.recorder import Execution
from raypar.track.view import IDEAL


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
