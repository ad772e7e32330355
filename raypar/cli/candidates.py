"""Candidates of `raypar model predict`: a stored study, a table, or a single published rate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from raypar.cli import common
from raypar.cli.work import config_of, opaque_reason
from raypar.errors import NotForTraining, RayparError, check_for_training
from raypar.study.space import Value

if TYPE_CHECKING:
    from raypar.analysis.laws import Scaling
    from raypar.execution.stored import StoredStudy
    from raypar.predict.all_reduces import StoredLinks
    from raypar.predict.calibration import Calibration
    from raypar.predict.network import Network
    from raypar.predict.overhead import Facts
    from raypar.predict.predict import JobSpec
    from raypar.predict.step_model import Communication, LayerCost
    from raypar.reporting.predict import CandidateView, StepModel
    from raypar.study.trial import TrialResult
    from raypar.study.workload import Config, Workload
    from raypar.track.store import Store

MEASURED = "measured"  # --network measured: by `raypar model network`, or a probe of this machine
WITHIN_NODE = "10GB/s,10us"  # by default that of PCI Express 3.0 with 16 lanes (15.8 GB/s nominally)
NO_MODEL = "without it raypar can't inspect the model: give its size, for example --parameters 25.6M"
LAYERS_NOT_KNOWN = "the layers are not known: all gradients are there at the end of the backward pass"
MAX_STEP_TIMES = 5  # trials whose step times are read for their variation
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True)
class PredictRequest:
    """Request of a prediction, for every candidate.

    Attributes:
        workers: worker counts.
        settings: hyperparameters, as given.
        num_parameters: trained parameters, if given.
        input_rate: samples/s of a node's input pipeline, if given.
    """

    workers: tuple[int, ...]
    settings: tuple[str, ...]
    scaling: Scaling | None
    num_parameters: float | None
    input_rate: float | None
    network: NetworkFlags

    def facts(self, **others: Any) -> Facts:
        """Return the facts of a candidate: what the user gives, and others as for `facts_of`."""
        from raypar.predict.facts import facts_of

        return facts_of(
            num_parameters=self.num_parameters,
            within=self.network.within if self.network.network_within else None,
            latency_s=self.network.latency_s,
            **others,
        )


@dataclass(frozen=True)
class NetworkFlags:
    """Flags of `predict` on the network, and on how gradients are sent over it."""

    network: str | None
    nodes_of: int
    network_within: str | None
    algorithm: str | None
    bucket_mb: float | None
    overlap: bool | None

    def is_comparable(self, num_workers: int) -> bool:
        """Return whether a measured count of a study on one machine had the links that are predicted."""
        return self.is_of_study or num_workers <= self.nodes_of

    def check(self) -> None:
        """Raise RayparError if a value is invalid or excludes another."""
        _ = self.given, self.within
        if self.bucket_mb is not None and not (math.isfinite(self.bucket_mb) and self.bucket_mb >= 0):
            raise RayparError(f"--bucket-mb {self.bucket_mb}: must be 0 or more", hint="write --bucket-mb 25")
        if self.network_within is not None and self.nodes_of == 1:
            raise RayparError("--network-within: a node of one worker has no links within", hint="add --nodes-of 8")

    @property
    def given(self) -> Network | None:
        """Network that the user describes; None: it is measured, or fitted to the study."""
        from raypar.predict.network import parse_network

        return None if self.network in (None, MEASURED) else parse_network(str(self.network))

    @property
    def within(self) -> Network:
        """Links within a node."""
        from raypar.predict.network import parse_network

        return parse_network(self.network_within or WITHIN_NODE)

    @property
    def is_of_study(self) -> bool:
        """True if the prediction is for the network that the study's trials used."""
        return self.given is None and self.nodes_of == 1

    @property
    def latency_s(self) -> float | None:
        """Latency of the network, if the user gives it."""
        return None if (given := self.given) is None or "," not in str(self.network) else given.latency_s

    @property
    def workers_per_node(self) -> int | None:
        """Workers per node; None: all are on one, as in the study."""
        return None if self.is_of_study else self.nodes_of

    def has_buckets_of_study(self, config: Config) -> bool:
        """Return whether buckets and overlap are those of the study's trials."""
        from raypar.predict.predict import FREE, communication_of

        asked = communication_of(config, FREE, bucket_mb=self.bucket_mb, overlap=self.overlap)
        return asked == communication_of(config, FREE)

    def sends_as_in_study(self, config: Config) -> bool:
        """Return whether gradients are sent like those of the study, whose network is fitted as if by rings."""
        return self.algorithm in (None, "ring") and self.has_buckets_of_study(config)

    def communication(
        self,
        config: Config,
        fit: Callable[[Communication], tuple[Network, str]],
        stored: StoredLinks | None = None,
    ) -> tuple[Communication, str, list[str]]:
        """Return how gradients are sent, the source of the network, and notes on assumptions.

        Args:
            config: that of the study's trials.
            fit: fits the network to the study's trials, for a way of communication; also returns its source.
            stored: measured links of the study's machines, for `--network measured`.
        """
        from raypar.predict.network import Topology
        from raypar.predict.predict import communication_of

        notes: list[str] = []
        if stored is None:
            across, origin = _link(self.given, self.network, config, fit)
        else:
            across, origin = stored.across.network, stored.origin
        of_node = stored.within if stored and self.network_within is None else None
        within = of_node.network if of_node else self.within
        link = across if self.nodes_of == 1 else Topology(self.nodes_of, within, across)
        if self.nodes_of > 1 and self.network_within is None and of_node is None:
            notes.append(f"the links within a node were not given: {WITHIN_NODE} is PCI Express 3.0")
        is_on_cpu = config["device"] == "cpu"
        # A network of the study, or of a probe, was fitted as if by rings.
        usual = (
            "ring" if self.given is None and stored is None else "gloo" if is_on_cpu and self.nodes_of == 1 else "auto"
        )
        is_one_node = self.network == MEASURED and not (stored and stored.between)
        on_own_cores = is_one_node and self.overlap is None and is_on_cpu
        overlap = False if on_own_cores else self.overlap
        how = communication_of(config, link, self.algorithm or usual, bucket_mb=self.bucket_mb, overlap=overlap)
        if on_own_cores:
            notes.append("no communication overlaps on this machine: the cores that compute also copy the gradients")
        if not self.has_buckets_of_study(config):
            notes.append("buckets or overlap differ from those of the study")
        return how, origin, notes


