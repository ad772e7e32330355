"""The command that counts the work of a workload."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from raypar.cli.common import set_data_dir, shipped_workload, stdout, told
from raypar.cli.options import DataDir, Debug
from raypar.errors import RayparError

if TYPE_CHECKING:
    from raypar.study.workload import Config, Workload


def work(
    name: Annotated[str, typer.Argument(metavar="WORKLOAD", help="One that ships, as `raypar workloads` lists them.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Fix a hyperparameter.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, metavar="N", help="Samples of an iteration.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Reckon with so many epochs.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, metavar="N", help="Of a training set of this size.")] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(metavar="X", help="Reckon with this peak, in TFLOP/s. (default: measured)")
    ] = None,
    data_dir: DataDir = None,
    debug: Debug = False,
) -> None:
    """Count a workload's multiply-accumulates by type of layer, and the least time that its training can take."""
    with told(debug):
        if peak_tflops is not None and not (math.isfinite(peak_tflops) and peak_tflops > 0):
            raise RayparError(f"--peak-tflops {peak_tflops}: must be greater than 0", hint="write --peak-tflops 112")
        set_data_dir(data_dir)
        workload = shipped_workload(name)
        config = config_of(workload, settings or [])

        from raypar.report.listings import Plan, print_work
        from raypar.train.flops import work_of

        counted = work_of(workload, config)
        if peak_tflops is not None:
            peak, source = peak_tflops * 1e12, "as given"
        else:
            peak, source = measured_peak(config)
        plan = Plan(
            batch_size=batch_size or config["batch_size"],
            epochs=epochs or config["epochs"],
            num_samples=samples or config["num_samples"] or workload.train_size(config),
            peak_flops=peak,
            peak_source=source,
        )
        print_work(stdout(), " ".join([workload.name, *(settings or [])]), counted, plan)


def config_of(workload: Workload, settings: list[str]) -> Config:
    """The complete config of a workload with these settings.

    Raises:
        RayparError: a setting is wrong, or sweeps.
    """
    from raypar.study.overrides import with_flags
    from raypar.study.study import Study

    study = with_flags(Study(workload=workload, num_repeats=1), settings)
    if study.space:
        keys = ", ".join(study.space)
        raise RayparError(f"several values of {keys}: work is counted for one", hint="give one value: --set key=value")
    return study.trial({}, 0, default_device="auto").config


def measured_peak(config: Config) -> tuple[float, str]:
    """FLOP/s of all workers of a config together on this machine, and what was measured.

    Raises:
        RayparError: the machine has no such device.
    """
    import torch

    from raypar.train.flops import peak_flops
    from raypar.train.precision import numerics_of

    has = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    kind = config["device"] if config["device"] != "auto" else "cuda" if has["cuda"] else "cpu"
    if not has[kind]:
        raise RayparError(f"this machine has no {kind}", hint="leave device out, or give a peak: --peak-tflops X")
    device, num_workers = torch.device(kind), config["num_workers"]
    numerics = numerics_of(config, device)
    dtype, precision = numerics.mixed or numerics.dtype, config["precision"]
    if kind == "cpu":  # workers share one machine: their threads are measured together
        num_threads = num_workers * config["num_threads"]
        threads = f"{num_threads} thread" + ("s" if num_threads > 1 else "")
        return peak_flops(device, dtype, num_threads), f"measured: matrix products, {precision}, cpu, {threads}"
    peak = num_workers * peak_flops(device, dtype, 1)
    return peak, f"measured: matrix products, {precision}, {num_workers} × {kind}"
