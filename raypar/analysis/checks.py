"""Checks of a study's measurements: code, machines, load, work, steadiness over time, width of intervals.

A check is a function that takes an `Evidence` and yields findings. The decorator `check` holds its advice. Findings
follow the order of the functions, the gravest first. Those of installed packages (`GROUP`) come last.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtr

from raypar import units
from raypar.analysis import observed_checks
from raypar.analysis.evidence import Evidence, LogTime
from raypar.analysis.finding import Check, Finding, check, named
from raypar.analysis.gradient_noise import noise_scale_of, noise_scale_text
from raypar.analysis.load import MAX_BUSY, disturbing_loads
from raypar.analysis.pairwise import TREND_ERROR, against_baseline, same_work, worker_metrics
from raypar.analysis.points import OF_HARDWARE
from raypar.analysis.question import OF_EQUAL_WORK, WALL_TIME, PointKey, excluded_subject, point_key, settings_text
from raypar.analysis.stats import MIN_RANKED, median_estimate
from raypar.plugins import registered
from raypar.provenance import are_comparable, changed_files, files_text
from raypar.study.conditions import RankConditions
from raypar.study.observation import BY_BACKWARD, BY_OPTIMIZER
from raypar.study.options import UNPINNED
from raypar.study.script_settings import is_counterfactual
from raypar.study.trial import REVISION, FailureKind, TrialResult, TrialState, point_label, timed_work

MAX_LOSS_GAP = 0.05  # largest relative difference of last losses for equal work
GROUP = "raypar.checks"  # of entry points, each a `Check`


def _share(part: Sequence[object], total: Sequence[object], noun: str = "trial") -> str:
    return f"{len(part)} of {units.counted(len(total), noun)}"


def _were_timed(part: Sequence[object], total: Sequence[object]) -> str:
    """Return ``2 of 12 trials were timed``."""
    return f"{_share(part, total)} {'was' if len(part) == 1 else 'were'} timed"


# ---- which trials count, and what they ran


@check("They are kept. Run the study with their settings to ask about them again, or give it another name.")
def other_settings(evidence: Evidence) -> Iterator[Finding]:
    if evidence.num_excluded:
        yield Finding(excluded_subject(evidence.num_excluded), (settings_text(evidence.settings),))


@check(
    "Run the study with --fresh, so that all its trials run its present code: the code may change times as "
    "much as the point does."
)
def other_code(evidence: Evidence) -> Iterator[Finding]:
    """Trials whose code differs from the study's present code or, if unknown, from the latest trial of its revision."""
    reference: dict[str, Mapping[str, str]] = {}
    for result in sorted(filter(lambda r: r.code, evidence.finished), key=lambda r: r.started_at):
        reference[str(result.spec.point.get(REVISION, ""))] = result.code
    now = {
        revision: code
        for revision, code in evidence.question.code.items()
        if are_comparable(code, reference.get(revision, {}))
    }
    reference |= now
    pairs = [(r.code, reference.get(str(r.spec.point.get(REVISION, "")), {})) for r in evidence.finished]
    comparable = [pair for pair in pairs if are_comparable(*pair)]
    changes = [files for pair in comparable if (files := changed_files(*pair))]
    if changes:
        share, files = _share(changes, comparable), (files_text(chain.from_iterable(changes)),)
        if now:
            yield Finding(f"{share} ran other code than the study has now", files, ": {} changed since.")
        else:
            yield Finding(f"{share} ran other code than the latest one", files, ": {} changed in between.")


@check("Seed the generator that draws or splits the samples in data(config), and run the study again with --fresh.")
def different_data(evidence: Evidence) -> Iterator[Finding]:
    """Trials whose samples differ from those of a trial with the same seed and the same data-related settings."""
    by_work: dict[str, dict[str, list[TrialResult]]] = defaultdict(lambda: defaultdict(list))
    for result in evidence.finished:
        splits = result.data.get("splits")
        stored = splits.values() if isinstance(splits, Mapping) else ()
        digests = [split["digest"] for split in stored if isinstance(split, Mapping) and "digest" in split]
        if digests:
            config = sorted((key, value) for key, value in result.spec.config.items() if key not in OF_EQUAL_WORK)
            by_work[repr((result.spec.seed, config))][repr(digests)].append(result)
    others = [result for groups in by_work.values() for group in list(groups.values())[1:] for result in group]
    if others:
        subject = f"{_share(others, evidence.finished)} had other samples than a trial with the same seed and settings"
        yield Finding(subject, form=": their metrics can't be compared.")


@check(
    "They count in no time, speedup or recommendation, and are not run again. Lower lr, warm it up "
    "(lr_warmup_steps) or clip gradients (clip_grad_norm)."
)
def diverged_trials(evidence: Evidence) -> Iterator[Finding]:
    every = [r for p in evidence.points for r in p.results]
    if diverged := [r for r in every if r.state is TrialState.DIVERGED]:
        labels = [f"{r.spec.label} ({r.reason})" if r.reason else r.spec.label for r in diverged]
        yield Finding(f"{_share(diverged, every)} diverged", labels)