def num_parameters_of(text: str | None) -> float | None:
    """Return the value of --parameters."""
    return common.parse_quantity("--parameters", text, _UNITS, "number of parameters", "25.6M")


def of_study(name: str, asked: PredictRequest, tracking_uri: str, left_out: Container[int] = ()) -> CandidateView:
    """Return the prediction from a stored study.

    Args:
        left_out: worker counts whose trials do not count.

    Raises:
        RayparError: there is no such study, or it has no trials to predict from.
    """
    from raypar.execution.stored import read_study

    chosen = _chosen_point(asked.settings)
    study = read_study(name, tracking_uri, Path.cwd())
    if any(r.conditions.is_foreign for r in study.analysis.evidence.results):
        return _of_group(name, study, chosen, asked, left_out)
    from raypar.predict import calibration as fitting
    from raypar.predict.outlook import look_ahead, rates_by_model
    from raypar.predict.predict import job_spec_of, possible_counts, worker_counts
    from raypar.reporting.predict import CandidateView

    seen = [r for r in study.analysis.evidence.results if r.spec.config["num_workers"] not in left_out]
    results, excluded = fitting.quiet_results(fitting.choose_results(seen, chosen))
    training = job_spec_of(results, chosen, asked.scaling, asked.input_rate)
    points = fitting.observed_points(results)
    counts = possible_counts(training, worker_counts(asked.workers, [p.num_workers for p in points]))
    measured = {
        p.num_workers: tuple(p.batch_size / time_s for time_s in p.step_times_s)
        for p in points
        if p.batch_size == training.batch_of(p.num_workers)
    }
    config, network = results[0].spec.config, asked.network
    layers: tuple[LayerCost, ...] = ()
    sources = [study.analysis.evidence.excluded.rstrip("."), excluded]
    model, why_no_bound = None, ""
    try:
        layers, source = _layers(study.store, name, results[0], asked.num_parameters)
        variation = fitting.variation_of(_with_step_times(study.store, name, results))
        calibration = fitting.calibrate(points, layers, variation)
        model, notes = _step_model(calibration, config, study.store, results, training, counts, asked)
        sources += [source, *notes]
    except NotForTraining:
        raise
    except RayparError as error:
        why_no_bound = str(error)
    if model is not None:
        rates = rates_by_model(training, model.sweep, measured)
    elif measured:
        from raypar.predict.outlook import MeasuredRates

        rates = MeasuredRates(measured, "samples/s", "step", training.batch_of)
    else:
        raise RayparError(
            f"study `{name}`: no trial has this batch, and the step model can't replace it: {why_no_bound}"
        )
    facts = asked.facts(
        config=config,
        scaling=training.scaling,
        layers=layers,
        step_time_s=training.batch_of(rates.base) / statistics.median(rates.rates[rates.base]),
    )
    sends_alike = network.sends_as_in_study(config) if model is not None else True
    outlook = look_ahead(
        rates,
        facts,
        counts,
        nodes_of=network.workers_per_node,
        sweep=model.sweep if model else None,
        is_comparable=lambda n: n == rates.base or (sends_alike and network.is_comparable(n)),
    )
    return CandidateView(
        name=name,
        title=" ".join([f"Study {name}", *asked.settings]),
        outlook=outlook,
        model=model,
        why_no_bound=why_no_bound,
        sources=tuple(note for note in sources if note),
        caveats=tuple(warning.detail for warning in study.analysis.warnings),
    )


