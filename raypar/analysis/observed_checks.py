"""Checks of training code that raypar observed: equal work of its points, and common mistakes.

Counterfactuals are left out: their ranks train on the same batches, or without a common gradient, on purpose.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from raypar import units
from raypar.analysis.evidence import Evidence
from raypar.analysis.finding import Check, Finding, check, named
from raypar.analysis.losses import difference
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import OF_EQUAL_WORK, PointKey, point_key
from raypar.study.observation import BY_BACKWARD, Observation, ObservedLoader, ObservedRank
from raypar.study.script_settings import WHAT_IF, is_counterfactual
from raypar.study.trial import TrialResult, point_label

MAX_PARAMETER_GAP = 1e-6  # relative difference of parameters that ranks have in common
SLOW_START = 10  # waits for the first batch, as a multiple of that for any other
WORTH_NAMING = 0.05  # share of the training time


@dataclass(frozen=True)
class _Trial:
    """Observed trial of a point, with the point's label."""

    label: str
    result: TrialResult
    observation: Observation

    @property
    def ranks(self) -> tuple[ObservedRank, ...]:
        return self.observation.ranks

    @property
    def num_machines(self) -> int:
        return max(1, len(set(self.result.conditions.node)))

    @property
    def num_cores(self) -> int:
        """Cores of its ranks on one machine: together if each is pinned to its own."""
        conditions = self.result.conditions
        pinned: defaultdict[str, set[int]] = defaultdict(set)
        for node, rank in zip(conditions.node, conditions.ranks, strict=False):
            pinned[node].update(rank.cores or ())
        return max(*map(len, pinned.values()), *(rank.num_cores for rank in self.ranks), 0)

    def per_machine(self, number: Callable[[ObservedRank], int]) -> int:
        """Return the sum of a number over the ranks on one machine."""
        return -(-sum(map(number, self.ranks)) // self.num_machines)


def _points(evidence: Evidence) -> list[PointAnalysis]:
    """Return the points with finished trials, without counterfactuals."""
    return [p for p in evidence.points if p.measured and not is_counterfactual(p.values)]


def _trials(point: PointAnalysis) -> Iterator[_Trial]:
    for result in point.measured:
        if result.observation is not None and result.observation.ranks:
            swept = {key: value for key, value in point.point.items() if key != WHAT_IF}  # nothing is left out here
            yield _Trial(point_label(swept), result, result.observation)


def _observed(evidence: Evidence) -> Iterator[_Trial]:
    """Yield a trial of each point that was observed."""
    for point in _points(evidence):
        yield from list(_trials(point))[:1]


def _at_points(evidence: Evidence, subject: str, look: Callable[[_Trial], str]) -> Iterator[Finding]:
    """Yield a finding with what a look at the points shows, and their labels; none if it is empty everywhere."""
    texts: dict[str, list[str]] = defaultdict(list)
    for trial in _observed(evidence):
        if text := look(trial):
            texts[text].append(trial.label)
    if texts:
        is_only_one = len(_points(evidence)) == 1
        yield Finding(subject, [text if is_only_one else f"{text} ({named(at)})" for text, at in texts.items()])


def _by_site(rank: ObservedRank) -> list[list[ObservedLoader]]:
    """Return the loaders that a rank trains on, by the call that creates them, which may happen in every epoch."""
    groups: defaultdict[str, list[ObservedLoader]] = defaultdict(list)
    for loader in rank.loaders:
        if loader.is_trained_on:
            groups[loader.site].append(loader)
    return list(groups.values())


def _site(loader: ObservedLoader) -> str:
    """Return the end of the path, and the line, of the loader's call."""
    path, _, line = loader.site.rpartition(":")
    return f"{path.rsplit('/', 1)[-1]}:{line}" if path else "an unknown place"


def _tells_apart(digests: Sequence[int]) -> bool:
    """Return whether digests of batches identify these: constant data and unknown batches have equal digests."""
    return len({*digests}) > 1


@check("Use a torch.optim.Optimizer, or call raypar.step() after each training step.")
def counted_backward_passes(evidence: Evidence) -> Iterator[Finding]:
    if any(rank.counted_by == BY_BACKWARD for trial in _observed(evidence) for rank in trial.ranks):
        yield Finding("No optimizer of torch made a step, so each backward pass counts as a training step")


@check("Start as many processes as there are workers, such as with torchrun --nproc-per-node={num_workers}.")
def other_number_of_processes(evidence: Evidence) -> Iterator[Finding]:
    labels = [
        f"{len(trial.ranks)} at {trial.label}"
        for trial in _observed(evidence)
        if len(trial.ranks) != trial.result.spec.placement.num_workers
    ]
    if labels:
        yield Finding("The number of processes that trained is not the number of workers", labels)


@check(
    "Give the DataLoader a DistributedSampler, or split the data by rank: otherwise every rank does the same work, and "
    "more workers only add communication."
)
def same_samples_on_ranks(evidence: Evidence) -> Iterator[Finding]:
    def look(trial: _Trial) -> str:
        ranks = trial.ranks
        loaders = [loader for rank in ranks for loader in rank.loaders if loader.is_trained_on][:1]
        firsts = {next((e.digests[0] for e in rank.loaders if e.is_trained_on and e.digests), ()) for rank in ranks}
        is_same = len(firsts) == 1 and _tells_apart(next(iter(firsts)))
        is_parallel = len(ranks) > 1 and (all(rank.ddp for rank in ranks) or _parameters_of(ranks).are_equal)
        return f"loader of {_site(loaders[0])}" if is_parallel and is_same else ""

    yield from _at_points(evidence, "All ranks train on the same samples", look)


@check("Call sampler.set_epoch(epoch) at the start of each epoch, and seed a generator once rather than in each epoch.")
def same_order_in_epochs(evidence: Evidence) -> Iterator[Finding]:
    def look(trial: _Trial) -> str:
        for loaders in (loaders for rank in trial.ranks for loaders in _by_site(rank)):
            epochs = [digests for loader in loaders for digests in loader.digests][:2]
            is_same = len(epochs) == 2 and epochs[0] == epochs[1] and _tells_apart(epochs[0])
            if is_same and all(loader.is_shuffled for loader in loaders):
                return f"loader of {_site(loaders[0])}"
        return ""

    yield from _at_points(evidence, "Every epoch has the same order of samples, although the sampler shuffles", look)


@dataclass(frozen=True)
class _Parameters:
    """Comparison of the ranks' parameters.

    Attributes:
        num_compared: steps after which they are known; 0 if they may be split among the ranks.
        differ_after: first of these steps after which they differ; None: none.
    """

    num_compared: int
    differ_after: int | None

    @property
    def are_equal(self) -> bool:
        return bool(self.num_compared) and self.differ_after is None


def _parameters_of(ranks: Sequence[ObservedRank]) -> _Parameters:
    if len({rank.num_parameters for rank in ranks}) > 1 or any(rank.sends for rank in ranks):
        return _Parameters(0, None)  # each rank may have another part of the model
    by_rank = [{step: value for step, value in rank.parameters if math.isfinite(value)} for rank in ranks]
    steps = [step for step in by_rank[0] if all(step in values for values in by_rank)]
    for step in steps:
        values = [of_rank[step] for of_rank in by_rank]
        if max(values) - min(values) > MAX_PARAMETER_GAP * max(map(abs, values)):
            return _Parameters(len(steps), step)
    return _Parameters(len(steps), None)


@check(
    "Wrap the model in DistributedDataParallel; or average the gradients over the ranks in every step, and begin with "
    "the same parameters."
)
def different_parameters(evidence: Evidence) -> Iterator[Finding]:
    def look(trial: _Trial) -> str:
        step = _parameters_of(trial.ranks).differ_after if trial.ranks[0].num_ranks > 1 else None
        return "" if step is None else f"from step {step} on"

    yield from _at_points(evidence, "The ranks train different parameters", look)


@check(
    "Use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), which costs communication, or keep the samples per rank "
    "the same at all points."
)
def batch_norm_of_ranks(evidence: Evidence) -> Iterator[Finding]:
    def look(trial: _Trial) -> str:
        if len(trial.ranks) < 2 or not all(rank.ddp and rank.num_batch_norms for rank in trial.ranks):
            return ""
        samples = trial.ranks[0].samples_per_step / max(1, trial.ranks[0].passes_per_step)
        return f"{samples:.4g} samples" if samples else "an unknown number of samples"

    yield from _at_points(evidence, "BatchNorm normalises over the samples of each rank separately", look)


@check("Set OMP_NUM_THREADS, or torch.set_num_threads(n), to the cores divided by the processes.")
def more_threads_than_cores(evidence: Evidence) -> Iterator[Finding]:
    def look(trial: _Trial) -> str:
        num_threads, num_cores = trial.per_machine(lambda rank: rank.num_threads), trial.num_cores
        is_above = num_cores and num_threads > num_cores
        return f"{num_threads} threads on {units.counted(num_cores, 'core')}" if is_above else ""

    yield from _at_points(evidence, "Torch computes with more threads than there are cores", look)


@check("Lower num_workers of the DataLoader: its processes take the cores from the training.")
def more_loaders_than_cores(evidence: Evidence) -> Iterator[Finding]:
    def num_processes(rank: ObservedRank) -> int:
        trained = [max(loader.num_workers for loader in loaders) for loaders in _by_site(rank)]
        evaluated = [loader.num_workers for loader in rank.loaders if not loader.is_trained_on]
        return max(sum(trained), *evaluated, 0)

    def look(trial: _Trial) -> str:
        num, num_cores = trial.per_machine(num_processes), trial.num_cores
        return f"{num} processes on {units.counted(num_cores, 'core')}" if num_cores and num > num_cores else ""

    yield from _at_points(evidence, "More processes load data than there are cores", look)


@check("Create the DataLoader once, with persistent_workers=True, so that its processes start only once.")
def slow_start_of_epochs(evidence: Evidence) -> Iterator[Finding]:
    def look(trial: _Trial) -> str:
        for rank in trial.ranks:
            for loaders in _by_site(rank):
                starting = [e for e in loaders if e.num_workers and (not e.persistent_workers or len(loaders) > 1)]
                firsts = [e.first_batch_s for e in starting if e.first_batch_s is not None]
                others = [e.batch_s for e in starting if e.batch_s is not None]
                num_iterations = sum(e.num_iterations for e in starting)
                if num_iterations < 2 or not firsts or not others:
                    continue
                first_s, train_s = statistics.median(firsts), rank.breakdown.step_s * rank.num_steps
                is_slow = first_s > SLOW_START * statistics.median(others)
                if is_slow and first_s * num_iterations > WORTH_NAMING * train_s:
                    return f"{units.seconds(first_s)} for the first batch, loader of {_site(starting[0])}"
        return ""

    yield from _at_points(evidence, "Every epoch waits for the processes of its loader to start", look)


@check("Evaluate less often, or on fewer samples; training times don't include it.")
def long_evaluation(evidence: Evidence) -> Iterator[Finding]:
    yield from _longer(evidence, "evaluates", lambda rank: rank.eval_s, 1.0)


@check("Save checkpoints less often; training times don't include them.")
def long_checkpoints(evidence: Evidence) -> Iterator[Finding]:
    yield from _longer(evidence, "saves checkpoints", lambda rank: rank.save_s, 0.5)


def _longer(evidence: Evidence, does: str, seconds: Callable[[ObservedRank], float], share: float) -> Iterator[Finding]:
    def look(trial: _Trial) -> str:
        took_s = max(map(seconds, trial.ranks))
        train_s = max(rank.breakdown.step_s * rank.num_steps for rank in trial.ranks)
        return (
            f"{units.seconds(took_s)} beside {units.seconds(train_s)} of training" if took_s > share * train_s else ""
        )

    than = "longer than it trains" if share == 1 else f"for more than {units.percent(share)} of its training time"
    yield from _at_points(evidence, f"The code {does} {than}", look)


@check("Leave out find_unused_parameters=True: every step searches the graph for nothing.")
def needless_search(evidence: Evidence) -> Iterator[Finding]:
    def look(trial: _Trial) -> str:
        models = [ddp for rank in trial.ranks for ddp in rank.ddp if ddp.find_unused_parameters]
        models = [ddp for ddp in models if not ddp.static_graph]
        return "all have a gradient" if models and not any(ddp.has_unused_parameters for ddp in models) else ""

    yield from _at_points(evidence, "DistributedDataParallel searches for unused parameters, and there are none", look)


@check("Keep losses on the GPU, and read them every 50 steps or so: .item() waits for all its work.")
def waits_for_gpu(evidence: Evidence) -> Iterator[Finding]:
    def look(trial: _Trial) -> str:
        calls = max(rank.num_item_calls for rank in trial.ranks)
        return f"{calls:.1f} values a step" if calls >= 0.9 else ""

    yield from _at_points(evidence, "Each step reads values from the GPU, and so waits for it", look)


@check("Set pin_memory=True in the DataLoader, and copy with .to(device, non_blocking=True).")
def blocking_copies(evidence: Evidence) -> Iterator[Finding]:
    def look(trial: _Trial) -> str:
        calls = max(rank.num_blocking_copies for rank in trial.ranks)
        return f"{calls:.1f} copies a step" if calls >= 0.9 else ""

    yield from _at_points(evidence, "Copies of batches to the GPU block the training", look)


@check(
    "Divide the batch size of a rank by the number of workers to compare equal work. Or scale the learning rate as "
    "your recipe demands, and compare the accuracy at equal samples."
)
def different_batches(evidence: Evidence) -> Iterator[Finding]:
    """Points that should do the same work, but whose steps have different numbers of samples."""
    for group in _alike(evidence):
        sizes = {trial.label: trial.observation.samples_per_step for trial in group}
        if all(sizes.values()) and max(sizes.values()) > min(sizes.values()) * 1.01:
            texts = [f"{size:.4g} ({label})" for label, size in sizes.items()]
            rates = {trial.ranks[0].learning_rates for trial in group}
            same = ", with the same learning rate" if len(rates) == 1 and rates != {()} else ""
            yield Finding("The samples of a training step differ", texts, f": {{}}{same}.")


def _work_of(point: PointAnalysis) -> PointKey:
    return point_key({key: value for key, value in point.point.items() if key not in OF_EQUAL_WORK})


def _alike(evidence: Evidence) -> Iterator[list[_Trial]]:
    """Yield groups of trials, one of each point, that should do the same work: with the same seed."""
    groups: defaultdict[PointKey, list[dict[int, _Trial]]] = defaultdict(list)
    for point in _points(evidence):
        if by_seed := {trial.result.spec.seed: trial for trial in _trials(point)}:
            groups[_work_of(point)].append(by_seed)
    for group in groups.values():
        seeds = [seed for seed in group[0] if all(seed in by_seed for by_seed in group)]
        if len(group) > 1 and seeds:
            yield [by_seed[seeds[0]] for by_seed in group]


@check('Nothing is lost: it is in the trials\' runs. See "Scripts that log to MLflow themselves" in the documentation.')
def logged_elsewhere(evidence: Evidence) -> Iterator[Finding]:
    """Scripts that would have logged to another place in MLflow than the runs of their trials."""
    places: dict[str, None] = {}
    trials = [result for result in evidence.finished if result.conditions.of_ranks("logged_elsewhere")]
    for result in trials:
        places |= dict.fromkeys(chain.from_iterable(result.conditions.of_ranks("logged_elsewhere")))
    if trials:
        number = f"{len(trials)} of {units.counted(len(evidence.finished), 'trial')}"
        yield Finding(f"What {number} logged to MLflow is in the trials' runs instead of the script's", list(places))


def proof_of_work(evidence: Evidence) -> str | None:
    """Return how the losses of points differ that should do the same work; empty: not at all.

    None if they don't tell: some point was not observed, or no two trials have the same seed.
    """
    points = _points(evidence)
    if not all(any(_trials(point)) for point in points):
        return None
    groups = list(_alike(evidence))
    for base, *others in groups:
        for other in others:
            differ = difference(base.observation.losses, other.observation.losses)
            if differ != "":
                return f"losses of {base.label} and {other.label} {differ or 'have no step in common'}"
    are_alone = len({_work_of(point) for point in points}) == len(points)
    return "" if groups or are_alone else None


CHECKS = tuple(each for each in list(globals().values()) if isinstance(each, Check))
