"""How well raypar predicts the efficiency of published trainings that its prior was not fitted to.

The prior is fitted to one half of the series, by source (a repository's series stay together), and judged on the other,
and the other way round; sources are dealt to the halves by their number of series. Of each series, the efficiency at
the largest count is predicted from the smallest count alone, and again from the two smallest. The interval score
(Gneiting and Raftery, "Strictly Proper Scoring Rules, Prediction, and Estimation", 2007) is the width of a 90 % range
plus 20 times the distance of a figure outside it, in points of efficiency. It is compared with a naive prediction that
is fitted on the same half: from one count, the quantiles of the efficiencies with the same network and number of
workers; from two, the line through their efficiencies over the logarithm of the count, with the quantiles of its
errors.

--series FILE.csv judges another file with the columns of `published/scaling.csv` by the prior that raypar ships,
without fitting. --stored FOLDER judges the stored studies of a folder: each worker count but the smallest is left out
and predicted from the others, as `raypar model predict STUDY` does. networks.py judges emulated networks. --fit fits
the shipped prior to all series and writes it.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from common import begin, parser_for, print_row, times
from published_series import Series, fit_prior, read_series

from raypar.cli.candidates import NetworkFlags, PredictRequest, of_study
from raypar.errors import RayparError
from raypar.predict.overhead import LEVEL, PRIOR_FILE, EfficiencyRange, Prior, predict_efficiency
from raypar.track.store import default_tracking_uri, study_names

POINTS = 100
QUANTILES = ((1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2)
MISS_FACTOR = 2 / (1 - LEVEL)
MIN_ALIKE = 5  # series of a naive prediction; with fewer, all with as many or as few nodes count
COUNT_CLASSES = (2, 4, 8)
MANY = 1024  # workers: more than a stored study has
Predictor: TypeAlias = Callable[[Series, int], EfficiencyRange]


@dataclass(frozen=True)
class Case:
    """A predicted efficiency beside the measured one."""

    name: str
    measured: float
    predicted: EfficiencyRange

    @property
    def error(self) -> float:
        return abs(self.predicted.median - self.measured)

    @property
    def is_held(self) -> bool:
        return self.predicted.low <= self.measured <= self.predicted.high

    @property
    def score(self) -> float:
        miss = max(0.0, self.predicted.low - self.measured, self.measured - self.predicted.high)
        return self.predicted.width + MISS_FACTOR * miss


def by_prior(prior: Prior) -> Predictor:
    """Return raypar's predictor."""

    def predict(series: Series, num_measured: int) -> EfficiencyRange:
        measured = series.measured(num_measured)
        return predict_efficiency(prior, series.facts, series.gangs[0], series.gangs[-1:], measured)[0]

    return predict


def naive(fitted: Sequence[Series]) -> Predictor:
    """Return the naive predictor of some series."""
    from_two = [s for s in fitted if len(s.gangs) > 2]
    errors = [s.efficiencies[-1] - _line(s) for s in from_two]

    def predict(series: Series, num_measured: int) -> EfficiencyRange:
        if num_measured == 2:
            low, median, high = np.clip(_line(series) + np.quantile(errors, QUANTILES), 0.0, 1.1)
            return EfficiencyRange(float(median), float(low), float(high))
        alike = [s.efficiencies[-1] for s in fitted if _kind(s) == _kind(series)]
        if len(alike) < MIN_ALIKE:
            alike = [s.efficiencies[-1] for s in fitted if _is_on_nodes(s) == _is_on_nodes(series)]
        low, median, high = np.quantile(alike, QUANTILES)
        return EfficiencyRange(float(median), float(low), float(high))

    return predict


def _is_on_nodes(series: Series) -> bool:
    return series.gangs[-1].num_nodes > 1


def _kind(series: Series) -> tuple[object, ...]:
    largest = series.gangs[-1].num_workers
    return series.facts.between, _is_on_nodes(series), sum(largest > limit for limit in COUNT_CLASSES)


def _line(series: Series) -> float:
    base, second, last = series.gangs[0], series.gangs[1], series.gangs[-1]
    steps = math.log(last.num_workers / base.num_workers) / math.log(second.num_workers / base.num_workers)
    return 1 + (series.efficiencies[1] - 1) * steps


def halves(series: Sequence[Series]) -> tuple[list[str], list[str]]:
    """Return the sources of each half: the largest to the first, the next two to the second, and so on."""
    counts = Counter(s.source for s in series)
    ordered = sorted(counts, key=lambda source: (-counts[source], source))
    first = [source for i, source in enumerate(ordered) if i % 4 in (0, 3)]
    return first, [source for source in ordered if source not in first]