def _step_model(
    calibration: Calibration,
    config: Config,
    store: Store,
    results: Sequence[TrialResult],
    training: JobSpec,
    counts: Sequence[int],
    asked: PredictRequest,
) -> tuple[StepModel, list[str]]:
    """Return the step model of a study with its bounds, and notes on assumptions.

    Raises:
        RayparError: it doesn't cover the study, or contradicts it.
    """
    from raypar.predict import calibration as fitting
    from raypar.predict.all_reduces import StoredLinks
    from raypar.predict.all_reduces import network as NETWORK
    from raypar.predict.predict import predict
    from raypar.reporting.predict import StepModel

    network = asked.network
    fit_link = partial(fitting.fit_study_network, calibration, accumulation_steps=training.accumulation_steps)
    stored = StoredLinks.of(store.results(NETWORK.name), results) if network.network == MEASURED else None
    how, origin, notes = network.communication(config, fit_link, stored)
    sweep = predict(
        calibration,
        training,
        how,
        counts,
        is_measured_network=network.is_of_study and not (stored and stored.between),
        is_measured_sending=network.sends_as_in_study(config),
    )
    return StepModel(calibration, training, how, sweep, origin), notes


def _of_group(
    name: str, study: StoredStudy, chosen: Mapping[str, Value], asked: PredictRequest, left_out: Container[int]
) -> CandidateView:
    """Return the prediction from a study of training code whose steps raypar doesn't run itself."""
    from raypar.analysis.scaling import worker_groups
    from raypar.predict.calibration import calibrate, quiet_results
    from raypar.predict.observed_steps import ASSUMPTIONS, observed_training
    from raypar.predict.outlook import MeasuredRates, look_ahead
    from raypar.predict.predict import possible_counts, worker_counts
    from raypar.reporting.predict import CandidateView
    from raypar.study.trial import point_label

    groups = worker_groups(study.question, study.analysis.evidence.points)
    kept = [g for g in groups if all(g.point.get(key, value) == value for key, value in chosen.items())]
    if not kept:
        hint = "run it with --set num_workers=1,2"
        raise RayparError(f"study `{name}` has no finished trials that differ only in num_workers", hint=hint)
    if len(kept) > 1:
        key = next(key for key in kept[0].point if len({g.point.get(key) for g in kept}) > 1)
        texts = ", ".join(str(g.point[key]) for g in kept)
        raise RayparError(f"the trials differ in {key}: {texts}", hint=f"choose: --set {key}={kept[0].point[key]}")
    (group,) = kept
    every = MeasuredRates.of_runs(group.runs, group.scaling, group.unit)
    rates = replace(every, rates={n: values for n, values in every.rates.items() if n not in left_out})
    counts = worker_counts(asked.workers, list(rates.rates))
    results = [
        r
        for r in study.analysis.evidence.results
        if r.is_measured
        and r.spec.placement.num_workers in rates.rates
        and all(r.spec.config.get(key) == value for key, value in group.point.items())
    ]
    model, why_no_bound, facts = None, "", asked.facts(scaling=asked.scaling)
    notes: list[str] = []
    try:
        quiet, excluded = quiet_results(results)
        seen = observed_training(quiet, asked.scaling, asked.input_rate)
        counts = tuple(possible_counts(seen.job, counts))
        calibration = calibrate(seen.points, seen.layers)
        model, notes = _step_model(calibration, seen.config, study.store, quiet, seen.job, counts, asked)
        notes = [excluded, ASSUMPTIONS, *notes]
        facts = asked.facts(
            config=seen.config,
            scaling=seen.job.scaling,
            layers=seen.layers,
            step_time_s=statistics.median(seen.points[0].step_times_s),
        )
    except RayparError as error:
        why_no_bound = error.message
    network = asked.network
    label = f" {point_label(group.point)}" if group.point else ""
    return CandidateView(
        name=name,
        title=f"Study {name}{label}",
        outlook=look_ahead(
            rates,
            facts,
            counts,
            nodes_of=network.workers_per_node,
            sweep=model.sweep if model else None,
            is_comparable=network.is_comparable,
        ),
        model=model,
        why_no_bound=why_no_bound,
        sources=tuple(filter(None, [study.analysis.evidence.excluded.rstrip("."), *notes])),
        caveats=tuple(warning.detail for warning in study.analysis.warnings),
    )


