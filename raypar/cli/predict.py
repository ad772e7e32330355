"""Commands on scaling beyond what was measured: predict, fit and work."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from raypar.cli import common
from raypar.errors import NotForTraining, RayparError, check_for_training
from raypar.signals import handle_signals

if TYPE_CHECKING:
    from raypar.predict.network import Network
    from raypar.predict.step_model import Communication, LayerCost
    from raypar.study.space import Value
    from raypar.study.trial import TrialResult
    from raypar.study.workload import AnyWorkload, Config, Workload


MEASURED = "measured"  # --network measured: probe this machine
WITHIN_NODE = "10GB/s,10us"  # unless given: PCI Express 3.0 with 16 lanes, of whose 15.8 GB/s about as much arrives
NO_LOOK = "without it raypar can't look at the model: give its size, as --parameters 25.6M"
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_of_network = partial(typer.Option, rich_help_panel="Network")
_of_file = partial(typer.Option, rich_help_panel="For a CSV file")
MOST_STEP_TIMES = 5  # trials whose step times are read for their variation

# Options of `predict`.
_Settings: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Choose the point to predict from.")
]
_Scaling: TypeAlias = Annotated[
    Literal["strong", "weak"] | None,
    typer.Option(help="strong: the global batch stays; weak: that of a worker does. (default: as the study has it)"),
]
_Parameters: TypeAlias = Annotated[
    str | None, typer.Option(metavar="X", help="Trained parameters (25.6M), where the model can't be looked at.")
]
_InputRate: TypeAlias = Annotated[
    float | None, typer.Option(metavar="X", help="Samples/s that the input pipeline of a node delivers.")
]
_Network: TypeAlias = Annotated[
    str | None,
    _of_network(
        metavar="TEXT",
        help="100Gbit; 1Gbit,0.5ms; 12GB/s,5us; or measured: probe this machine. (default: as the study shows it)",
    ),
]
_NetworkWithin: TypeAlias = Annotated[
    str | None, _of_network(metavar="TEXT", help=f"The links within a node. (default: {WITHIN_NODE})")
]
_Algorithm: TypeAlias = Annotated[
    Literal["auto", "ring", "gloo", "tree", "hierarchical"] | None,
    _of_network(
        help="Of the all-reduce; auto: the fastest but gloo, which is a ring as torch has it on CPUs. "
        "(default: auto; a CPU study's on a given network of single workers gloo; on a measured network ring)"
    ),
]
_BucketMb: TypeAlias = Annotated[
    float | None, _of_network(metavar="X", help="MiB of gradients sent as one; 0: each by itself.")
]
_Overlap: TypeAlias = Annotated[
    bool | None, _of_network("--overlap/--no-overlap", help="Send gradients behind the backward pass, or after.")
]


def predict(
    name: common.StudyName,
    workers: Annotated[str, typer.Option(metavar="N[,N…]", help="Predict 1, 2, 4 … up to the largest of these.")],
    settings: _Settings = None,
    scaling: _Scaling = None,
    parameters: _Parameters = None,
    input_rate: _InputRate = None,
    network: _Network = None,
    nodes_of: Annotated[int, _of_network(min=1, metavar="K", help="Workers of a node, which share its link.")] = 1,
    network_within: _NetworkWithin = None,
    algorithm: _Algorithm = None,
    bucket_mb: _BucketMb = None,
    overlap: _Overlap = None,
    data_dir: common.DataDir = None,
    tracking_uri: common.TrackingUri = None,
    plot: Annotated[Path | None, common.output(metavar="FILE", help="Draw it into this file: .svg or .png.")] = None,
    as_json: common.AsJson = False,
) -> None:
    """Predict more workers or another network from a study.

    Time, throughput and efficiency are the best that its measured trials allow.
    """
    from raypar.analysis.laws import Scaling
    from raypar.execution.stored import read_study
    from raypar.predict import calibration as fitting
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
        check_for_training("without it no worker can measure a network: give it, as --network 100Gbit")
    common.set_data_dir(data_dir)
    study = read_study(name, common.uri_of(tracking_uri), Path.cwd())
    results, excluded = fitting.quiet_results(fitting.choose_results(study.analysis.evidence.results, chosen))
    training = job_spec_of(results, chosen, Scaling(scaling) if scaling else None, input_rate)
    layers, source = _layers(study.store, name, results[0], parameters)
    variation = fitting.variation_of(_with_step_times(study.store, name, results))
    calibration = fitting.calibrate(fitting.observed_points(results), layers, variation)
    sources = [note for note in (study.analysis.evidence.excluded.rstrip("."), excluded, source) if note]
    fit_link = partial(fitting.fit_study_network, calibration, accumulation_steps=training.accumulation_steps)
    how, origin, notes = flags.communication(results[0].spec.config, fit_link)
    counts = worker_counts(asked, [p.num_workers for p in calibration.points])
    view = PredictView(
        study=name,
        title=" ".join([f"Study {name}", *(settings or [])]),
        asked=asked,
        calibration=calibration,
        training=training,
        communication=how,
        sweep=predicted(calibration, training, how, counts, is_measured_network=flags.is_of_study),
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
        typer.echo(f"drawn into {plot}", err=True)


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
        """Raise RayparError for a value that makes no sense, or that excludes another."""
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

    def communication(
        self, config: Config, fit: Callable[[Any], tuple[Network, str]]
    ) -> tuple[Communication, str, list[str]]:
        """Return how gradients are sent, the source of the network, and notes on what was assumed.

        Args:
            config: of the study's trials.
            fit: returns the network that a way of communication shows, and its source.
        """
        from raypar.predict.network import Topology
        from raypar.predict.predict import communication_of

        notes: list[str] = []
        across, origin = _link(self.given, self.network, config, fit)
        link = across if self.nodes_of == 1 else Topology(self.nodes_of, self.within, across)
        if self.nodes_of > 1 and self.network_within is None:
            notes.append(f"what is within a node was not given: {WITHIN_NODE} is that of PCI Express 3.0")
        is_on_cpu = config["device"] == "cpu"
        # A measured network was fitted as if by rings.
        usual = "ring" if self.given is None else "gloo" if is_on_cpu and self.nodes_of == 1 else "auto"
        on_own_cores = self.network == MEASURED and self.overlap is None and is_on_cpu
        overlap = False if on_own_cores else self.overlap
        how = communication_of(config, link, self.algorithm or usual, bucket_mb=self.bucket_mb, overlap=overlap)
        if on_own_cores:
            notes.append("within this machine nothing is hidden: the cores that compute copy the gradients as well")
        if (self.bucket_mb, self.overlap) != (None, None):
            notes.append("buckets or overlap are not as the study had them")
        return how, origin, notes


def _link(
    given: Network | None, flag: str | None, config: Mapping[str, Any], fit: Callable[[Any], tuple[Network, str]]
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
        raise RayparError(f"--workers {text}: is no list of counts", hint="write --workers 1024, or 8,64") from None


def _chosen_point(settings: Sequence[str]) -> dict[str, Value]:
    chosen = common.chosen_values(settings)
    for key, values in chosen.items():
        if key == "num_workers":
            hint = f"write --workers {values[0]}"
            raise RayparError(f"--set {key}={values[0]}: worker counts are predicted", hint=hint)
        if len(values) > 1:
            raise RayparError(f"--set {key}: several values", hint=f"choose one: --set {key}=VALUE")
    return {key: values[0] for key, values in chosen.items()}


def _with_step_times(store: Any, name: str, results: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the last trials of one worker with their step times."""
    alone = [r for r in results if r.spec.config.get("num_workers") == 1][-MOST_STEP_TIMES:]
    return [replace(r, step_times_s=store.step_times(name, r.spec.identity)) for r in alone]


