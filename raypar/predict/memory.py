"""Peak memory of a rank that has not run: its parts, and the range in which it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from raypar.errors import RayparError, cut, message_of
from raypar.study.memory_fit import MemoryFit, fit_of, gpu_range_bytes
from raypar.study.space import Value
from raypar.study.study import Study
from raypar.study.workload import CommandWorkload, Config, Workload

# Upper ends of the ranges on CPUs, which were measured (benchmarks/memory_predicted.py).
MOST_ALONE, MOST_IN_GANG = 1.02, 1.1


class NotPredictable(RayparError):
    """Memory that can't be predicted."""


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of a rank's memory when it needs the most, by what they hold.

    Attributes:
        parameters: parameters and buffers of the model, as far as this rank has them.
        gradients: gradients, and the buckets that send them.
        optimizer: the optimizer's state, and what its step needs.
        activations: what the forward pass keeps for the backward pass.
        temporary: everything else: results in use, gathered weights, messages.
        inputs: batches, before and after the data's transform, and the order of the epoch.
        host_copy: complete copy of the model in host memory, which strategies that split the model keep.
        uncertain: bytes that may be needed as well, on CPUs: messages that wait for a peer, and what the data of a
            script take.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporary: int = 0
    inputs: int = 0
    host_copy: int = 0
    uncertain: int = 0

    @property
    def total(self) -> int:
        """Bytes of all parts that are certainly needed."""
        parts: dict[str, int] = vars(self)
        return sum(parts.values()) - self.uncertain

    def range_bytes(self, num_workers: int, *, on_gpu: bool) -> tuple[float, float]:
        """Return the least and the most that a rank takes: of a GPU's memory, or of what torch allocates on a CPU."""
        if not on_gpu:
            return self.total, (self.total + self.uncertain) * (MOST_ALONE if num_workers == 1 else MOST_IN_GANG)
        return gpu_range_bytes(self.total - self.host_copy)


@dataclass(frozen=True)
class PointMemory:
    """Predicted peak memory of a worker at a point.

    Attributes:
        parts: bytes by what they hold; None: `problem` says why they can't be predicted.
        least_bytes, most_bytes: range in which the peak lies.
        fit: whether it fits into the GPU; None: none was given, or there is no prediction.
        problem: empty if there is a prediction.
    """

    point: Mapping[str, Value]
    num_workers: int
    parts: PeakMemory | None
    least_bytes: float | None = None
    most_bytes: float | None = None
    fit: MemoryFit | None = None
    problem: str = ""

    @classmethod
    def of(
        cls, point: Mapping[str, Value], num_workers: int, parts: PeakMemory, gpu_bytes: float | None
    ) -> PointMemory:
        """Return the prediction, on a GPU of this size or, with None, on CPUs."""
        least, most = parts.range_bytes(num_workers, on_gpu=gpu_bytes is not None)
        fit = None if gpu_bytes is None else fit_of((least, most), gpu_bytes)
        return cls(point, num_workers, parts, least, most, fit)


def predict_study_memory(study: Study, folder: Path, gpu_bytes: float | None) -> tuple[PointMemory, ...]:
    """Return the peak memory of a worker at each point of a study.

    Args:
        study: of a model or a command, without ranges.
        folder: of the study's file, in which commands run.
        gpu_bytes: memory of a GPU; None: on CPUs.

    Raises:
        RayparError: no point can be predicted, all for the same reason.
    """
    predicted, errors = [], []
    for point in study.points():
        spec = study.trial(point, 0)
        try:
            parts = _peak_memory(study, spec.config, spec.seed, folder)
        except Exception as error:  # from the user's data, model or loss
            errors.append(error)
            predicted.append(PointMemory(point, spec.placement.num_workers, None, problem=problem_of(error)))
        else:
            predicted.append(PointMemory.of(point, spec.placement.num_workers, parts, gpu_bytes))
    problems = {each.problem for each in predicted}
    if len(problems) == 1 and (problem := problems.pop()):
        own_hint = "trials measure theirs" if isinstance(errors[0], NotPredictable) else "--debug shows where"
        hint = getattr(errors[0], "hint", None) or own_hint
        raise RayparError(f"no memory can be predicted: {problem}", hint=hint) from errors[0]
    return tuple(predicted)


def problem_of(error: Exception) -> str:
    """Return why there is no prediction, from what was raised by it, or by the user's functions."""
    return error.message if isinstance(error, RayparError) else cut(f"{type(error).__name__}: {message_of(error)}")


def _peak_memory(study: Study, config: Config, seed: int, folder: Path) -> PeakMemory:
    from raypar.predict.script_shapes import predict_script_memory
    from raypar.predict.shapes import predict_memory

    if isinstance(study.workload, CommandWorkload):
        return predict_script_memory(study.workload.command, config, seed, folder)
    assert isinstance(study.workload, Workload)
    return predict_memory(study.workload, config, seed)