@check(
    "They count in no time, speedup or recommendation, and are not run again. Use a smaller batch "
    "(`raypar model fit-batch` finds the largest that fits), accumulation_steps, or a strategy that splits the model."
)
def too_large_trials(evidence: Evidence) -> Iterator[Finding]:
    if points := [p for p in evidence.points if p.outcome is TrialState.DOES_NOT_FIT]:
        first = next(r for r in points[0].results if r.state is TrialState.DOES_NOT_FIT)
        labels = named([point_label(p.point) for p in points])
        do_not = TrialState.DOES_NOT_FIT.said_of(len(points))
        reason = f" ({first.reason})" if first.reason else ""
        yield Finding(f"{_share(points, evidence.points, 'point')} {do_not}", (labels + reason,))


@check(
    "Run the study again: finished trials are kept, and the baseline's missing trials run. If it "
    "diverged, choose another baseline."
)
def baseline_missing(evidence: Evidence) -> Iterator[Finding]:
    question = evidence.question
    timed = {point_key(p.point): p.point for p in evidence.points if p.time_s is not None}
    baselines = [question.baseline_of(point) for point in timed.values()]
    missing = [base for base in baselines if question.baseline and point_key(base) not in timed]
    if missing:
        labels = [point_label(base) for base in {point_key(base): base for base in missing}.values()]
        num_points = units.counted(len(missing), "point")
        yield Finding(f"{num_points} without a speedup", labels, ": no timed trial of the baseline {}.")


@check("See the log; once the cause is fixed, run the study again: finished trials are kept.")
def failed_trials(evidence: Evidence) -> Iterator[Finding]:
    failed = [r for p in evidence.points for r in p.results if r.state is TrialState.FAILED]
    if failed:
        first = failed[0]
        num_skipped = sum(r.failure is not None and r.failure.kind is FailureKind.SKIPPED for r in failed)
        subject = f"{units.counted(len(failed) - num_skipped, 'trial')} failed"
        subject += f", {units.count(num_skipped)} not run" if num_skipped else ""
        reason = f": {first.reason}" if first.reason else "."
        log = f" (log: {first.failure.log_path})" if first.failure and first.failure.log_path else ""
        yield Finding(subject, (f"{first.spec.label}{reason}{log}",), "; {}")


@check(
    "Look for a cut network link, a suspended process or a full disk at that time. Metrics of these trials "
    "count; add repeats to replace their times."
)
def stalled(evidence: Evidence) -> Iterator[Finding]:
    trials = [r for r in evidence.finished if r.conditions.stalls_s]
    if trials:
        labels = [f"{r.spec.label} ({' + '.join(map(units.seconds, r.conditions.stalls_s))})" for r in trials]
        subject = f"{_share(trials, evidence.finished)} stalled within a step"
        yield Finding(subject, labels, ", {}: excluded from times and speedups.")


@check("Run the leading points with raypar to confirm them: its trials are isolated and in random order.")
def imported(evidence: Evidence) -> Iterator[Finding]:
    trials = [r for r in evidence.finished if r.conditions.is_imported]
    if trials:
        works = list(dict.fromkeys(str(timed_work(r)) for r in trials))
        were = "was" if len(trials) == 1 else "were"
        form = ", with times of {}: isolation from other programs and the order of runs are unknown."
        yield Finding(f"{_share(trials, evidence.finished)} {were} imported, not run by raypar", works, form)


@check(
    "Call raypar.step() after each training step, or pass model and data to Workload(model=…, "
    "data=…): then only the steps are timed. Otherwise, make trials long compared with their start."
)
def includes_start_up(evidence: Evidence) -> Iterator[Finding]:
    if evidence.time_metric != WALL_TIME or not any(p.time_s for p in evidence.points):
        return
    works = dict.fromkeys(timed_work(r) for r in evidence.finished)
    why = "raypar can't instrument this training code"
    if None not in works and len(works) > 1:
        why = f"the work between two reports of the training code differs ({named([*map(str, works)])})"
    elif reasons := [*dict.fromkeys(chain.from_iterable(_why_not_observed(r) for r in evidence.finished))]:
        why = named(reasons)
    yield Finding(
        "Times are of whole trials, from launch to exit",
        (why,),
        ": process start, imports, data loading, evaluation and reports are in them, because {}. A speedup of the "
        "training steps alone may differ.",
    )


def _why_not_observed(result: TrialResult) -> list[str]:
    return list(result.conditions.of_ranks("not_observed"))


@check("Let the code do only the work to compare in each step, or between two reports.")
def reported_steps(evidence: Evidence) -> Iterator[Finding]:
    timed = [r for r in evidence.finished if not r.conditions.is_imported]
    works = list(dict.fromkeys(str(timed_work(r)) for r in timed if timed_work(r)))
    if evidence.time_metric == WALL_TIME or not {*works} - {BY_OPTIMIZER, BY_BACKWARD}:
        return
    if works == ["raypar.step"]:
        subject = "Times are those between two calls of raypar.step in the training code"
        yield Finding(subject, form="; the first step of each trial counts as an average one.")
    else:
        subject = f"Times are those between two reports of the training code, {named(works)} in every trial"
        yield Finding(subject, form="; anything before the first of these reports and after the last is not counted.")


