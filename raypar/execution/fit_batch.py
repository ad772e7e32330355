"""Search for the largest batch per worker that fits into memory, at each point of a study.

The first size is the largest that fits by the model's shapes, and the second one its neighbour at the tolerance, which
confirms it. If that was wrong, or nothing is predicted, sizes double, and then close in by bisection. The memory peaks
of two sizes give a line (weights and optimizer state, plus a constant per sample) that predicts the next size. The
answer is a size that was run. A trial is two steps of the warm-up, which measures memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from raypar.analysis.question import PointKey, point_key
from raypar.execution.plan import ExecutionPlan
from raypar.execution.source import FixedList, NextTrials
from raypar.reporting.fit_batch import Largest
from raypar.study.options import Auto, memory_limit_bytes
from raypar.study.quantity import MEMORY
from raypar.study.space import Value, grid
from raypar.study.strategy import pipeline_size
from raypar.study.study import Study
from raypar.study.trial import TrialResult, TrialSpec, TrialState
from raypar.study.workload import Config, Workload

BATCH = "per_worker_batch_size"
TOLERANCE = 0.125  # a batch larger by up to this share may also fit
MAX_GROWTH = 8  # largest factor from one trial to the next
NUM_STEPS = 2


@dataclass(frozen=True)
class Attempted:
    """Batch size that was run. `peak_bytes` is per worker; None: unknown, or the batch does not fit."""

    fits: bool
    peak_bytes: float | None = None


def next_batch(
    tried: Mapping[int, Attempted],
    start: int,
    *,
    expected: int | None = None,
    limit_bytes: float | None = None,
    unit: int = 1,
    most: int | None = None,
) -> int | None:
    """Return the batch size to run next; None: the largest that fits is known within `TOLERANCE`, or none fits.

    Args:
        start: first size without `expected`.
        expected: largest size that fits by a prediction, which may be wrong; None: there is none.
        unit: divisor of all batch sizes.
        most: largest batch size that the training set allows; None: no limit.
    """
    top = max(unit, most // unit * unit) if most else math.inf
    fitting = max((size for size, each in tried.items() if each.fits), default=None)
    too_large = min((size for size, each in tried.items() if not each.fits), default=None)

    def rounded(size: float) -> int:
        return max(unit, int(min(size, top)) // unit * unit)

    def above(size: int) -> int:
        """Return a size that, if it does not fit, makes `size` the answer."""
        return rounded(size / (1 - TOLERANCE)) + unit

    closing = above(fitting) if fitting else 0
    if fitting and ((too_large is not None and too_large <= closing) or fitting >= top):
        return None
    guess = _guess(tried, limit_bytes) if fitting else None
    candidates = [] if guess else [rounded(start)]
    if expected:
        first = rounded(expected)
        candidates[:0] = [first, rounded(above(first)), rounded((first - unit) * (1 - TOLERANCE)) + unit]
    for size in candidates:
        if (fitting or 0) < size and (too_large is None or size < too_large):
            return size
    if fitting is None:
        assert too_large is not None
        return rounded(too_large / 2) if too_large > unit else None
    if guess is None:
        size = fitting * 2 if too_large is None else rounded(math.sqrt(fitting * too_large))
    else:
        size = closing if guess < closing else min(rounded(guess), fitting * MAX_GROWTH)
    if too_large is not None and size >= too_large:
        size = rounded(math.sqrt(fitting * too_large))
    return rounded(max(size, fitting + unit))


def _guess(tried: Mapping[int, Attempted], limit_bytes: float | None) -> float | None:
    """Return the batch size that reaches the limit on the line through the two largest sizes with a known peak."""
    peaks = sorted((size, each.peak_bytes) for size, each in tried.items() if each.peak_bytes)[-2:]
    if limit_bytes is None or len(peaks) < 2:
        return None
    (small, low_bytes), (large, high_bytes) = peaks
    slope = (high_bytes - low_bytes) / (large - small)
    return large + (limit_bytes - high_bytes) / slope if slope > 0 else None


def largest_of(peak_of: Callable[[int], float], start: int, limit_bytes: float, **rules: Any) -> int | None:
    """Return the largest size whose predicted peak is within the limit; None: none is.

    The line through the peaks of the last two sizes gives it within the tolerance of the search.

    Args:
        peak_of: bytes by size.
        rules: of `next_batch`.
    """
    tried: dict[int, Attempted] = {}
    while (size := next_batch(tried, start, limit_bytes=limit_bytes, **rules)) is not None:
        peak_bytes = peak_of(size)
        tried[size] = Attempted(peak_bytes <= limit_bytes, peak_bytes)
    fitting = [size for size, each in tried.items() if each.fits]
    too_large = [size for size, each in tried.items() if not each.fits]
    if not (fitting and too_large):
        return max(fitting, default=None)
    largest, above = max(fitting), min(too_large)
    low_bytes, high_bytes = (tried[size].peak_bytes or 0.0 for size in (largest, above))
    return largest + int((above - largest) * (limit_bytes - low_bytes) / (high_bytes - low_bytes))


@dataclass(frozen=True)
class BatchSearch(FixedList):
    """Search for the largest batch at each point of a study, and source of the trials.

    Attributes:
        study: study to run; `start` replaces the batch sizes in its space.
        start: batch size per worker of the first trial at a point without `expected`.
        expected: predicted largest batch size per worker, by point.
    """

    study: Study
    start: int
    expected: Mapping[PointKey, int] = field(default_factory=dict)

    adds_trials: ClassVar[bool] = True

    @classmethod
    def of(cls, study: Study, limit: str | None, start: int | None) -> BatchSearch:
        """Return the search for a study's points.

        Args:
            limit: ``max_memory`` of every trial; None: that of the study, else a GPU's memory.
            start: first batch size per worker; None: the study's smallest.
        """
        space = {key: domain for key, domain in study.space.items() if key not in ("batch_size", BATCH)}
        config = {key: value for key, value in study.config.items() if key not in ("batch_size", BATCH)}
        configs: list[Config] = [study.trial(point, 0).config for point in study.points()]
        smallest = min(int(config["batch_size"]) // config["num_workers"] for config in configs)
        first = max(1, start or smallest)
        only = replace(
            study,
            name=f"{study.name}-fit-batch",
            space={**space, BATCH: grid(first)},
            baseline={},
            config={
                **config,
                "num_warmup_steps": NUM_STEPS,
                "keep_model": False,
                **({"max_memory": limit} if limit else {}),
            },
            num_repeats=1,
            until="",
            budget=None,
            scheduler=None,
            description=f"How large a batch of {study.name} fits into memory?",
        )
        return cls(only, first)

    def expecting(self) -> BatchSearch:
        """Return the search with the predicted largest batch of each point that has a limit and a prediction."""
        expected = {point_key(point): self._expected(point) for point in self._points()}
        search = replace(self, expected={key: size for key, size in expected.items() if size})
        firsts = {search._next(point, {}) or self.start for point in self._points()}
        if len(firsts) > 1:
            return search
        return replace(search, study=replace(self.study, space={**self.study.space, BATCH: grid(*firsts)}))

    def _expected(self, point: Mapping[str, Value]) -> int | None:
        workload, limit_bytes = self.study.workload, memory_limit_bytes(self._first(point).config)
        if limit_bytes is None or not isinstance(workload, Workload):
            return None

        def peak_of(size: int) -> float:
            from raypar.predict.shapes import predict_memory

            config: Config = self.study.trial({**point, BATCH: size}, 0).config
            parts = predict_memory(workload, config, self.study.seed)
            least, most = parts.range_bytes(config["num_workers"], on_gpu=False)
            return (least + most) / 2 - (0 if config["device"] == "cpu" else parts.host_copy)

        try:
            return largest_of(peak_of, self.start, limit_bytes, **self._rules(point))
        except Exception:  # of the user's functions, which the first trial reports
            return None

    def first(self, study: Study, stored: Sequence[TrialResult], auto: Auto) -> tuple[TrialSpec, ...]:
        """Return the first trial of each point."""
        sizes = [(point, self._next(point, {})) for point in self._points()]
        return tuple(self.study.trial({**point, BATCH: size or self.start}, 0, auto=auto) for point, size in sizes)

    def next(self, plan: ExecutionPlan, results: Sequence[TrialResult]) -> NextTrials:
        """Return the next trial of each point whose answer is still open."""
        specs: list[TrialSpec] = []
        for point in self._points():
            tried = self._tried(point, results)
            if any(result.state is TrialState.FAILED for result in tried.values()):
                continue
            size = self._next(point, tried)
            if size is not None and size not in tried:
                specs.append(self.study.trial({**point, BATCH: size}, 0, auto=plan.auto))
        return NextTrials(tuple(specs), "a batch size at each point")

    def answers(self, results: Sequence[TrialResult]) -> tuple[Largest, ...]:
        """Return the answer so far at each point."""
        return tuple(self._answer(point, self._tried(point, results)) for point in self._points())

    def _points(self) -> list[dict[str, Value]]:
        """Return the study's points without their batch size."""
        return [{key: value for key, value in point.items() if key != BATCH} for point in self.study.points()]

    def _first(self, point: Mapping[str, Value]) -> TrialSpec:
        return self.study.trial({**point, BATCH: self.start}, 0)

    def _answer(self, point: Mapping[str, Value], tried: Mapping[int, TrialResult]) -> Largest:
        fitting = max((size for size, result in tried.items() if result.is_measured), default=None)
        too_large = min((size for size, r in tried.items() if r.state is TrialState.DOES_NOT_FIT), default=None)
        failure = next((r.reason for r in tried.values() if r.state is TrialState.FAILED), "")
        is_final = not failure and self._next(point, tried) is None
        config: Config = self._first(point).config
        return Largest(
            point,
            config["num_workers"],
            fitting,
            MEMORY.of(tried[fitting]) if fitting else None,
            too_large,
            tried[too_large].reason if too_large else "",
            len(tried),
            is_final=is_final,
            is_all_data=is_final and fitting is not None and too_large is None,
            failure=failure,
        )

    def _next(self, point: Mapping[str, Value], tried: Mapping[int, TrialResult]) -> int | None:
        attempted = {
            size: Attempted(r.is_measured, MEMORY.of(r) if r.is_measured else None) for size, r in tried.items()
        }
        limit_bytes, expected = memory_limit_bytes(self._first(point).config), self.expected.get(point_key(point))
        return next_batch(attempted, self.start, expected=expected, limit_bytes=limit_bytes, **self._rules(point))

    def _rules(self, point: Mapping[str, Value]) -> dict[str, Any]:
        """Return the `unit` and `most` of a point's sizes."""
        config: Config = self._first(point).config
        available = config["num_samples"] or self.study.workload.train_size(config)
        workers: int = config["num_workers"]
        unit: int = config["num_microbatches"] if pipeline_size(config) > 1 else 1
        return {"unit": unit, "most": int(available) // workers if available else None}

    def _tried(self, point: Mapping[str, Value], results: Sequence[TrialResult]) -> dict[int, TrialResult]:
        """Return the results at a point with the same settings, by batch size."""
        config = self._fixed(self._first(point))
        here = [r for r in results if BATCH in r.spec.config and self._fixed(r.spec) == config]
        return {_batch_of(r.spec.config): r for r in here}

    @staticmethod
    def _fixed(spec: TrialSpec) -> PointKey:
        follows = (BATCH, "batch_size", "device", "cpus_per_worker", "num_threads")  # from machines or batch
        return point_key({key: value for key, value in spec.config.items() if key not in follows})


def _batch_of(config: Config) -> int:
    return int(config[BATCH])
