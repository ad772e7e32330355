"""Published scaling series: reading of `published/scaling.csv`, and of other files with its columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from raypar.analysis.laws import Scaling
from raypar.predict.network import Floats
from raypar.predict.overhead import (
    FEATURES,
    Deviations,
    Fabric,
    Facts,
    GangSize,
    Link,
    MeasuredEfficiency,
    ModelFamily,
    Prior,
    features,
    log_overhead,
)
from raypar.study.strategy import Exchange

Kind = TypeVar("Kind", Exchange, Link, Fabric)
SERIES_FILE = Path(__file__).with_name("published") / "scaling.csv"
COLUMNS = ("series_id", "source_repo", "num_devices", "efficiency")  # those without which a file can't be judged
STEP_TIMES_S = (1e-3, 100.0)  # beyond these, the batch and the rate are not in the same unit
PRIOR_COEFFICIENT = 0.5  # standard deviation of a coefficient before the fit; that of the constant is four times it
USUAL_LOG_OVERHEAD = -1.5
# Before the fit, the logarithm of each standard deviation is normal, with this mean and a deviation of 1.
USUAL_DEVIATIONS = Deviations(source=0.5, training=0.5, slope=0.2, noise=0.2, efficiency=0.02)

# Words in a lower-case cell, and what they stand for; the first that fits counts.
_EXCHANGES = (
    (("pipeline", "tensor", "tp"), Exchange.MODEL),
    (("fsdp", "zero"), Exchange.SHARDED),
    (("cpu", "kvstore local", "gloo", "multi-gpu", "naive", "mirrored"), Exchange.HOST),
)
_LINKS = ((("nvlink", "nvsw", "infinity"), Link.FAST), (("pci",), Link.BUS))
_FABRICS = ((("tcp", "ethernet"), Fabric.TCP), (("infiniband", "rdma"), Fabric.RDMA))
_FAMILIES = {"cnn": ModelFamily.CONVOLUTIONAL, "detection": ModelFamily.CONVOLUTIONAL, "rnn": ModelFamily.RECURRENT}


@dataclass(frozen=True)
class Series:
    """Figures of one training that differ only in their number of workers, from the smallest.

    Attributes:
        efficiencies: of each gang, over the first.
    """

    name: str
    source: str
    facts: Facts
    gangs: tuple[GangSize, ...]
    efficiencies: tuple[float, ...]

    def measured(self, count: int) -> list[MeasuredEfficiency]:
        """Return the first `count` figures, without the smallest, which the others are compared with."""
        return [MeasuredEfficiency(g, e) for g, e in zip(self.gangs[1:count], self.efficiencies[1:count], strict=True)]


def read_series(path: Path = SERIES_FILE) -> list[Series]:
    """Return the series of a file that are not marked with `caution` and have at least two counts.

    Raises:
        SystemExit: a column is missing.
    """
    frame = pd.read_csv(path)
    if missing := [name for name in COLUMNS if name not in frame]:
        raise SystemExit(f"{path}: no column {', '.join(missing)}")
    if "caution" in frame:
        frame = frame[~frame["series_id"].isin(frame.loc[frame["caution"] == 1, "series_id"])]
    series = []
    for name, rows in frame.groupby("series_id", sort=True):
        ordered = rows.sort_values("num_devices")
        if len(ordered) > 1:
            series.append(_series(str(name), ordered.to_dict("records")))
    return series


def _series(name: str, rows: Sequence[Mapping[str, object]]) -> Series:
    first = rows[0]
    exchange = _meaning(_EXCHANGES, first, "strategy") or Exchange.ALL_REDUCE
    if _text(first, "strategy") == "data parallel":  # of one process, as in torch's DataParallel
        exchange = Exchange.HOST
    facts = Facts(
        scaling=_scaling(first),
        exchange=exchange,
        within=_meaning(_LINKS, first, "intra_node_link"),
        between=_meaning(_FABRICS, first, "inter_node_network"),
        family=_FAMILIES.get(_text(first, "model_family"), ModelFamily.OTHER),
        step_time_s=_step_time_s(first),
        num_parameters=(_number(first, "params_millions") or 0) * 1e6 or None,
    )
    gangs = tuple(GangSize(int(_number(row, "num_devices") or 1), _num_nodes(row)) for row in rows)
    source = _text(first, "source_repo")
    return Series(name, source, facts, gangs, tuple(_number(row, "efficiency") or math.nan for row in rows))


def _text(row: Mapping[str, object], column: str) -> str:
    return str(row.get(column, "")).strip().lower()


def _number(row: Mapping[str, object], column: str) -> float | None:
    try:
        value = float(str(row[column]))
    except (KeyError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _meaning(words: Sequence[tuple[Sequence[str], Kind]], row: Mapping[str, object], column: str) -> Kind | None:
    text = _text(row, column)
    return next((kind for parts, kind in words if any(part in text for part in parts)), None)


def _scaling(row: Mapping[str, object]) -> Scaling | None:
    mode = _text(row, "batch_mode")
    if mode in ("weak", "strong"):
        return Scaling(mode)
    # The time of all epochs: the work is the same, and so it tells as little about the batch of a worker.
    return Scaling.STRONG if _text(row, "rate_rule") == "time_fixed_work" else None


def _step_time_s(row: Mapping[str, object]) -> float | None:
    rate, batch = _number(row, "throughput"), _number(row, "per_device_batch")
    if rate is None or batch is None or "/s" not in _text(row, "throughput_unit"):
        return None
    each = {"total": rate / (_number(row, "num_devices") or 1), "per_device": rate}.get(_text(row, "rate_rule"))
    step_time_s = batch / each if each else 0.0
    return step_time_s if STEP_TIMES_S[0] < step_time_s < STEP_TIMES_S[1] else None


def _num_nodes(row: Mapping[str, object]) -> int:
    nodes = _number(row, "num_nodes")
    if nodes is None:
        nodes = math.ceil((_number(row, "num_devices") or 1) / (_number(row, "devices_per_node") or 8))
    return max(1, int(nodes))


def fit_prior(series: Sequence[Series]) -> Prior:
    """Fit the Gaussian process: coefficients in closed form, standard deviations by their largest posterior density."""
    rows = [(s, gang, e) for s in series for gang, e in zip(s.gangs[1:], s.efficiencies[1:], strict=True)]
    matrix = np.concatenate([features(s.facts, s.gangs[0], s.gangs[1:]) for s in series])
    growth = matrix[:, list(FEATURES).index("growth")]
    efficiencies = np.array([e for _, _, e in rows])
    values = log_overhead(efficiencies) - USUAL_LOG_OVERHEAD
    sources, names = (np.array(column) for column in zip(*((s.source, s.name) for s, _, _ in rows), strict=True))
    same_source, same_series = sources[:, None] == sources, names[:, None] == names
    before = np.full(matrix.shape[1], PRIOR_COEFFICIENT**2)
    before[0] *= 16
    of_coefficients = matrix @ (before[:, None] * matrix.T)
    usual = _logs(USUAL_DEVIATIONS)

    def covariance(logs: Floats) -> Floats:
        of = Deviations(*np.exp(logs))
        terms = same_source * of.source**2 + same_series * of.within_training(growth)
        return np.asarray(terms + np.diag(of.noise_variances(1 / efficiencies - 1, of.efficiency)))

    def loss(logs: Floats) -> float:
        lower = np.linalg.cholesky(covariance(logs) + of_coefficients)
        errors = np.linalg.solve(lower, values)
        return float(errors @ errors / 2 + np.log(np.diag(lower)).sum() + np.sum((logs - usual) ** 2) / 2)

    logs = minimize(loss, usual, method="L-BFGS-B", options={"maxiter": 30}).x
    weighted = np.linalg.solve(covariance(logs), np.column_stack([matrix, values]))
    posterior = np.linalg.inv(matrix.T @ weighted[:, :-1] + np.diag(1 / before))
    mean = posterior @ (matrix.T @ weighted[:, -1])
    mean[0] += USUAL_LOG_OVERHEAD
    return Prior(mean, posterior, Deviations(*map(float, np.exp(logs))), len(series))


def _logs(deviations: Deviations) -> Floats:
    return np.log([deviations.source, deviations.training, deviations.slope, deviations.noise, deviations.efficiency])
