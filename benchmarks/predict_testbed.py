"""What the step model says of a testbed of 128 nodes with 8 GPUs each, whose weak-scaling efficiency is printed.

The lecture "A case study on large-scale machine learning": ResNet-50 on ImageNet, 64 images a GPU, 8 P40 a node,
100 Gb/s Ethernet; 99.2 % on 128 nodes. Its figures for the speed of a GPU differ by a factor of nine, so that both ends
are taken. Nothing is fitted to the 99.2 %: the network's layers are counted, everything else is assumed and listed.
Last, how long it takes to predict 1 to 4,096 workers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from common import begin, parser_for, tell

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
WITHIN = Network(10e-6, 10e9)  # PCI Express 3.0 x 16, of whose 15.8 GB/s about two thirds arrive
BETWEEN = parse_network("100Gbit,20us")
USUAL = Communication(Topology(GPUS, WITHIN, BETWEEN), "hierarchical")
ASSUMED = (
    "gradients: all of ResNet-50's for 1,000 classes, in fp32 unless said otherwise; the loss of a smaller one is less",
    "work: counted multiply-accumulates of each layer, forward and backward; a GPU's speed is the printed one",
    f"within a node: {units.seconds(WITHIN.latency_s)}, {units.size(WITHIN.bandwidth_bytes_per_s)}/s (PCI Express 3.0)",
    f"between nodes: {units.seconds(BETWEEN.latency_s)}, {units.size(BETWEEN.bandwidth_bytes_per_s)}/s "
    "(94 % of 100 Gb/s, the rest is framing), shared by a node's GPUs; no link slows another",
    "all-reduce: hierarchical; torch's buckets (1 MiB, then 25 MiB), sent behind the backward pass",
    "no stragglers and an input pipeline that keeps up, unless said otherwise",
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
    tell("gradients", units.size(sum(layer.num_gradient_bytes for layer in layers)))
    print("\nAssumed:")
    for line in ASSUMED:
        print(f"- {line}")
    print(f"\n{'efficiency on … nodes':<24}" + "".join(f"{nodes:>9}" for nodes in NODES))
    workers = GPUS * np.array(NODES)
    found = {}
    for case in CASES:
        times = steps(layers, case, workers).step_time_s
        found[case.name] = times[0] / times
        print(f"{case.name:<24}" + "".join(f"{units.percent(e, 1):>9}" for e in found[case.name]), flush=True)
    print()
    for case in CASES[:2]:
        efficiencies = dict(zip(NODES, found[case.name], strict=True))
        one = steps(layers, case, workers[:1]).step_time_s[0]
        rate = 128 * GPUS * BATCH / one * efficiencies[128]
        off = 100 * (efficiencies[128] - PRINTED)
        tell(f"{case.name}: 128 nodes", f"{units.percent(efficiencies[128], 2)}; printed 99.2 %: {off:+.2f} points")
        tell(f"{case.name}: 128 nodes, images/s, {EPOCHS} epochs", f"{units.compact(rate)}, {minutes(rate)}")
        rate = 256 * GPUS * BATCH / one * efficiencies[256]
        tell(f"{case.name}: 256 nodes", f"{units.percent(efficiencies[256], 2)}")
        tell(f"{case.name}: 256 nodes, images/s, {EPOCHS} epochs", f"{units.compact(rate)}, {minutes(rate)}")
    begun_s = time.perf_counter()
    steps(layers, CASES[1], np.arange(1, 4097))
    tell("1, 2, 3 … 4,096 workers, predicted in", units.seconds(time.perf_counter() - begun_s))


def minutes(images_per_s: float) -> str:
    return f"{EPOCHS * NUM_IMAGES / images_per_s / 60:.1f} min"


if __name__ == "__main__":
    main()
