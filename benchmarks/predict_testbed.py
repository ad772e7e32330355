"""Predicted weak-scaling efficiency of a published testbed: 128 nodes with 8 GPUs each.

"A case study on large-scale machine learning" prints 99.2 % for ResNet-50 on ImageNet, 64 images a GPU, 8 P40 a node,
100 Gb/s Ethernet. Its figures for the speed of a GPU differ by a factor of nine, so both ends are predicted. Nothing is
fitted to the 99.2 %: the network's layers are counted, everything else is assumed and listed. The last row is the time
to predict 1 to 4,096 workers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from common import begin, parser_for, print_row

from raypar import Study, units
from raypar.predict.layers import layer_costs
from raypar.predict.network import Floats, Network, Topology, parse_network
from raypar.predict.step_model import Communication, LayerCost, StepTime, simulate_steps
from raypar.workloads import resnet

PRINTED = 0.992
GPUS, BATCH, EPOCHS, NUM_IMAGES = 8, 64, 90, 1_280_000
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Images/s of a GPU.
SLOW = 218 / GPUS  # "218 images/s" for a node
FAST = EPOCHS * NUM_IMAGES / (7.8 * 60) / (128 * GPUS)  # "7.8 minutes" for 90 epochs on 128 nodes
WITHIN = Network(10e-6, 10e9)  # PCI Express 3.0 x 16: about two thirds of its 15.8 GB/s
BETWEEN = parse_network("100Gbit,20us")
USUAL = Communication(Topology(GPUS, WITHIN, BETWEEN), "hierarchical")
ASSUMED = (
    "gradients: all of ResNet-50's for 1,000 classes, in fp32 unless noted; a smaller model communicates less",
    "work: counted multiply-accumulates of each layer, forward and backward; GPUs run at the printed speed",
    f"within a node: {units.seconds(WITHIN.latency_s)}, {units.size(WITHIN.bandwidth_bytes_per_s)}/s (PCI Express 3.0)",
    f"between nodes: {units.seconds(BETWEEN.latency_s)}, {units.size(BETWEEN.bandwidth_bytes_per_s)}/s "
    "(94 % of 100 Gb/s, the rest is framing), shared by a node's GPUs; links are independent",
    "all-reduce: hierarchical; torch's buckets (1 MiB, then 25 MiB), sent during the backward pass",
    "no stragglers and an input pipeline that keeps up, unless noted",
    "efficiency: images/s of all nodes over those of as many single nodes",
)


@dataclass(frozen=True)
class Case:
    """One set of assumptions."""

    name: str
    images_per_s: float = FAST
    how: Communication = USUAL
    variation: float = 0.0


CASES = (
    Case("218 images/s a node", images_per_s=SLOW),
    Case("7.8 minutes"),
    Case("… gradients in fp16", how=replace(USUAL, compression=0.5)),
    Case("… no overlap", how=replace(USUAL, overlap=False)),
    Case("… one ring over all", how=replace(USUAL, algorithm="ring")),
    Case("… no fusion", how=replace(USUAL, bucket_bytes=0)),
    Case("… steps vary by 0.2 %", variation=0.002),
    Case("… steps vary by 1 %", variation=0.01),
)


def steps(layers: tuple[LayerCost, ...], case: Case, workers: np.ndarray) -> StepTime[Floats]:
    compute_s = np.asarray(BATCH / case.images_per_s)
    return simulate_steps(layers, workers, case.how, compute_s=compute_s, variation=case.variation)


def main() -> None:
    begin(parser_for(__doc__))
    study = Study(
        workload=resnet,
        name="testbed",
        config={"architecture": "resnet50", "image_size": 224, "num_classes": 1000, "num_images": 1000},
    )
    config = study.trial({}, 0).config
    layers = layer_costs(resnet, config)
    print_row("gradients", units.size(sum(layer.num_gradient_bytes for layer in layers)))
    print("\nAssumed:")
    for line in ASSUMED:
        print(f"- {line}")
    print(f"\n{'efficiency on … nodes':<24}" + "".join(f"{nodes:>9}" for nodes in NODES))
    workers = GPUS * np.array(NODES)
    efficiencies = {}
    for case in CASES:
        times = steps(layers, case, workers).step_time_s
        efficiencies[case.name] = dict(zip(NODES, times[0] / times, strict=True))
        cells = "".join(f"{units.percent(value, 1):>9}" for value in efficiencies[case.name].values())
        print(f"{case.name:<24}{cells}", flush=True)
    print()
    for case in CASES[:2]:
        node_images_per_s = GPUS * BATCH / steps(layers, case, workers[:1]).step_time_s[0]
        for nodes, printed in ((128, PRINTED), (256, None)):
            efficiency, title = efficiencies[case.name][nodes], f"{case.name}: {nodes} nodes"
            row = units.percent(efficiency, 2)
            if printed is not None:
                row += f"; printed {units.percent(printed, 1)}: {100 * (efficiency - printed):+.2f} points"
            print_row(title, row)
            rate = nodes * node_images_per_s * efficiency
            print_row(f"{title}, images/s, {EPOCHS} epochs", f"{units.compact(rate)}, {minutes(rate)}")
    begun_s = time.perf_counter()
    steps(layers, CASES[1], np.arange(1, 4097))
    print_row("time to predict 1, 2, 3 … 4,096 workers", units.seconds(time.perf_counter() - begun_s))


def minutes(images_per_s: float) -> str:
    return f"{EPOCHS * NUM_IMAGES / images_per_s / 60:.1f} min"


if __name__ == "__main__":
    main()