def of_table(path: Path, asked: PredictRequest) -> CandidateView:
    """Return the prediction from a table of times or throughputs by worker count.

    Raises:
        RayparError: the file can't be read, or has several groups.
    """
    from raypar.analysis.table import Asked, read_table
    from raypar.predict.outlook import MeasuredRates, look_ahead
    from raypar.predict.predict import worker_counts
    from raypar.reporting.predict import CandidateView

    if asked.settings:
        raise RayparError(f"--set {asked.settings[0]} is for studies, and {path} is a table", hint="leave it out")
    table = read_table(path, (), Asked(scaling=asked.scaling))
    (runs,) = table.runs.values()
    rates = MeasuredRates.of_runs(runs, table.scaling)
    facts = asked.facts(scaling=asked.scaling)
    counts = worker_counts(asked.workers, list(rates.rates))
    return CandidateView(
        name=path.name,
        title=str(path),
        outlook=look_ahead(rates, facts, counts, nodes_of=asked.network.workers_per_node),
        why_no_bound="a table does not show the layers",
        sources=(table.reading.rstrip("."),),
    )


def of_rate(workload_name: str, samples_per_s: float, asked: PredictRequest) -> CandidateView:
    """Return the prediction from the rate of one worker, such as a published one of a GPU.

    Raises:
        RayparError: there is no such workload, or its network can't be inspected.
    """
    from raypar.analysis.laws import Scaling
    from raypar.predict.calibration import ObservedPoint, calibrate
    from raypar.predict.outlook import look_ahead, rates_by_model
    from raypar.predict.predict import JobSpec, possible_counts, predict, worker_counts
    from raypar.reporting.predict import CandidateView, StepModel
    from raypar.study.workload import Workload

    network = asked.network
    if network.given is None:
        raise RayparError("--samples-per-s: the network is not known", hint="give it: --network 100Gbit")
    workload = common.workload_named(workload_name)
    if not isinstance(workload, Workload):
        raise RayparError(opaque_reason(workload), hint="`raypar model list` lists others")
    check_for_training(NO_MODEL)
    # The rate is that of a GPU unless the user says otherwise, also on a machine without one.
    config = config_of(workload, list(asked.settings))
    if not any(setting.startswith("device=") for setting in asked.settings):
        config = {**config, "device": "cuda"}
    batch = config["per_worker_batch_size"] or config["batch_size"]
    given = asked.num_parameters
    layers, source = _counted_layers(workload, config) if given is None else _one_layer(config, given)
    calibration = calibrate([ObservedPoint(1, batch, (batch / samples_per_s,))], layers)
    training = JobSpec(
        scaling=asked.scaling or Scaling.WEAK,
        batch_size=batch,
        num_samples=config["num_samples"] or workload.train_size(config) or batch,
        epochs=config["epochs"],
        accumulation_steps=config["accumulation_steps"],
        input_samples_per_s=asked.input_rate,
    )
    how, origin, notes = network.communication(config, _no_fit)
    counts = possible_counts(training, worker_counts(asked.workers))
    sweep = predict(calibration, training, how, counts)
    facts = asked.facts(
        config=config,
        scaling=training.scaling,
        layers=layers,
        step_time_s=batch / samples_per_s,
    )
    return CandidateView(
        name=workload.name,
        title=" ".join([f"Workload {workload.name}", *asked.settings]) + f", one worker: {samples_per_s:g} samples/s",
        outlook=look_ahead(
            rates_by_model(training, sweep, {1: (samples_per_s,)}),
            facts,
            counts,
            nodes_of=network.workers_per_node,
            sweep=sweep,
        ),
        model=StepModel(calibration, training, how, sweep, origin),
        sources=(source, *notes),
    )