@check("Check that every point trains on the same number of samples; let the code report its loss for comparison.")
def unproven_work(evidence: Evidence) -> Iterator[Finding]:
    """Training code that raypar can't instrument: only the losses can show whether its points do equal work."""
    complete = [p for p in evidence.points if not is_counterfactual(p.values)]
    foreign = [p for p in complete if any(r.conditions.is_foreign for r in p.measured)]
    if len(foreign) < 2:
        return
    proof = observed_checks.proof_of_work(evidence)
    if proof is not None:
        if proof:
            yield Finding("The points may do different work", (proof,))
        return
    keys = [key for key in foreign[0].measured[0].final if "loss" in key.lower()]
    key = keys[0] if keys else evidence.question.metric
    alike: defaultdict[PointKey, list[tuple[float, str, float]]] = defaultdict(list)  # median, point, spread
    for p in foreign:
        values = [r.final[key] for r in p.measured if key in r.final]
        if values and all(map(math.isfinite, values)):
            rest = point_key({k: v for k, v in p.point.items() if k not in OF_EQUAL_WORK})
            alike[rest].append((float(np.median(values)), point_label(p.point), max(values) - min(values)))
    subject = "Equal work of the points is not proven"
    is_imported = any(r.conditions.is_imported for p in foreign for r in p.measured)
    why = ": the runs were imported." if is_imported else ": raypar can't instrument this training code."
    ends = []
    for group in (sorted(group) for group in alike.values() if len(group) > 1):
        (low, low_label, _), (high, high_label, _) = group[0], group[-1]
        allowed = max(MAX_LOSS_GAP * max(abs(low), abs(high)), *(spread for _, _, spread in group))
        is_equal = high - low <= allowed
        text = f"agrees: {low:.4g} to {high:.4g}" if is_equal else f"differs: {low:.4g} ({low_label}) to "
        text += "" if is_equal else f"{high:.4g} ({high_label})"
        ends.append(((high - low) / allowed if allowed else 0.0, f"{key} {text}"))
    yield Finding(subject, (max(ends)[1],), why + " Their last {}.") if ends else Finding(subject, form=why)


# ---- machines


@check("Run the study on machines of one kind: otherwise times depend on the hardware as much as on the point.")
def mixed_hardware(evidence: Evidence) -> Iterator[Finding]:
    """Different models of one kind of device or node, or different nodes among one-node trials.

    Nodes are alike if they have the same CPU model and number of cores. An unknown property counts as different.
    """
    by_kind: defaultdict[Any, list[TrialResult]] = defaultdict(list)
    for result in evidence.finished:
        by_kind[tuple(result.spec.config.get(key) for key in OF_HARDWARE)].append(result)
    for results in by_kind.values():
        for key, what in (("device_name", "devices"), ("cpu_model", "CPU models")):
            models = {name for r in results for name in r.conditions.names(key)}
            if len(models) > 1:
                yield Finding(f"Trials ran on different {what}", sorted(models))
        yield from _unlike_nodes(results)


def _unlike_nodes(results: Sequence[TrialResult]) -> Iterator[Finding]:
    """Yield the differences between the nodes of one-node trials, except CPU models, which are a separate finding."""
    models: defaultdict[str, set[str]] = defaultdict(set)
    cores: defaultdict[str, set[int]] = defaultdict(set)
    for result in results:
        if len(nodes := result.conditions.names("node")) == 1:
            (node,) = nodes
            models[node].update(result.conditions.names("cpu_model"))
            cores[node].update(result.conditions.of_ranks("num_node_cores"))
    if len(models) < 2:
        return
    if not all(models.values()) or not all(cores.values()):
        yield Finding("Trials ran on different nodes", sorted(models))
    elif len(set().union(*cores.values())) > 1:
        sizes = [f"{node} ({units.counted(max(cores[node]), 'core')})" for node in sorted(cores)]
        yield Finding("Trials ran on nodes of different sizes", sizes)


@check(
    "Compare them with care: part of their steps was timed in a process that died, maybe on other cores. If "
    "that matters, run the study with --fresh."
)
def resumed(evidence: Evidence) -> Iterator[Finding]:
    labels = [r.spec.label for r in evidence.finished if any(r.conditions.of_ranks("resumed_at_epoch"))]
    if labels:
        yield Finding(f"{_share(labels, evidence.finished)} resumed from a checkpoint after a failure", labels)


