"""Commands on scaling beyond what was measured: predict, fit and work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from raypar.cli import common
from raypar.errors import NotForTraining, RayparError, check_for_training
from raypar.units import counted

if TYPE_CHECKING:
    from raypar.analysis.table import Asked
    from raypar.predict.all_reduces import StoredLinks
    from raypar.predict.calibration import Calibration
    from raypar.predict.network import Network
    from raypar.predict.predict import JobSpec
    from raypar.predict.step_model import Communication, LayerCost
    from raypar.study.space import Value
    from raypar.study.trial import TrialResult
    from raypar.study.workload import AnyWorkload, Config, Workload
    from raypar.track.store import Store


MEASURED = "measured"  # --network measured: by `raypar model network`, or a probe of this machine
WITHIN_NODE = "10GB/s,10us"  # by default that of PCI Express 3.0 with 16 lanes (15.8 GB/s nominally)
NO_MODEL = "without it raypar can't inspect the model: give its size, for example --parameters 25.6M"
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_of_network = partial(typer.Option, rich_help_panel="Network")
_of_file = partial(typer.Option, rich_help_panel="For a CSV file")
MAX_STEP_TIMES = 5  # trials whose step times are read for their variation

# Options of `predict`.
_Settings: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Choose the point to predict from.")
]
_Scaling: TypeAlias = Annotated[
    Literal["strong", "weak"] | None,
    typer.Option(help="strong: the global batch is fixed; weak: that of a worker is. (default: as in the study)"),
]
_Parameters: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="X", help="Trained parameters (25.6M), if raypar can't inspect the model."),
]
_InputRate: TypeAlias = Annotated[
    float | None, typer.Option(metavar="X", help="Samples/s that the input pipeline of a node delivers.")
]
_Network: TypeAlias = Annotated[
    str | None,
    _of_network(
        metavar="TEXT",
        help="100Gbit; 1Gbit,0.5ms; 12GB/s,5us; or measured: by `raypar model network`, else probe this machine. "
        "(default: fitted to the study)",
    ),
]
_NetworkWithin: TypeAlias = Annotated[
    str | None, _of_network(metavar="TEXT", help=f"Links within a node. (default: {WITHIN_NODE})")
]
_Algorithm: TypeAlias = Annotated[
    Literal["auto", "ring", "gloo", "tree", "hierarchical"] | None,
    _of_network(
        help="All-reduce algorithm; auto: the fastest except gloo, torch's ring on CPUs. (default: auto; ring on a "
        "measured network; gloo for a CPU study on a given network with one worker per node)"
    ),
]
_BucketMb: TypeAlias = Annotated[
    float | None, _of_network(metavar="X", help="MiB of gradients per message; 0: a message for each tensor.")
]
_Overlap: TypeAlias = Annotated[
    bool | None, _of_network("--overlap/--no-overlap", help="Send gradients during the backward pass, or after it.")
]


def predict(
    name: common.StudyName,
    workers: Annotated[str, typer.Option(metavar="N[,N…]", help="Predict 1, 2, 4 … up to the largest of these.")],
    settings: _Settings = None,
    scaling: _Scaling = None,
    parameters: _Parameters = None,
    input_rate: _InputRate = None,
    network: _Network = None,
    nodes_of: Annotated[int, _of_network(min=1, metavar="K", help="Workers per node; they share its link.")] = 1,
    network_within: _NetworkWithin = None,
    algorithm: _Algorithm = None,
    bucket_mb: _BucketMb = None,
    overlap: _Overlap = None,
    data_dir: common.DataDir = None,
    tracking_uri: common.TrackingUri = None,
    plot: Annotated[Path | None, common.output(metavar="FILE", help="Also draw a plot: .svg or .png.")] = None,
    as_json: common.AsJson = False,
) -> None:
    """Predict more workers or another network from a study.

    Times, throughputs and efficiencies are upper bounds from the study's measured trials.

    Example:  raypar model predict strong_scaling --workers 1024 --nodes-of 8 --network 100Gbit
    """
    from raypar.analysis.laws import Scaling
    from raypar.execution.stored import read_study
    from raypar.predict import calibration as fitting
    from raypar.predict.all_reduces import StoredLinks
    from raypar.predict.all_reduces import network as NETWORK
    from raypar.predict.predict import job_spec_of, worker_counts
    from raypar.predict.predict import predict as predicted
    from raypar.reporting.predict import PredictView, check_plot_path, plot_of, print_prediction

    asked = _counts(workers)
    worker_counts(asked)  # before anything slow: a mistake is reported at once
    common.check_positive("--input-rate", input_rate, "1000")
    if plot is not None:
        check_plot_path(plot)
    flags = _NetworkFlags(network, nodes_of, network_within, algorithm, bucket_mb, overlap)
    flags.check()
    chosen = _chosen_point(settings or ())
    if network == MEASURED:
        check_for_training("without it no worker can measure a network: give one, for example --network 100Gbit")
    common.set_data_dir(data_dir)
    study = read_study(name, common.uri_of(tracking_uri), Path.cwd())
    results, excluded = fitting.quiet_results(fitting.choose_results(study.analysis.evidence.results, chosen))
    training = job_spec_of(results, chosen, Scaling(scaling) if scaling else None, input_rate)
    layers, source = _layers(study.store, name, results[0], parameters)
    variation = fitting.variation_of(_with_step_times(study.store, name, results))
    calibration = fitting.calibrate(fitting.observed_points(results), layers, variation)
    sources = [note for note in (study.analysis.evidence.excluded.rstrip("."), excluded, source) if note]
    fit_link = partial(fitting.fit_study_network, calibration, accumulation_steps=training.accumulation_steps)
    stored = StoredLinks.of(study.store.results(NETWORK.name), results) if network == MEASURED else None
    how, origin, notes = flags.communication(results[0].spec.config, fit_link, stored)
    counts = worker_counts(asked, [p.num_workers for p in calibration.points])
    view = PredictView(
        study=name,
        title=" ".join([f"Study {name}", *(settings or [])]),
        asked=asked,
        calibration=calibration,
        training=training,
        communication=how,
        sweep=predicted(
            calibration,
            training,
            how,
            counts,
            is_measured_network=flags.is_of_study and not (stored and stored.between),
            is_measured_sending=flags.sends_as_in_study(results[0].spec.config),
        ),
        network_source=origin,
        sources=(*sources, *notes),
        caveats=tuple(warning.detail for warning in study.analysis.warnings),
    )
    if as_json:
        common.print_json(view)
    else:
        print_prediction(common.stdout(), view)
    if plot is not None:
        plot_of(view).save(plot)
        typer.echo(f"wrote {plot}", err=True)


@dataclass(frozen=True)
class _NetworkFlags:
    """Flags of `predict` on the network, and on how gradients are sent over it."""

    network: str | None
    nodes_of: int
    network_within: str | None
    algorithm: _Algorithm
    bucket_mb: float | None
    overlap: bool | None

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


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part.replace("_", "")) for part in text.split(",")}))
    except ValueError:
        raise RayparError(f"--workers {text}: must be a list of counts", hint="write --workers 1024, or 8,64") from None


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


def _layers(store: Store, name: str, result: TrialResult, parameters: str | None) -> tuple[tuple[LayerCost, ...], str]:
    """Return the layers of a trial's network, and a sentence on their source."""
    from raypar.predict.step_model import one_layer
    from raypar.study.workload import Workload

    at_the_end = "the layers are not known: all gradients are there at the end of the backward pass"
    num_parameters = common.parse_quantity("--parameters", parameters, _UNITS, "number of parameters", "25.6M")
    if num_parameters is not None:
        num_bytes = 8 if result.spec.config.get("precision") == "fp64" else 4
        return one_layer(round(num_parameters) * num_bytes), at_the_end
    try:
        workload = common.workload_of_study(store, name, result.spec.workload)
    except NotForTraining as error:
        raise NotForTraining(f"{error.message}, and {NO_MODEL}") from None
    if not isinstance(workload, Workload):
        lost = f"the file of study `{name}` is not in this folder, and no workload `{result.spec.workload}` ships with"
        problem = f"{lost} raypar: its network can't be inspected" if workload is None else _opaque(workload)
        raise RayparError(problem, hint="give its size: --parameters 25.6M")
    check_for_training(NO_MODEL)
    from raypar.predict.layers import is_one_layer, layer_costs

    layers = layer_costs(workload, result.spec.config)
    if is_one_layer(layers):
        return layers, at_the_end
    return layers, "computing is shared out among the layers by counted work"


