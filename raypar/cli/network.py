"""Command that measures the network between workers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from raypar.cli import common
from raypar.cli.flags import takes
from raypar.cli.study import executed, load, options_here
from raypar.errors import RayparError, check_for_training
from raypar.execution.flags import RunFlags
from raypar.signals import handle_signals
from raypar.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from raypar.execution.options import Options
    from raypar.predict.second_node import Nodes, StudyNodes
    from raypar.run.runner import Listener
    from raypar.study.study import Study

ONE_NODE = "The network between nodes was not measured: {}."
ONE_WORKER = "The links within a node were not measured: {}."


@takes("repeats", "no_ray", "address", "tracking_uri", "share_machine", "trial_timeout")
def network(
    flags: RunFlags,
    workers: Annotated[
        int | None,
        common.what(min=2, metavar="N", help="Workers of each gang. (default: 2, or one per node)"),
    ] = None,
    nodes: Annotated[
        int | None,
        common.what(min=1, metavar="N", help="Nodes of the second gang; 1: only within a node. (default: 2)"),
    ] = None,
    device: Annotated[
        Literal["cpu", "gpu"] | None, common.what(help="gloo on CPUs, NCCL on GPUs. (default: GPUs if there are any)")
    ] = None,
    for_study: Annotated[
        str | None,
        common.what(
            "--for", metavar="STUDY", help="Also say from which batch on a second node pays for this stored study."
        ),
    ] = None,
    plot: Annotated[Path | None, common.output(metavar="FILE", help="Also draw a plot: .svg or .png.")] = None,
    as_json: common.AsJson = False,
) -> None:
    """Measure the network between workers.

    Gangs of workers time all-reduces of many sizes: packed on one node and, on a cluster, spread over several. The
    study `network` keeps the results, and `raypar model predict --network measured` uses them.

    Examples:  raypar model network    raypar model network --address auto --nodes 2
    """
    check_for_training("without it no worker can measure a network")
    from raypar.reporting.network import NUM_PARAMETERS, NetworkView, plot_of, print_network
    from raypar.reporting.predict import check_plot_path

    if plot is not None:
        check_plot_path(plot)
    if nodes is not None and workers is not None and nodes > workers:
        raise RayparError(f"--nodes {nodes} is more than --workers {workers}", hint=f"write --workers {nodes}")
    if device != "cpu":
        os.environ.setdefault("NCCL_DEBUG", "INFO")  # its log names the transport
    with handle_signals():
        from raypar.predict import all_reduces
        from raypar.predict.second_node import Nodes, SecondNode

        options = options_here(replace(flags, fresh=True), has_moved=True)
        verdict = None if for_study is None else _verdict_of(for_study, options.tracking_uri)
        loaded = load(Path(all_reduces.__file__), flags)
        asked = _study(loaded.study, workers, nodes, device)
        with common.quiet(Path.cwd() / ".raypar" / "logs" / "network.log") as console:
            study, missing = _measurable(asked, nodes, options, common.notices_on(console))
        with executed(replace(loaded, study=study), options, shows_trials=not as_json) as (_, outcome):
            links = all_reduces.measured_links(tuple(outcome.results.values()))
        if links:
            within = next((link for link in links if link.num_nodes == 1), None)
            between = next((link for link in links if link.num_nodes > 1), None)
            view = NetworkView(within, between, missing)
            if between is not None:
                pair = Nodes.of(within, between)
                by_parameters = tuple(SecondNode.of(pair, between, number) for number in NUM_PARAMETERS)
                view = replace(view, by_parameters=by_parameters, of_study=verdict(pair) if verdict else None)
            if as_json:
                common.print_json(view)
            else:
                print_network(common.stdout(), view)
            if plot is not None:
                plot_of(view).save(plot)
                typer.echo(f"wrote {plot}", err=True)
        common.exit_as(outcome)


def _study(study: Study, workers: int | None, nodes: int | None, device: str | None) -> Study:
    """Return the study of a gang on one node, and of one on several."""
    from raypar.study.space import grid

    num_workers = workers or max(2, nodes or 2)
    config = {"num_workers": num_workers, "device": {"gpu": "cuda", None: "auto"}.get(device, device)}
    return replace(study, config=config, space={"nodes": grid(*dict.fromkeys((1, nodes or 2)))})


def _measurable(study: Study, nodes: int | None, options: Options, notice: Listener) -> tuple[Study, str]:
    """Return the study of the gangs that fit on the machines, and a sentence on the gang that doesn't.

    Raises:
        RayparError: none fits, or the nodes that were asked for don't.
    """
    from raypar.execution.machine import cluster_for
    from raypar.execution.plan import choose_auto
    from raypar.study.space import grid

    with cluster_for(study, options, notice) as cluster:
        auto, _ = choose_auto(study, cluster)
        placements = {point["nodes"]: study.trial(point, 0, auto=auto).placement for point in study.points()}
        refused = cluster.refusals(placements.values())
    reasons = {count: refused[placement] for count, placement in placements.items() if placement in refused}
    for count, reason in reasons.items():
        if count == nodes or len(reasons) == len(placements):
            problem = f"the network of {study.config['num_workers']} workers on {counted(int(str(count)), 'node')}"
            hint = "ask for fewer --workers or --nodes, or give the --address of a larger cluster"
            raise RayparError(f"{problem} can't be measured: {reason}", hint=hint)
    if options.flags.address is None and reasons:
        reasons = dict.fromkeys(reasons, "this machine is one node, and --address joins a cluster")
    missing = [(ONE_WORKER if count == 1 else ONE_NODE).format(reason) for count, reason in reasons.items()]
    fitting = [count for count in placements if count not in reasons]
    return replace(study, space={"nodes": grid(*fitting)}), " ".join(missing)


def _verdict_of(name: str, tracking_uri: str) -> Callable[[Nodes], StudyNodes]:
    """Return a function that says whether nodes pay for a stored study.

    Raises:
        RayparError: the study can't be calibrated.
    """
    from raypar.analysis.laws import Scaling
    from raypar.cli.candidates import calibrated
    from raypar.predict.second_node import StudyNodes

    calibration, job = calibrated(name, tracking_uri)

    def verdict(nodes: Nodes) -> StudyNodes:
        per_node = 1 if job.scaling is Scaling.STRONG else nodes.workers_per_node
        return StudyNodes.of(nodes, name, calibration, job.batch_size * per_node)

    return verdict