@check("Their times are those of the last attempt, which may have run on other machines than the first.")
def retried(evidence: Evidence) -> Iterator[Finding]:
    every = [r for r in evidence.finished if not any(r.conditions.of_ranks("resumed_at_epoch"))]
    if preempted := [r for r in every if r.conditions.preempted]:
        labels = [f"{r.spec.label} ({', '.join(dict.fromkeys(r.conditions.preempted))})" for r in preempted]
        yield Finding(f"{_share(preempted, evidence.finished)} began again after their nodes had left", labels)
    if results := [r for r in every if r.attempts > 1 + len(r.conditions.preempted)]:
        labels = [f"{r.spec.label} (attempt {r.attempts})" for r in results]
        yield Finding(f"{_share(results, evidence.finished)} finished after a failure and a retry", labels)


@check(
    "Run the study on a system that can bind processes to cores (Linux; a container needs whole cores of its own): "
    "others move workers between cores, and onto each other's."
)
def shared_cores(evidence: Evidence) -> Iterator[Finding]:
    bound = [r for r in evidence.finished if r.spec.config.get("cpu_affinity") != UNPINNED]
    unpinned = [r for r in bound if () in r.conditions.of_ranks("cores")]
    if unpinned:
        yield Finding(f"{_share(unpinned, evidence.finished)} had no cores of their own")


@check("Run one study at a time, without --share-machine. Then run this one again with --fresh.")
def shared_with_studies(evidence: Evidence) -> Iterator[Finding]:
    if others := [r.conditions.shared_with for r in evidence.finished if r.conditions.shared_with]:
        subject = f"{_share(others, evidence.finished)} shared their machine with other studies"
        yield Finding(subject, sorted({*others}))


@check("Leave max_concurrent_trials out of the study: then a machine runs one trial at a time.")
def side_by_side(evidence: Evidence) -> Iterator[Finding]:
    if counts := [number for r in evidence.finished if (number := r.conditions.num_sharing)]:
        share = _share(counts, evidence.finished)
        subject = f"{share} shared a machine, its memory and clock with other trials"
        yield Finding(subject, (f"up to {max(counts)} at a time",), " ({}).")


@check("Set max_concurrent_trials=1: then one trial at a time uses the network.")
def shared_network(evidence: Evidence) -> Iterator[Finding]:
    spread = [r for r in evidence.finished if len(set(r.conditions.node)) > 1]
    if counts := [number for r in spread if (number := r.conditions.num_sharing_network)]:
        of_those = f"{_share(counts, spread)} over several machines"
        subject = f"{of_those} shared the network with other trials over several machines"
        yield Finding(subject, (f"up to {max(counts)} at a time",), " ({}).")


# ---- load while trials were timed

MAX_CLOCK_CHANGE = 0.05


@check(
    "Keep other work off the machine, or give workers fewer cores: on shared cores, times depend as much on "
    "the other work. Then run the study again with --fresh."
)
def other_load(evidence: Evidence) -> Iterator[Finding]:
    # cpu_wait_share would mislead: a rank's own threads (gloo's and torch's) also wait for each other.
    if not (disturbed := disturbing_loads(evidence.finished)):
        return
    worst = []
    if taken := max((load.taken for load in disturbed if load.taken is not None), default=0.0):
        worst.append(f"it took {units.percent(taken)} of the time of a worker's own cores")
    most = max(disturbed, key=lambda load: load.busy)
    if most.busy:
        worst.append(f"it kept {most.busy_cores:.1f} of a machine's {units.counted(most.num_cores, 'core')} busy")
    subject = f"Other work ran while {_were_timed(disturbed, evidence.finished)}"
    yield Finding(subject, (" and ".join(worst),), "; at worst {}.")


@check("Leave cores to them: they slow down trials that use every core of a machine.")
def raypar_load(evidence: Evidence) -> Iterator[Finding]:
    def share(rank: RankConditions) -> float:
        return (rank.raypar_load_cores or 0.0) / rank.num_node_cores if rank.num_node_cores else 0.0

    shares = [max(map(share, result.conditions.ranks), default=0.0) for result in evidence.finished]
    busy = [share for share in shares if share > MAX_BUSY]
    if 2 * len(busy) > len(shares):
        most = units.percent(max(busy))
        yield Finding(f"Up to {most} of the cores ran raypar and Ray themselves while {_were_timed(busy, shares)}")


@check(
    "Leave num_threads out, or raise cpus_per_worker: torch's threads wait for each other in a busy loop, "
    "which blocks the other threads of a core."
)
def too_many_threads(evidence: Evidence) -> Iterator[Finding]:
    crowded = [
        (rank.num_threads, len(rank.cores))
        for r in evidence.finished
        for rank in r.conditions.ranks
        if rank.num_threads and rank.cores and rank.num_threads > len(rank.cores)
    ]
    if crowded:
        threads, num_cores = max(crowded, key=lambda pair: pair[0] / pair[1])
        subject = f"A worker had {units.counted(threads, 'torch thread')} on {units.counted(num_cores, 'core')}"
        yield Finding(subject, form=": that can be many times slower than one thread a core.")


