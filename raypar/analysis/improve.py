"""Improvement of a script: settings worth trying after its verdict, and what each of them brought."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from raypar.analysis.comparison import Comparison, Outcome
from raypar.analysis.evidence import Evidence
from raypar.analysis.losses import END_TOLERANCE, Losses, difference, end_of
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import PointKey, point_key
from raypar.analysis.stats import Method
from raypar.analysis.why import PointWhy, observed, total_times_s, why_of
from raypar.study.blocks import MIN_BLOCKS
from raypar.study.profile import BACKWARD, COMMUNICATION, DATA_WAIT, FORWARD, OPTIMIZER
from raypar.study.script_settings import CHANGE, SCRIPT_SETTINGS, UNCHANGED, settings_of, text_of
from raypar.study.space import Value

WORTH_TRYING = 0.05  # share of a step from which its part is worth a remedy
WORTH_COMPILING = 0.3
WORTH_SHORTENING = 0.1  # share of evaluations in the whole time
WORTH_REPEATING = 0.02  # gain of a change in its first trials
MAX_REPEATED = 3  # changes; more of them leave too few repeats of each
DECISIVE_BLOCKS = 4  # of three blocks, an interval is about twice as wide as of four
NOTICEABLE_START_S = 1.0  # by which a change makes the start longer
MANY_BUCKETS_BYTES = 2**20  # of gradients: with fewer, a bucket's size hardly matters


def remedies(evidence: Evidence) -> tuple[str, ...]:
    """Return the changes that the unchanged script leaves room for, each as `settings_of` reads it."""
    answers = (answer for answer in why_of(evidence) if CHANGE not in answer.point)
    return tuple(dict.fromkeys(text_of(each) for answer in answers for each in _remedies(answer)))


def _remedies(answer: PointWhy) -> Iterator[dict[str, Value]]:
    first, on_gpu = answer.ranks[0], bool(answer.ranks[0].device_name)
    cores = _cores_per_rank(answer)
    loaders = [loader for loader in first.loaders if loader.is_trained_on]
    if loaders and answer.share_of(DATA_WAIT) >= WORTH_TRYING:
        counts = {1, 2, 4, 8, cores} if on_gpu else {0, 1, 2, 4, cores}
        for num in sorted(num for num in counts if num <= max(1, cores)):
            if num != loaders[0].num_workers or (num and not loaders[0].persistent_workers):
                yield {"loader_workers": num, **({"persistent_workers": True} if num else {})}
        if loaders[0].num_workers:
            yield {"prefetch_factor": 8}
        if on_gpu and not loaders[0].pin_memory:
            yield {"pin_memory": True}
    for num in sorted({1, cores} - {first.num_threads}):
        yield {"threads": num}
    if answer.share_of(OPTIMIZER) >= WORTH_TRYING:
        yield {"fused_optimizer": True}
    if answer.share_of(FORWARD) + answer.share_of(BACKWARD) >= WORTH_COMPILING:
        yield {"compile": True}
        if on_gpu:
            yield {"tf32": True}
            yield {"cudnn_benchmark": True}
            yield {"expandable_segments": True}
            yield {"channels_last": True}
    if answer.eval_share >= WORTH_SHORTENING:
        yield {"evaluation_batches": 1}
    if answer.share_of(COMMUNICATION) >= WORTH_TRYING and first.ddp:
        yield {"gradient_as_bucket_view": True}
        yield {"static_graph": True}
        if first.ddp[0].parameter_bytes > MANY_BUCKETS_BYTES:
            yield {"bucket_cap_mb": 1}
            yield {"bucket_cap_mb": 100}


def _cores_per_rank(answer: PointWhy) -> int:
    """Return the cores of a rank: those of all workers, for the processes that trained."""
    cores = observed(answer.analysed)[0].spec.config.get("cpus_per_worker")
    per_worker = cores if isinstance(cores, int) else 1
    return max(1, per_worker * answer.num_workers // len(answer.ranks))


@dataclass(frozen=True)
class Change:
    """Outcome of a change of settings.

    Attributes:
        settings: `raypar.study.script_settings.text_of` them.
        comparison: of its time with that of the unchanged script; the estimate is the speedup.
        has_same_losses: None: the losses are unknown, or differ between runs of the unchanged script as well.
        start_s: seconds by which it makes each trial longer outside of the compared times, such as for compilation.
        failure: why none of its trials finished; empty: some did.
    """

    point: Mapping[str, Value]
    settings: str
    comparison: Comparison
    has_same_losses: bool | None
    start_s: float = 0.0
    failure: str = ""

    @property
    def is_faster(self) -> bool:
        return self.comparison.outcome is Outcome.FASTER

    @property
    def is_recommended(self) -> bool:
        """True if it is faster with the same losses, as far as these are known."""
        return self.is_faster and self.has_same_losses is not False

    @property
    def speedup(self) -> float:
        return self.comparison.estimate.value if self.comparison.estimate else 0.0

    @property
    def pays_off_after_s(self) -> float | None:
        """Seconds of unchanged training from which it saves more than its start costs; None: at once, or never."""
        if self.start_s < NOTICEABLE_START_S or self.speedup <= 1:
            return None
        return self.start_s / (1 - 1 / self.speedup)


def changes_of(evidence: Evidence) -> tuple[Change, ...]:
    """Return the outcome of each change at each point, the fastest first."""
    unchanged = {_rest(p): p for p in evidence.points if p.point.get(CHANGE) == UNCHANGED}
    changes = [
        _change(evidence, base, p)
        for p in evidence.points
        if p.results and p.point.get(CHANGE) not in (None, UNCHANGED) and (base := unchanged.get(_rest(p)))
    ]
    return tuple(sorted(changes, key=lambda change: -change.speedup))


def with_repeated(changes: Iterable[Change], repeated: Iterable[Change]) -> tuple[Change, ...]:
    """Return changes with the outcomes of those that were repeated, the fastest first.

    The first trials of the others have chosen which ones to repeat, and support no claim.
    """
    of_repeated = {(point_key(change.point), change.settings): change for change in repeated}
    merged = [
        of_repeated.get((point_key(change.point), change.settings)) or replace(change, comparison=_unconfirmed(change))
        for change in changes
    ]
    return tuple(sorted(merged, key=lambda change: -change.speedup))


def _unconfirmed(change: Change) -> Comparison:
    estimate = change.comparison.estimate
    return replace(
        change.comparison,
        estimate=estimate and replace(estimate, low=None, high=None, level=None, method=Method.SINGLE),
    )


def _change(evidence: Evidence, unchanged: PointAnalysis, changed: PointAnalysis) -> Change:
    times = total_times_s(unchanged), total_times_s(changed)
    return Change(
        point={key: value for key, value in changed.point.items() if key != CHANGE},
        settings=str(changed.point[CHANGE]),
        comparison=Comparison(evidence.family.ratio(*times) if all(times) else None, doubt=evidence.doubt),
        has_same_losses=have_same_losses(_losses(unchanged), _losses(changed)),
        start_s=_longer_start_s(_starts_s(unchanged), _starts_s(changed)),
        failure="" if changed.measured else changed.results[0].reason or str(changed.outcome),
    )


def _starts_s(point: PointAnalysis) -> list[float]:
    """Return the time of each trial outside of `total_times_s`: imports, compilation, warm-up, end."""
    total_s = total_times_s(point)
    return [r.wall_s - total_s[r.spec.repeat] for r in observed(point) if r.wall_s]


def _longer_start_s(unchanged: Sequence[float], changed: Sequence[float]) -> float:
    if not unchanged or not changed or min(changed) <= max(unchanged):
        return 0.0
    return statistics.median(changed) - statistics.median(unchanged)


def _rest(point: PointAnalysis) -> PointKey:
    return point_key({key: value for key, value in point.point.items() if key != CHANGE})


def _losses(point: PointAnalysis) -> dict[int, Losses]:
    """Return the losses of each trial by repeat."""
    return {r.spec.repeat: r.observation.losses for r in observed(point) if r.observation and r.observation.losses}


def have_same_losses(unchanged: Mapping[int, Losses], changed: Mapping[int, Losses]) -> bool | None:
    """Return whether a change keeps the losses but for rounding.

    Args:
        unchanged, changed: losses by repeat.

    Returns:
        None if they are unknown, or if the script's own trials differ as much: it sets no seed, or a new one each time.
        Their last losses must still be in the same range.
    """
    pairs = [(unchanged[repeat], changed[repeat]) for repeat in unchanged.keys() & changed.keys()]
    results = [same for pair in pairs if (same := _are_same(*pair)) is not None]
    if not results or all(results):
        return True if results else None
    repeated = [_are_same(*pair) for pair in itertools.combinations(unchanged.values(), 2)]
    if any(results) or not repeated or any(repeated):
        return False
    ends = [end_of(losses) for losses in unchanged.values()]
    slack = END_TOLERANCE * max(map(abs, ends))
    is_in_range = all(min(ends) - slack <= end_of(losses) <= max(ends) + slack for losses in changed.values())
    return None if is_in_range else False


def _are_same(first: Losses, second: Losses) -> bool | None:
    differ = difference(first, second)
    return None if differ is None else not differ


def promising(evidence: Evidence, changes: Iterable[str], num_repeats: int) -> tuple[str, ...]:
    """Return the few changes that look fastest with the same losses, the fastest first.

    Of several values of a setting, that is the fastest one.

    Args:
        changes: those that are tried one at a time.
        num_repeats: first trials of each, which decide. So a later execution chooses the same ones.
    """
    first = replace(evidence, points=tuple(_with_first(p, num_repeats) for p in evidence.points))
    made = [change for change in changes_of(first) if change.settings in {*changes}]
    fast = [c.settings for c in made if c.speedup >= 1 + WORTH_REPEATING and c.has_same_losses is not False]
    by_names: dict[tuple[str, ...], str] = {}
    for settings in fast:
        by_names.setdefault(tuple(sorted(settings_of(settings))), settings)
    return tuple(by_names.values())[:MAX_REPEATED]


def worth_repeating(evidence: Evidence, chosen: Sequence[str], num_repeats: int, budget_s: float) -> tuple[str, ...]:
    """Return the changes to repeat: the chosen ones together, and as many of them alone as a budget can decide.

    Args:
        chosen: the fastest first, at least one.
        num_repeats: first trials of each.
        budget_s: seconds for further ones; infinity: no limit.
    """
    changes = tuple(dict.fromkeys((together(chosen), *chosen)))
    while len(changes) > 2 and budget_s < DECISIVE_BLOCKS * _block_s(evidence, changes, num_repeats):
        changes = changes[:-1]
    return changes


def affordable_repeats(evidence: Evidence, changes: Collection[str], num_repeats: int, budget_s: float) -> int:
    """Return how many repeats of these changes, in all, a budget allows after the first ones.

    Each look at the results costs some confidence, so none must be planned that will never come.

    Args:
        changes: those that are to be repeated, besides the unchanged script.
        num_repeats: first trials of each.
        budget_s: seconds for further ones.
    """
    block_s = _block_s(evidence, changes, num_repeats)
    return num_repeats + max(MIN_BLOCKS, int(budget_s / block_s) if block_s else 0)


def _block_s(evidence: Evidence, changes: Collection[str], num_repeats: int) -> float:
    """Return the seconds of a trial of each change and of the unchanged script, from the first trials."""
    asked = {UNCHANGED, *changes}
    first = (_with_first(p, num_repeats) for p in evidence.points if p.point.get(CHANGE) in asked)
    walls_s = [statistics.median(each) for p in first if (each := [r.wall_s for r in p.results if r.wall_s])]
    # Several changes together have not been tried yet: as long as the slowest.
    return sum(walls_s) + max(walls_s, default=0.0) * (len(asked) - len(walls_s))


def _with_first(point: PointAnalysis, num_repeats: int) -> PointAnalysis:
    return replace(point, results=tuple(r for r in point.results if r.spec.repeat < num_repeats))


def together(changes: Sequence[str]) -> str:
    """Return some changes in one; of several values of a setting, that of the first."""
    merged: dict[str, Value] = {}
    for settings in map(settings_of, changes):
        if not settings.keys() & merged.keys():
            merged |= settings
    # In a fixed order, so that a later execution finds its trials.
    return text_of({key: merged[key] for key in SCRIPT_SETTINGS if key in merged})


def best_of(changes: Sequence[Change]) -> list[Change]:
    """Return the fastest recommended change of each point."""
    best: dict[PointKey, Change] = {}
    for change in changes:
        if change.is_recommended:
            best.setdefault(point_key(change.point), change)
    return list(best.values())