def _layers(store: Any, name: str, result: TrialResult, parameters: str | None) -> tuple[tuple[LayerCost, ...], str]:
    """Return the layers of a trial's network, and a sentence on their source."""
    from raypar.predict.step_model import one_layer, read_layers, write_layers

    at_the_end = "the layers are not known: all gradients are there at the end of the backward pass"
    counted = "computing is shared out among the layers by counted work"
    config: Mapping[str, Any] = result.spec.config
    num_parameters = common.parse_quantity("--parameters", parameters, _UNITS, "number of parameters", "25.6M")
    if num_parameters is not None:
        return one_layer(round(num_parameters) * (8 if config.get("precision") == "fp64" else 4)), at_the_end
    from raypar.study.workload import Workload

    workload, sources = _workload(store, name, result.spec.workload)
    if not isinstance(workload, Workload):
        lost = f"the file of study `{name}` is not in this folder, and no workload `{result.spec.workload}` ships with"
        problem = f"{lost} raypar: its network can't be inspected"
        if workload is not None:
            problem = f"workload {workload.name} is a {workload.kind}: raypar can't look at its network"
        raise RayparError(problem, hint="give its size: --parameters 25.6M")
    kept = Path.cwd() / ".raypar" / "layers" / f"{_fingerprint(workload, config, sources)}.json"
    if (cached_layers := read_layers(kept)) is not None:
        return cached_layers, counted
    check_for_training(NO_LOOK)
    from raypar.predict.layers import is_one_layer, layer_costs

    layers = layer_costs(workload, config)
    if is_one_layer(layers):
        return layers, at_the_end
    write_layers(kept, layers)
    return layers, counted


