"""Command that predicts what was not measured."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from raypar.cli import candidates, common
from raypar.errors import RayparError, check_for_training

MAX_DOUBLINGS = 21
_of_network = partial(typer.Option, rich_help_panel="Network")

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
    str | None, _of_network(metavar="TEXT", help=f"Links within a node. (default: {candidates.WITHIN_NODE})")
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
    workers: Annotated[
        str, typer.Option(metavar="N[,N…]", help="Predict 1, 2, 4 … up to the largest of these; 8..512: from 8 to 512.")
    ],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STUDY|FILE.csv…",
            help="Studies, or tables (CSV, .xlsx, Markdown) of worker counts and times or throughputs.",
            autocompletion=common.complete_study,
        ),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(metavar="NAME", help="Predict from the rate of one worker, for this workload.")
    ] = None,
    samples_per_s: Annotated[
        float | None, typer.Option(metavar="X", help="With --workload: rate of one worker, such as a published one.")
    ] = None,
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
    """Predict more workers or another network.

    From stored studies, tables or a published rate: a median, and a range that holds the truth in 9 of 10 cases.

    Examples:  raypar model predict strong_scaling --workers 64 --nodes-of 8 --network 100Gbit    raypar model predict
    times.csv --workers 64    raypar model predict --workload resnet --set architecture=resnet50 --samples-per-s 360
    --workers 8..512 --nodes-of 8 --network 100Gbit
    """
    from raypar.analysis.laws import Scaling
    from raypar.predict.predict import worker_counts
    from raypar.reporting.predict import PredictView, check_plot_path, plot_of, print_prediction

    if (workload is None) != (samples_per_s is None):
        raise RayparError("--workload and --samples-per-s belong together", hint="give both, or a study")
    if not sources and workload is None:
        hint = "name a study, a table, or --workload resnet --samples-per-s 360"
        raise RayparError("nothing to predict from", hint=hint)
    asked = _counts(workers)
    worker_counts(asked)  # before anything slow: a mistake is reported at once
    common.check_positive("--input-rate", input_rate, "1000")
    common.check_positive("--samples-per-s", samples_per_s, "360")
    if plot is not None:
        check_plot_path(plot)
    flags = candidates.NetworkFlags(network, nodes_of, network_within, algorithm, bucket_mb, overlap)
    flags.check()
    if network == candidates.MEASURED:
        check_for_training("without it no worker can measure a network: give one, for example --network 100Gbit")
    common.set_data_dir(data_dir)
    request = candidates.PredictRequest(
        workers=asked,
        settings=tuple(settings or ()),
        scaling=Scaling(scaling) if scaling else None,
        num_parameters=candidates.num_parameters_of(parameters),
        input_rate=input_rate,
        network=flags,
    )
    views = [
        candidates.of_table(Path(source), request)
        if common.is_table(source)
        else candidates.of_study(source, request, common.uri_of(tracking_uri))
        for source in sources or ()
    ]
    if workload is not None and samples_per_s is not None:
        views.append(candidates.of_rate(workload, samples_per_s, request))
    if plot is not None and len(views) > 1:
        raise RayparError("--plot draws one candidate", hint="predict from one study or file")
    view = PredictView(asked, tuple(views))
    if as_json:
        common.print_json(view)
    else:
        print_prediction(common.stdout(), view)
    if plot is not None:
        plot_of(views[0]).save(plot)
        typer.echo(f"wrote {plot}", err=True)


def _counts(text: str) -> tuple[int, ...]:
    """Return the worker counts of a list; a range 8..512 has the powers of two times its start, and its end."""
    counts: set[int] = set()
    try:
        for part in text.replace("_", "").split(","):
            start, is_range, end = part.partition("..")
            counts.add(int(start))
            if is_range:
                doubled = (int(start) * 2**i for i in range(MAX_DOUBLINGS))
                counts |= {int(end), *(n for n in doubled if 0 < n <= int(end))}
    except ValueError:
        hint = "write --workers 1024, 8,64 or 8..512"
        raise RayparError(f"--workers {text}: must be a list of counts", hint=hint) from None
    return tuple(sorted(counts))