def _no_fit(_: Communication) -> tuple[Network, str]:
    raise AssertionError("the network is given")


def _link(
    given: Network | None, flag: str | None, config: Config, fit: Callable[[Communication], tuple[Network, str]]
) -> tuple[Network, str]:
    """Return the link between workers, and its source: given, measured, or fitted to the study."""
    from raypar.predict.network import Network, fit_network
    from raypar.predict.predict import communication_of

    if given is not None:
        return given, "as given"
    if flag == MEASURED:
        from raypar.predict.probe import probe_all_reduces

        typer.echo("measuring all-reduces between two workers …", err=True)
        logs = Path.cwd() / ".raypar" / "logs"
        with common.quiet(logs / "probe.log") as console:
            samples = probe_all_reduces(2, logs / "probe", str(config["device"]), common.notices_on(console))
        return fit_network(samples, 2), "measured between two workers of this machine"
    return fit(communication_of(config, Network(0.0, math.inf), "ring"))


def _chosen_point(settings: Sequence[str]) -> dict[str, Value]:
    chosen = common.chosen_values(settings)
    for key, values in chosen.items():
        if key == "num_workers":
            hint = f"write --workers {values[0]}"
            raise RayparError(f"--set {key}={values[0]}: worker counts are predicted", hint=hint)
        if len(values) > 1:
            raise RayparError(f"--set {key}: several values", hint=f"choose one: --set {key}=VALUE")
    return {key: values[0] for key, values in chosen.items()}


def calibrated(name: str, tracking_uri: str) -> tuple[Calibration, JobSpec]:
    """Return the calibrated step model of a stored study, and its training. Raises RayparError if there are several."""
    from raypar.execution.stored import results_of
    from raypar.predict import calibration as fitting
    from raypar.predict.predict import job_spec_of
    from raypar.track.store import Store

    store = Store(tracking_uri, Path.cwd())
    results, _ = fitting.quiet_results(fitting.choose_results(results_of(name, store), {}))
    layers, _ = _layers(store, name, results[0], None)
    variation = fitting.variation_of(_with_step_times(store, name, results))
    return fitting.calibrate(fitting.observed_points(results), layers, variation), job_spec_of(results, {})


def _with_step_times(store: Store, name: str, results: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the last trials of one worker with their step times."""
    alone = [r for r in results if r.spec.config.get("num_workers") == 1][-MAX_STEP_TIMES:]
    return [replace(r, step_times_s=store.step_times(name, r.spec.identity)) for r in alone]


def _layers(
    store: Store, name: str, result: TrialResult, num_parameters: float | None
) -> tuple[tuple[LayerCost, ...], str]:
    """Return the layers of a trial's network, and a sentence on their source."""
    from raypar.study.workload import Workload

    config = result.spec.config
    if num_parameters is not None:
        return _one_layer(config, num_parameters)
    try:
        workload = common.workload_of_study(store, name, result.spec.workload)
    except NotForTraining as error:
        raise NotForTraining(f"{error.message}, and {NO_MODEL}") from None
    if not isinstance(workload, Workload):
        lost = f"the file of study `{name}` is not in this folder, and no workload `{result.spec.workload}` ships with"
        problem = f"{lost} raypar: its network can't be inspected" if workload is None else opaque_reason(workload)
        raise RayparError(problem, hint="give its size: --parameters 25.6M")
    return _counted_layers(workload, config)


def _counted_layers(workload: Workload, config: Config) -> tuple[tuple[LayerCost, ...], str]:
    check_for_training(NO_MODEL)
    from raypar.predict.layers import is_one_layer, layer_costs

    layers = layer_costs(workload, config)
    return layers, LAYERS_NOT_KNOWN if is_one_layer(
        layers
    ) else "computing is shared out among the layers by counted work"


def _one_layer(config: Config, num_parameters: float) -> tuple[tuple[LayerCost, ...], str]:
    from raypar.predict.step_model import one_layer

    num_bytes = 8 if config.get("precision") == "fp64" else 4
    return one_layer(round(num_parameters) * num_bytes), LAYERS_NOT_KNOWN
