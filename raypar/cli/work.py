"""Command that counts a network's operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from raypar.cli import common
from raypar.errors import RayparError
from raypar.units import counted

if TYPE_CHECKING:
    from raypar.study.workload import AnyWorkload, Config, Workload


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
        raise RayparError(opaque_reason(workload), hint="`raypar model list` lists others")
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


def opaque_reason(workload: AnyWorkload) -> str:
    """Return why the network of a train loop or a command can't be inspected."""
    return f"workload {workload.name} is a {workload.kind}: raypar can't inspect its network"