@check("Cool the machine, or fix its clock at a frequency that it can hold; then run the study again with --fresh.")
def throttled(evidence: Evidence) -> Iterator[Finding]:
    counts = [sum(r.conditions.of_ranks("throttles")) for r in evidence.finished]
    if hot := [count for count in counts if count > 0]:
        subject = f"Cores became too hot and slowed down while {_were_timed(hot, counts)}"
        yield Finding(subject, (f"up to {units.counted(round(max(hot)), 'time')} in one",), " ({}).")


@check(
    "Turn turbo off or fix the frequency (cpupower frequency-set): a clock that depends on the number "
    "of busy cores or on their temperature distorts every speedup."
)
def clock_changes(evidence: Evidence) -> Iterator[Finding]:
    yield from _clock_change_within(evidence.finished, "cpu", "The cores' clock")
    if clocks := _unlike_clocks(evidence.finished, "cpu"):
        yield Finding("The cores' clock differed between trials", (clocks[1],))


@check(
    "Cool the GPUs, or fix their clock at a frequency that they can hold (nvidia-smi -lgc); then run "
    "the study again with --fresh."
)
def gpu_throttled(evidence: Evidence) -> Iterator[Finding]:
    """GPUs that slowed down for heat or a power brake. The power limit is not included: GPUs usually run at it."""
    counts = [sum(r.conditions.of_ranks("gpu_slowdowns")) for r in evidence.finished]
    if slowed := [count for count in counts if count > 0]:
        celsius = [c for r in evidence.finished for c in r.conditions.of_ranks("gpu_celsius")]
        heat = (f"up to {max(celsius):.0f} °C",) if celsius else ()
        subject = f"GPUs slowed down for heat or a power brake while {_were_timed(slowed, counts)}"
        yield Finding(subject, heat, " ({})." if heat else ".")


@check(
    "Fix the GPU's clock at a frequency that it holds under this load (nvidia-smi -lgc): a boost "
    "that depends on its temperature distorts every speedup."
)
def gpu_clock_changes(evidence: Evidence) -> Iterator[Finding]:
    """GPU clocks that changed within a trial or between trials of one point. Points may load a GPU differently."""
    yield from _clock_change_within(evidence.finished, "gpu", "The GPU's clock")
    if unlike := [clocks for p in evidence.points if (clocks := _unlike_clocks(p.measured, "gpu"))]:
        yield Finding("The GPU's clock differed between trials of a point", (max(unlike, key=itemgetter(0))[1],))


@check(
    "Keep other processes off the GPU: `nvidia-smi` lists them, and those that compute slow trials down. "
    "Then run the study again with --fresh."
)
def gpu_shared(evidence: Evidence) -> Iterator[Finding]:
    counts = [r.conditions.largest("gpu_other_processes") or 0 for r in evidence.finished]
    if others := [count for count in counts if count > 0]:
        most = f"up to {units.count(round(max(others)))} at a time"
        yield Finding(f"Other processes were on the GPU while {_were_timed(others, counts)}", (most,), " ({}).")


def _unlike_clocks(results: Iterable[TrialResult], device: str) -> tuple[float, str] | None:
    """Return the ratio of the fastest mean clock to the slowest, and a text with both; None if they hardly differ.

    Args:
        device: "cpu" or "gpu".
    """
    means = [(sum(mhz) / len(mhz), r) for r in results if (mhz := r.conditions.of_ranks(f"{device}_mhz_mean"))]
    if not means:
        return None
    (slowest, slow), (fastest, fast) = (pick(means, key=lambda pair: pair[0]) for pick in (min, max))
    if fastest <= slowest * (1 + MAX_CLOCK_CHANGE):
        return None
    both = f"{slowest / 1e3:.2f} GHz in {slow.spec.label}, {fastest / 1e3:.2f} GHz in {fast.spec.label}"
    return (fastest / slowest if slowest else math.inf), both


def _clock_change_within(finished: Sequence[TrialResult], device: str, clock: str) -> Iterator[Finding]:
    if within := [(c, r) for r in finished if abs(c := _clock_change(r, device)) > MAX_CLOCK_CHANGE]:
        change, result = max(within, key=lambda pair: abs(pair[0]))
        subject = f"{clock} changed from the beginning to the end of {_share(within, finished)}"
        yield Finding(subject, (f"{_changed(-change)} ({result.spec.label})",), ": by up to {}.")


def _clock_change(result: TrialResult, device: str) -> float:
    """Return the largest relative change of any rank's clock over a trial; 0 if unknown."""
    names = (f"{device}_mhz_first", f"{device}_mhz_last")
    ends = ([getattr(rank, name) for name in names] for rank in result.conditions.ranks)
    changes = [last / first - 1 for first, last in ends if first and last is not None]
    return max(changes, key=abs, default=0.0)


# ---- points against each other

MIN_EXCESS = 0.01  # of the efficiency over 1; less is not reported