def _fingerprint(workload: Workload, config: Mapping[str, Any], sources: Sequence[str]) -> str:
    """Hash the code that makes the network, and its hyperparameters."""
    from raypar import __version__
    from raypar.predict.calibration import FREE_KEYS

    assert workload.model is not None
    try:
        source = Path(inspect.getsourcefile(workload.model) or "").read_text(encoding="utf-8")
    except (OSError, TypeError):  # made where no file is
        source = ""
    chosen = sorted((key, str(value)) for key, value in config.items() if key not in FREE_KEYS)
    content = json.dumps([__version__, workload.name, source, *sources, chosen])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _workload(store: Any, name: str, workload_name: str) -> tuple[AnyWorkload | None, tuple[str, ...]]:
    """Return the workload of the study's file, with its sources, else a shipped one; None: neither.

    A store is data: a file that it names is run only from this folder.
    """
    from raypar.execution.options import is_in_folder
    from raypar.study.loader import load_study

    last = store.resume_info(name)
    if last and is_in_folder(str(last.get("file", "")), Path.cwd()):
        if last.get("data_dir"):
            os.environ.setdefault("RAYPAR_DATA_DIR", str(last["data_dir"]))
        try:
            with handle_signals():
                loaded = load_study(Path(last["file"]), [str(s) for s in last.get("set", ())])
        except NotForTraining as error:
            raise NotForTraining(f"{error.message}, and {NO_LOOK}") from None
        except RayparError:
            loaded = None
        if loaded is not None and loaded.study.workload.name == workload_name:
            texts = [path.read_text(encoding="utf-8") for path in loaded.module_files]
            return loaded.study.workload, (loaded.source, *texts)
    from raypar.workloads import WORKLOADS

    return WORKLOADS.get(workload_name), ()


# Why flags for files are of no use for a study.
FILE_ONLY = {
    "--scaling": "a study that fixes per_worker_batch_size scales weakly, any other strongly",
    "--by": "each group of points that differ only in num_workers is fitted on its own",
}


def fit(
    source: Annotated[
        str,
        typer.Argument(
            metavar="STUDY|FILE",
            help="A study, or a CSV file with a column of worker counts and one of times or throughputs.",
            autocompletion=common.complete_study,
        ),
    ],
    baseline: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Compare with N workers. (default: the study's own, or the fewest)"),
    ] = None,
    scaling: Annotated[
        Literal["strong", "weak"] | None,
        _of_file(
            help="strong: the same work for all; weak: N workers do N times as much. "
            "(default: strong, unless the times may be either)"
        ),
    ] = None,
    by: Annotated[
        list[str] | None,
        _of_file(metavar="COLUMN", help="Fit the runs of each value of a column on their own."),
    ] = None,
    workers_column: Annotated[
        str | None, _of_file(metavar="COLUMN", help="Has the number of workers. (default: by its name)")
    ] = None,
    time_column: Annotated[
        str | None, _of_file(metavar="COLUMN", help="Has the times. (default: by its name and unit)")
    ] = None,
    throughput_column: Annotated[
        str | None, _of_file(metavar="COLUMN", help="Has the throughputs. (default: by its name and unit)")
    ] = None,
    throughput_of: Annotated[
        Literal["all", "worker"] | None,
        _of_file(help="Whose throughput it is. (default: by the column's name, else all workers')"),
    ] = None,
    decimal: Annotated[
        Literal[".", ","] | None,
        _of_file(help="What separates a number's decimals. (default: as the numbers show it)"),
    ] = None,
    tracking_uri: common.TrackingUri = None,
    as_json: common.AsJson = False,
) -> None:
    """Fit scaling laws to a study or a CSV file.

    The laws are Amdahl's, Gustafson's and Gunther's. The answer also shows where to stop.
    """
    from raypar.analysis.laws import Scaling
    from raypar.analysis.table import Asked, Role, read_table
    from raypar.reporting.fit import FitView, print_fit

    if source.lower().endswith(".csv") or Path(source).is_file():
        columns = {Role.WORKERS: workers_column, Role.TIME: time_column, Role.THROUGHPUT: throughput_column}
        asked = Asked(
            {role: name for role, name in columns.items() if name is not None},
            decimal,
            None if throughput_of is None else throughput_of == "worker",
            None if scaling is None else Scaling(scaling),
        )
        view = FitView.of_table(source, read_table(Path(source), by or (), asked), baseline)
        if as_json:
            common.print_json(view)
        else:
            print_fit(common.stdout(), view)
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
            hint = f"leave it out: {FILE_ONLY.get(flag, 'it is known of a study')}"
            raise RayparError(f"{flag} {value} is for files, and `{source}` is none", hint=hint)
    _fit_study(source, baseline, common.uri_of(tracking_uri), as_json=as_json)