def _opaque(workload: AnyWorkload) -> str:
    return f"workload {workload.name} is a {workload.kind}: raypar can't inspect its network"


# Why a study needs no such flag.
FILE_ONLY = {
    "--scaling": "a study that fixes per_worker_batch_size scales weakly, any other strongly",
    "--by": "each group of points that differ only in num_workers is fitted separately",
}


def fit(
    source: Annotated[
        str,
        typer.Argument(
            metavar="STUDY|FILE",
            help="Study, or CSV file with a column of worker counts and one of times or throughputs.",
            autocompletion=common.complete_study,
        ),
    ],
    baseline: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Compare with N workers. (default: the study's baseline, or the fewest)"),
    ] = None,
    scaling: Annotated[
        Literal["strong", "weak"] | None,
        _of_file(
            help="strong: the same work for any number of workers; weak: N workers do N times as much. "
            "(default: strong, unless the times may be either)"
        ),
    ] = None,
    by: Annotated[
        list[str] | None,
        _of_file(metavar="COLUMN", help="Fit the runs of each value of this column separately."),
    ] = None,
    workers_column: Annotated[
        str | None, _of_file(metavar="COLUMN", help="Column with the number of workers. (default: by its name)")
    ] = None,
    time_column: Annotated[
        str | None, _of_file(metavar="COLUMN", help="Column with the times. (default: by its name and unit)")
    ] = None,
    throughput_column: Annotated[
        str | None, _of_file(metavar="COLUMN", help="Column with the throughputs. (default: by its name and unit)")
    ] = None,
    throughput_of: Annotated[
        Literal["all", "worker"] | None,
        _of_file(help="Throughput of one worker, or of all. (default: by the column's name, else all)"),
    ] = None,
    decimal: Annotated[
        Literal[".", ","] | None,
        _of_file(help="Decimal separator. (default: that of the numbers)"),
    ] = None,
    tracking_uri: common.TrackingUri = None,
    as_json: common.AsJson = False,
) -> None:
    """Fit scaling laws to a study or a CSV file.

    The laws are Amdahl's, Gustafson's and Gunther's. The answer also shows where to stop.

    Examples:  raypar model fit strong_scaling    raypar model fit times.csv --scaling weak
    """
    from raypar.analysis.laws import Scaling
    from raypar.analysis.table import Asked, Role

    if source.lower().endswith(".csv") or Path(source).is_file():
        columns = {Role.WORKERS: workers_column, Role.TIME: time_column, Role.THROUGHPUT: throughput_column}
        asked = Asked(
            {role: name for role, name in columns.items() if name is not None},
            decimal,
            None if throughput_of is None else throughput_of == "worker",
            None if scaling is None else Scaling(scaling),
        )
        _fit_file(source, by or (), asked, baseline, as_json=as_json)
        return
    of_files = {
        "--scaling": scaling,
        "--by": by[0] if by else None,
        "--workers-column": workers_column,
        "--time-column": time_column,
        "--throughput-column": throughput_column,
        "--throughput-of": throughput_of,
        "--decimal": decimal,
    }
    for flag, value in of_files.items():
        if value is not None:
            hint = f"leave it out: {FILE_ONLY.get(flag, 'a study has this information')}"
            raise RayparError(f"{flag} {value} is for files, and `{source}` is a study", hint=hint)
    _fit_study(source, baseline, common.uri_of(tracking_uri), as_json=as_json)