@check("Give num_samples a multiple of every batch size, so that all points train on the same samples.")
def unequal_work(evidence: Evidence) -> Iterator[Finding]:
    """Points that trained on a different number of samples than their baseline, unless the study compares that."""
    question = evidence.question
    if not question.baseline or {"epochs", "num_samples"} & set(question.compared_keys()):
        return
    works = {point_key(p.point): [s.num_samples for s in p.samples.values()] for p in evidence.points}
    unequal: list[str] = []
    for p in evidence.points:
        base = works.get(point_key(question.baseline_of(p.point)), [])
        if pair := next(((w, b) for w in works[point_key(p.point)] for b in base if not same_work(w, b)), None):
            numbers = " against ".join(units.count(round(number)) for number in pair if number is not None)
            unequal.append(f"{point_label(p.point)} ({numbers})")
    if unequal:
        subject = f"{units.counted(len(unequal), 'point')} trained on other numbers of samples than the baseline"
        yield Finding(subject, unequal, ": {}. Speedups there are of rates, not of times.")


@check(
    "Compare losses only between points with the same number of parts, or use a normalisation that doesn't "
    "depend on the batch (torch.nn.GroupNorm, LayerNorm), or on GPUs torch.nn.SyncBatchNorm."
)
def batch_norm_in_parts(evidence: Evidence) -> Iterator[Finding]:
    parts: dict[int, str] = {}  # a point of each number
    for p in evidence.points:
        for r in p.measured:
            for number in r.conditions.of_ranks("batch_norm_parts"):
                parts.setdefault(number, point_label(p.point))
    if len(parts) > 1:
        labels = [f"{units.counted(number, 'part')} at {parts[number]}" for number in sorted(parts)]
        yield Finding("Batch norm normalises over each part of a batch separately, so that losses differ", labels)


@check(
    "A larger batch cuts hardly any steps there. Divide a batch of up to the noise scale among workers, and compare "
    "the time to a target (`raypar recommend STUDY --target VALUE`)."
)
def beyond_noise_scale(evidence: Evidence) -> Iterator[Finding]:
    """Points whose batch is larger than their gradient noise scale: over half of each further sample is wasted."""
    measured = [(p, scale) for p in evidence.points if (scale := noise_scale_of(p)) is not None]
    beyond = []
    for p, scale in measured:
        batch_size = p.measured[0].spec.config.get("batch_size")
        if isinstance(batch_size, int) and scale.high is not None and batch_size > scale.high:
            sizes = f"{units.count(batch_size)} samples, noise scale {noise_scale_text(scale)}"
            beyond.append(f"{point_label(p.point)} ({sizes})")
    if beyond:
        yield Finding(f"{_share(beyond, measured, 'point')} had a batch beyond the gradient noise scale", beyond)


@check(
    "DDP's find_unused_parameters does this, but not with one worker. Remove or freeze these parameters "
    "(requires_grad_(False)), or set static_graph=True if each step uses the same ones."
)
def without_gradient(evidence: Evidence) -> Iterator[Finding]:
    searched = [r for r in evidence.finished if any(r.conditions.of_ranks("finds_unused"))]
    names = dict.fromkeys(name for r in searched for of in r.conditions.of_ranks("without_gradient") for name in of)
    if searched:
        share = _share(searched, evidence.finished)
        yield Finding(f"{share} traversed the graph again in each step, for parameters without a gradient", [*names])


@check(
    "Don't read the speedup as time saved for the same result; compare the time to a target, or tune "
    "lr for each number of workers."
)
def metric_differs(evidence: Evidence) -> Iterator[Finding]:
    """Metric differences between points that differ only in ``num_workers``: equal batches give equal gradients."""
    name = evidence.question.metric
    different = [
        f"{evidence.question.judged_by.show_change(change)} at {point_label(each.point.point)}"
        for each in worker_metrics(evidence.question, evidence.points, evidence.family)
        if each.comparison.differs and (change := each.comparison.estimate)
    ]
    if different:
        yield Finding(f"{name} differs between numbers of workers", different)


@check(
    "Check whether the baseline was disturbed (its steps' times, other load) or does more work. Otherwise, "
    "each worker's share of data or model may fit its caches, or the baseline may lack memory bandwidth."
)
def more_than_linear(evidence: Evidence) -> Iterator[Finding]:
    if evidence.question.compared_keys() != ("num_workers",):
        return
    larger = [
        f"{units.ratio(p.speedup.value)} at {point_label(p.point)}"
        for p in evidence.points
        if p.speedup and p.efficiency and p.efficiency.low is not None and p.efficiency.low > 1 + MIN_EXCESS
    ]
    if larger:
        num_larger = units.counted(len(larger), "speedup")
        yield Finding(f"{num_larger} significantly larger than the increase in workers", larger)


# ---- steadiness over time

MIN_DRIFT = 0.02  # smallest relative change that is reported
MOST_EXACT = 50  # blocks
MIN_PARTS = 4  # fewest reports with which a trial's beginning and end are compared
MIN_TRIALS = 3  # fewest trials with that many reports
MIN_OUTLYING = 0.05  # smallest relative distance that is reported
# In (robust) standard deviations; Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993.
OUTLYING_SCALES = 3.5
# Median difference of two normal values divided by their standard deviation: sqrt(2) · 0.6745.
MEDIAN_DIFFERENCE = 0.9539