def _fit_study(name: str, baseline: int | None, tracking_uri: str, *, as_json: bool) -> None:
    """Print what a stored study says about scaling."""
    from raypar.analysis.scaling import worker_groups
    from raypar.execution.stored import read_study
    from raypar.reporting.fit import FitView, print_fit

    study = read_study(name, tracking_uri, Path.cwd())
    groups = worker_groups(study.question, study.analysis.evidence.points, baseline)
    if not groups:
        hint = "sweep num_workers, say with --set num_workers=1,2,4"
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
            help="One that ships, as `raypar model list` shows them.",
            autocompletion=common.complete_workload,
        ),
    ],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Fix a hyperparameter.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, metavar="N", help="Samples of an iteration.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Reckon with so many epochs.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, metavar="N", help="Of a training set of this size.")] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(metavar="X", help="Reckon with this peak, in TFLOP/s. (default: measured)")
    ] = None,
    data_dir: common.DataDir = None,
    as_json: common.AsJson = False,
) -> None:
    """Count a network's operations and its least training time.

    Multiply-accumulates are counted by type of layer.
    """
    common.check_positive("--peak-tflops", peak_tflops, "112")
    common.set_data_dir(data_dir)
    from raypar.study.workload import Workload

    workload = common.workload_named(name)
    if not isinstance(workload, Workload):
        problem = f"workload {workload.name} is a {workload.kind}: raypar can't look at its network"
        raise RayparError(problem, hint="`raypar model list` shows others")
    config = config_of(workload, settings or [])

    from raypar.reporting.listings import WorkView, print_work
    from raypar.train.flops import work_of

    counted = work_of(workload, config)
    peak, source = measured_peak(config) if peak_tflops is None else (peak_tflops * 1e12, "as given")
    view = WorkView(
        workload=workload.name,
        title=" ".join([workload.name, *(settings or [])]),
        work=counted,
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
    """Return the complete config of a workload with these settings. Raises RayparError where one is wrong or sweeps."""
    from raypar.execution.plan import choose_auto
    from raypar.run.cluster import this_machine
    from raypar.study.overrides import with_flags
    from raypar.study.study import Study

    study = with_flags(Study(workload=workload, num_repeats=1), settings)
    if study.space:
        keys = ", ".join(study.space)
        raise RayparError(f"several values of {keys}: work is counted for one", hint="give one value: --set key=value")
    auto, _ = choose_auto(study, this_machine())
    return study.trial({}, 0, auto=auto).config


def measured_peak(config: Config) -> tuple[float, str]:
    """Return FLOP/s of all workers of a config together on this machine, and what was measured."""
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
        threads = f"{num_threads} thread" + ("s" if num_threads > 1 else "")
        return peak_flops(device, dtype, num_threads), f"measured: matrix products, {precision}, cpu, {threads}"
    peak = num_workers * peak_flops(device, dtype, 1)
    return peak, f"measured: matrix products, {precision}, {num_workers} × {kind}"