def _fit_file(source: str, by: Sequence[str], asked: Asked, baseline: int | None, *, as_json: bool) -> None:
    """Print the scaling laws of a CSV file."""
    from raypar.analysis.table import read_table
    from raypar.reporting.fit import FitView, print_fit

    view = FitView.of_table(source, read_table(Path(source), by, asked), baseline)
    if as_json:
        common.print_json(view)
    else:
        print_fit(common.stdout(), view)


def _fit_study(name: str, baseline: int | None, tracking_uri: str, *, as_json: bool) -> None:
    """Print the scaling laws of a stored study."""
    from raypar.analysis.scaling import worker_groups
    from raypar.execution.stored import read_study
    from raypar.reporting.fit import FitView, print_fit

    study = read_study(name, tracking_uri, Path.cwd())
    groups = worker_groups(study.question, study.analysis.evidence.points, baseline)
    if not groups:
        hint = "sweep num_workers, for example with --set num_workers=1,2,4"
        raise RayparError(f"study `{name}` has no finished trials that differ only in num_workers", hint=hint)
    view = FitView.of_study(name, groups, study.analysis.verdict.doubt, study.analysis.evidence.excluded)
    if as_json:
        common.print_json(view)
    else:
        print_fit(common.stdout(), view)


def work(
    name: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD",
            help="A name that `raypar model list` shows, or a Python file that defines one.",
            autocompletion=common.complete_workload,
        ),
    ],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Fix a hyperparameter.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, metavar="N", help="Samples per iteration.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of epochs.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, metavar="N", help="Size of the training set.")] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(metavar="X", help="Peak of all workers, in TFLOP/s. (default: measured)")
    ] = None,
    data_dir: common.DataDir = None,
    as_json: common.AsJson = False,
) -> None:
    """Count a network's operations and its least training time.

    Multiply-accumulates are counted by type of layer.

    Example:  raypar model work resnet --set architecture=resnet50 --set image_size=224
    """
    common.check_positive("--peak-tflops", peak_tflops, "112")
    common.set_data_dir(data_dir)
    from raypar.study.workload import Workload

    workload = common.workload_named(name)
    if not isinstance(workload, Workload):
        raise RayparError(_opaque(workload), hint="`raypar model list` lists others")
    config = config_of(workload, settings or [])

    from raypar.reporting.listings import WorkView, print_work
    from raypar.train.flops import work_of

    of_network = work_of(workload, config)
    peak, source = measured_peak(config) if peak_tflops is None else (peak_tflops * 1e12, "as given")
    view = WorkView(
        workload=workload.name,
        title=" ".join([workload.name, *(settings or [])]),
        work=of_network,
        batch_size=batch_size or config["batch_size"],
        epochs=epochs or config["epochs"],
        num_samples=samples or config["num_samples"] or workload.train_size(config),
        peak_flop_per_s=peak,
        peak_source=source,
    )
    if as_json:
        common.print_json(view)
    else:
        print_work(common.stdout(), view)