class Trend(NamedTuple):
    """Trend of a study's times: blocks became slower or faster over the study."""

    change: float  # relative change of the times from the first to the last block; 0.08 is 8 % slower
    tau: float  # Kendall's: share of pairs of blocks that became slower minus share that became faster
    p_value: float  # probability that blocks without a trend show one at least as strong
    num_blocks: int


def trend_of(points: Iterable[Mapping[int, float]]) -> Trend | None:
    """Return the trend of the times over the blocks; None for fewer than three blocks.

    A block is one sample, because a disturbance affects all its trials: the median of their log times relative to their
    points' medians. Mann-Kendall test and Sen's slope.

    Args:
        points: log times by block, for each point.
    """
    excess: defaultdict[int, list[float]] = defaultdict(list)
    for log_times in points:
        middle = float(np.median(list(log_times.values()))) if log_times else 0.0
        for block, log_time in log_times.items():
            excess[block].append(log_time - middle)
    blocks = sorted(excess)
    if len(blocks) < 3:
        return None
    medians = np.array([np.median(excess[block]) for block in blocks])
    first, second = np.triu_indices(len(blocks), 1)
    slower, later = medians[second] - medians[first], np.subtract(blocks, blocks[0])
    score = float(np.sum(np.sign(slower)))  # ties count 0, which makes the test conservative
    slope = float(np.median(slower / (later[second] - later[first])))
    change = math.expm1(slope * float(later[-1]))
    return Trend(change, score / len(first), _kendall_p_value(score, len(blocks)), len(blocks))