def judged(series: Sequence[Series], predict: Predictor, num_measured: int) -> list[Case]:
    """Return the cases of the series that have a larger count than those measured."""
    larger = [s for s in series if len(s.gangs) > num_measured]
    return [
        Case(f"{s.name}, {s.gangs[-1].num_workers} workers", s.efficiencies[-1], predict(s, num_measured))
        for s in larger
    ]


def print_cases(title: str, cases: Sequence[Case], worst: int) -> None:
    """Print the errors, how often the range holds the figure, and its width; and the worst cases."""
    errors = POINTS * np.array([c.error for c in cases])
    held = np.mean([c.is_held for c in cases])
    width = POINTS * np.median([c.predicted.width for c in cases])
    print_row(
        title,
        f"{len(cases)} cases: off by {np.median(errors):.1f} points in the median, {np.quantile(errors, 0.9):.1f} at "
        f"the 90th percentile, {errors.max():.1f} at most; the range holds {held:.0%}, median width {width:.0f} "
        f"points, score {score(cases):.0f}",
    )
    for case in sorted(cases, key=lambda c: -c.score)[:worst]:
        low, high = case.predicted.low, case.predicted.high
        text = f"{case.measured:.0%}, predicted {case.predicted.median:.0%} [{low:.0%}, {high:.0%}]"
        print_row(f"  {case.name}", text)


def left_out(folder: Path) -> Iterator[Case]:
    """Yield each count of a folder's stored studies, predicted from the others."""
    network = NetworkFlags(None, 1, None, None, None, None)
    with contextlib.chdir(folder):
        uri = default_tracking_uri(Path())
        for name in study_names(uri, Path()):
            try:
                every = of_study(name, PredictRequest((MANY,), (), None, None, None, network), uri).outlook.measured
            except RayparError as error:
                print_row(name, f"skipped: {error}")
                continue
            for n in sorted(every.rates)[1:]:
                asked = PredictRequest((n,), (), None, None, None, network)
                outlook = of_study(name, asked, uri, left_out=(n,)).outlook
                predicted = next(each.efficiency for each in outlook.expected if each.num_workers == n)
                assert predicted.low is not None and predicted.high is not None
                truth = np.median(every.rates[n]) / np.median(every.rates[outlook.base]) * outlook.base / n
                yield Case(
                    f"{name}, {n} workers",
                    float(truth),
                    EfficiencyRange(predicted.value, predicted.low, predicted.high),
                )


def score(cases: Sequence[Case]) -> float:
    """Return the mean interval score in points."""
    return float(POINTS * np.mean([c.score for c in cases]))


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--series", type=Path, metavar="FILE", help="judge these series by the shipped prior")
    parser.add_argument("--stored", type=Path, metavar="FOLDER", help="judge the stored studies of a folder")
    parser.add_argument("--fit", action="store_true", help=f"fit the shipped prior and write {PRIOR_FILE.name}")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="also print the N worst series")
    args = begin(parser)
    if args.series:
        series = read_series(args.series)
        for number, words in ((1, "one count"), (2, "two counts")):
            if cases := judged(series, by_prior(Prior.shipped()), number):
                print_cases(f"{args.series.name}, from {words}", cases, args.worst)
        return
    if args.stored:
        if cases := list(left_out(args.stored)):
            print_cases(f"stored studies of {args.stored}, a count left out", cases, args.worst)
        return
    series = read_series()
    if args.fit:
        PRIOR_FILE.write_text(fit_prior(series).as_json())
        print_row("prior", f"fitted to {len(series)} series: {PRIOR_FILE.name}")
        return
    parts = halves(series)
    for i, sources in enumerate(parts, 1):
        print_row(f"half {i}", ", ".join(sources))
    for number, words in ((1, "one count"), (2, "two counts")):
        cases, naively = [], []
        for fitted_to, judged_on in (parts, parts[::-1]):
            fitted = [s for s in series if s.source in fitted_to]
            others = [s for s in series if s.source in judged_on]
            cases += judged(others, by_prior(fit_prior(fitted)), number)
            naively += judged(others, naive(fitted), number)
        print_cases(f"raypar, from {words}", cases, args.worst)
        print_cases(f"naive, from {words}", naively, 0)
        print_row(f"score from {words}, raypar / naive", times(score(cases) / score(naively)))


if __name__ == "__main__":
    main()