def config_of(workload: Workload, settings: list[str]) -> Config:
    """Return the complete config of a workload. Raises RayparError if a setting is invalid or has several values."""
    from raypar.execution.plan import choose_auto
    from raypar.run.cluster import this_machine
    from raypar.study.overrides import with_flags
    from raypar.study.study import Study

    study = with_flags(Study(workload=workload, num_repeats=1), settings)
    if study.space:
        keys = ", ".join(study.space)
        raise RayparError(f"{keys}: several values, but work is counted for one", hint="write --set key=value")
    auto, _ = choose_auto(study, this_machine())
    return study.trial({}, 0, auto=auto).config


def measured_peak(config: Config) -> tuple[float, str]:
    """Return the FLOP/s of all workers of a config on this machine, and a note on the measurement."""
    import torch

    from raypar.train.flops import peak_flops
    from raypar.train.precision import numerics_of

    has = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    kind, num_workers = config["device"], config["num_workers"]
    if not has[kind]:
        raise RayparError(f"this machine has no {kind}", hint="use --set device=cpu, or give a peak: --peak-tflops X")
    device = torch.device(kind)
    numerics = numerics_of(config, device)
    dtype, precision = numerics.mixed or numerics.dtype, config["precision"]
    if kind == "cpu":  # workers share one machine: their threads are measured together
        num_threads = num_workers * config["num_threads"]
        threads = counted(num_threads, "thread")
        return peak_flops(device, dtype, num_threads), f"measured: matrix products, {precision}, cpu, {threads}"
    peak = num_workers * peak_flops(device, dtype, 1)
    return peak, f"measured: matrix products, {precision}, {num_workers} × {kind}"