def _kendall_p_value(score: float, size: int) -> float:
    """Return the two-sided p-value of a Mann-Kendall score: exact up to `MOST_EXACT` values, and else approximated."""
    num_pairs = size * (size - 1) // 2
    if size > MOST_EXACT:
        return min(1.0, 2 * float(ndtr(-max(0.0, abs(score) - 1) / math.sqrt(num_pairs * (2 * size + 5) / 9))))
    shares = np.ones(1)
    for count in range(2, size + 1):
        shares = np.convolve(shares, np.full(count, 1 / count))
    return min(1.0, 2 * float(np.sum(shares[: int((num_pairs - abs(score)) // 2) + 1])))


@check(
    "Speedups compare trials of one block, so that a slow drift mostly cancels; in times it doesn't. Keep "
    "other work off the machine, let it warm up, and run the study again."
)
def drift_over_study(evidence: Evidence) -> Iterator[Finding]:
    trend = trend_of({repeat: math.log(t) for repeat, t in p.times.items()} for p in evidence.points)
    if trend is not None and trend.p_value < TREND_ERROR and abs(trend.change) >= MIN_DRIFT:
        became = f"Trials of the same point became {_changed(trend.change)}"
        tau = f"Kendall's tau {trend.tau:.2f} over {trend.num_blocks} blocks"
        yield Finding(f"{became} from the study's first block to its last", (tau,), " ({}).")


@check(
    "If steps become slower, fix the clock's frequency or cool the machine; if they become faster, "
    "raise num_warmup_steps."
)
def drift_in_trials(evidence: Evidence) -> Iterator[Finding]:
    # Uses the reports' rates, because a store doesn't return step times with its results.
    slowdowns = [change for r, _ in chain(*evidence.log_times) if (change := _slowdown(r)) is not None]
    if len(slowdowns) < MIN_TRIALS:
        return
    estimate = median_estimate(slowdowns, log_scale=False, level=1 - TREND_ERROR)
    change = math.expm1(estimate.value)
    if estimate.excludes(0.0) and abs(change) >= MIN_DRIFT:
        subject = f"Steps became {_changed(change)} from the first third of a trial to its last"
        yield Finding(subject, (f"median of {units.counted(len(slowdowns), 'trial')}",), " ({}).")


def _slowdown(result: TrialResult) -> float | None:
    """Return the log ratio of the time per sample in a trial's last third to its first; None if it is too short."""
    rates = [rate for r in result.reports if (rate := r.get("throughput_samples_per_s")) and math.isfinite(rate)]
    if len(rates) < MIN_PARTS or min(rates) <= 0:
        return None
    third = len(rates) // 3
    return math.log(float(np.median(rates[:third])) / float(np.median(rates[-third:])))


@check("Its time is in the numbers: a median withstands one such trial, but with few repeats it matters.")
def slow_first_trial(evidence: Evidence) -> Iterator[Finding]:
    if (slow := _slow_first(evidence)) is not None:
        longer = f"The study's first trial took {units.percent(math.expm1(slow[1]))} longer"
        yield Finding(f"{longer} than the median of its point's others", (slow[0].spec.label,), " ({}).")


def _slow_first(evidence: Evidence) -> LogTime | None:
    """Return the study's first trial and its log time minus the median of its point's others, if that stands out."""
    trials = sorted(chain(*evidence.log_times), key=lambda entry: entry[0].started_at)
    if len(trials) < 3 or trials[0][0].started_at == trials[1][0].started_at:
        return None
    first, log_time = trials[0]
    groups = [[entry for entry in group if entry[0] is not first] for group in evidence.log_times]
    others = next(g for g, every in zip(groups, evidence.log_times, strict=True) if len(g) < len(every))
    scale = _scale(groups)
    if len(others) < 2 or scale is None:
        return None
    excess = log_time - float(np.median([t for _, t in others]))
    return (first, excess) if excess > max(OUTLYING_SCALES * scale, math.log1p(MIN_OUTLYING)) else None


@check("They are in the numbers: medians withstand a few. See what else the machine did then, or add repeats.")
def outliers(evidence: Evidence) -> Iterator[Finding]:
    """Trials far from the median of their point, relative to the scatter within points. None is dropped."""
    groups, slow_first = evidence.log_times, _slow_first(evidence)
    pooled = _scale(groups)
    if pooled is None:
        return
    outlying: list[str] = []
    for group in groups:
        if len(group) < 3:
            continue  # with two trials, neither can be called the outlier
        scale = max(pooled, _scale([group]) or 0.0) if len(group) >= MIN_RANKED else pooled
        median = float(np.median([t for _, t in group]))
        for result, log_time in group:
            off = log_time - median
            is_far = abs(off) > max(OUTLYING_SCALES * scale, math.log1p(MIN_OUTLYING))
            if is_far and not (slow_first and result is slow_first[0]):
                outlying.append(f"{result.spec.label} ({_changed(math.expm1(off))})")
    if outlying:
        verb = "is" if len(outlying) == 1 else "are"
        share = _share(outlying, list(chain(*groups)))
        yield Finding(f"{share} {verb} far from the median of {'its' if verb == 'is' else 'their'} point", outlying)


def _scale(groups: Iterable[Sequence[LogTime]]) -> float | None:
    """Return the scatter of trials within points, as a standard deviation of log times; None without a pair.

    It comes from the median of pairwise differences, which also works for points with two trials (after Rousseeuw and
    Croux, "Alternatives to the Median Absolute Deviation", JASA 88, 1993).
    """
    differences = [abs(a - b) for group in groups for (_, a), (_, b) in combinations(group, 2)]
    return float(np.median(differences)) / MEDIAN_DIFFERENCE if differences else None


# ---- width of the intervals

MIN_REPEATS = 5
MIN_TIME_S = 1.0


@check("Raise epochs or num_samples, so that a trial trains for some seconds.")
def short_times(evidence: Evidence) -> Iterator[Finding]:
    timed = [(p.time_s.value, p.point) for p in evidence.points if p.time_s]
    short = [entry for entry in timed if entry[0] < MIN_TIME_S]
    if short:
        value, point = min(short, key=itemgetter(0))
        subject = f"{_share(short, timed, 'point')} took less than {MIN_TIME_S:g} s"
        least = f"{point_label(point)}: {units.seconds(value)}"
        yield Finding(subject, (least,), " ({}): start and end effects weigh in.")


@check(f"Add repeats, say --repeats {MIN_RANKED}: finished trials are kept.")
def few_repeats(evidence: Evidence) -> Iterator[Finding]:
    counts = [p.time_s.num_samples for p in evidence.points if p.time_s]
    question = evidence.question
    if question.is_search or question.max_repeats is not None or not counts or (fewest := min(counts)) >= MIN_REPEATS:
        return  # a search looks for a good point, not for an effect; "until settled" adds repeats where needed
    wide = "the intervals are wide and assume log-normal times"
    what = "no intervals, and nothing is confirmed" if fewest == 1 else wide
    repeats = units.counted(fewest, "repeat")
    yield Finding(f"{repeats} a point" if fewest == max(counts) else f"Only {repeats} for some points", (what,))


@check("More repeats narrow the intervals; longer trials steady the times.")
def not_separated(evidence: Evidence) -> Iterator[Finding]:
    speedups = [(p.point, p.speedup) for p in evidence.points if p.speedup and not p.is_baseline]
    compared = [(p, against_baseline(evidence.question, s)) for p, s in speedups if s.low is not None]
    tied = [point_label(point) for point, comparison in compared if not comparison.is_settled]
    if tied:
        yield Finding(f"{_share(tied, compared, 'speedup')} inconclusive", tied)


# ---- shared by several checks


def _changed(change: float) -> str:
    return f"{units.percent(abs(change))} {'slower' if change > 0 else 'faster'}"


INSTALLED = registered(GROUP, Check, {})
CHECKS = tuple(each for each in list(globals().values()) if isinstance(each, Check))


def run_checks(evidence: Evidence) -> tuple[Finding, ...]:
    """Return every finding, the gravest first."""
    return tuple(
        chain.from_iterable(each(evidence) for each in (*CHECKS, *observed_checks.CHECKS, *INSTALLED.values()))
    )
