"""What is said of a study while it runs: of a trial under way, of one that ended, of the best point so far."""

from __future__ import annotations

from collections.abc import Mapping

from raypar import units
from raypar.analysis.progress import SPEEDUP, SoFar
from raypar.study.trial import TrialResult, TrialSpec, TrialState, point_label


def progress_text(spec: TrialSpec, report: Mapping[str, float]) -> str:
    """Label, epoch, loss, accuracy and throughput of a running trial, as far as it told."""
    parts = [spec.label]
    if not report:
        return parts[0]
    if (epoch := report.get("epoch")) is not None:
        epochs = spec.config.get("epochs")
        parts.append(f"epoch {epoch:g}" + (f"/{epochs}" if epochs else ""))
    loss = next((report[key] for key in ("train_loss", "loss", "val_loss") if key in report), None)
    if loss is not None:
        parts.append(f"loss {units.number(loss, 3)}")
    if (accuracy := report.get("accuracy")) is not None:
        parts.append(f"accuracy {units.score('accuracy', accuracy)}")
    if (throughput := report.get("throughput_samples_per_s")) is not None:
        parts.append(units.rate(throughput))
    return "  ".join(parts)


def ended_text(result: TrialResult) -> str:
    """One line about a trial that has ended."""
    parts = [result.spec.label]
    if result.failure:
        parts.append(f"FAILED: {(result.failure.message.strip() or result.failure.kind).splitlines()[0]}")
        if result.failure.log_path:
            parts.append(f"log: {result.failure.log_path}")
        return "  ".join(parts)
    if result.state is not TrialState.FINISHED:
        parts.append(result.state.value)
    if result.train_time_s is not None:
        parts.append(f"trained {units.seconds(result.train_time_s)}")
    if result.wall_s is not None:
        parts.append(f"in all {units.seconds(result.wall_s)}")
    if (accuracy := result.final.get("accuracy")) is not None:
        parts.append(f"accuracy {units.score('accuracy', accuracy)}")
    return "  ".join(parts)


def so_far_text(best: SoFar) -> str:
    """``best so far 1.52× at num_workers=2``, and what is to be said against it."""
    if best.quantity == SPEEDUP:
        shown, other = units.ratio(best.estimate.value), "the baseline"
    else:
        shown, other = f"{best.quantity} {units.score(best.quantity, best.estimate.value)}", "the next"
    text = f"best so far {shown} at {point_label(best.point)}"
    if best.is_told:
        return text
    if best.estimate.num_samples == 1:
        return f"{text} (by one trial)"
    return f"{text} (not yet told from {other})"
