"""Predicted efficiency of published systems beside the measured one.

Each case is computed as `raypar model predict --nodes-of K --network …` does, for the published batch of a GPU: counted
layers, torch's buckets behind the backward pass, the fastest of ring, tree and hierarchical all-reduce, workers whose
steps vary by 1 % and by 3 %, as is assumed if nothing was measured. Nothing is fitted. A case is missed if the
prediction with 1 % is more than 5 points off.

Horovod: Sergeev and Del Balso, https://arxiv.org/abs/1802.05799, and the benchmarks of its documentation, on servers of
4 P100s with RoCE-capable 25 Gbit/s. Facebook: Goyal et al., https://arxiv.org/abs/1706.02677, 32 servers of 8 P100s
with 50 Gbit/s, against one server. The case study is that of `predict_testbed.py`; its GPUs do 27 or 246 images/s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from common import begin, parser_for, print_row

from raypar import Study, units
from raypar.analysis.laws import Scaling
from raypar.predict.calibration import USUAL_VARIATIONS, Calibration, ObservedPoint, calibrate
from raypar.predict.layers import layer_costs
from raypar.predict.network import Topology, parse_network
from raypar.predict.predict import JobSpec, communication_of, predict
from raypar.predict.step_model import LayerCost
from raypar.study.space import Value
from raypar.workloads import resnet

MISSED = 0.05  # of efficiency
PCI_EXPRESS, NVLINK = "10GB/s,10us", "20GB/s,10us"
NUM_IMAGES, NUM_CLASSES = 1_281_167, 1000
# Images/s of one P100, batch 64: TensorFlow's benchmarks on a DGX-1 (May 2017). ResNet-101's lies between those of
# ResNet-50 (219) and ResNet-152 (91.8), in proportion to the work.
INCEPTION, RESNET101, VGG16 = ("inception_v3", 142.0), ("resnet101", 129.0), ("vgg16", 154.0)
# "From 29 hours" on 8 GPUs "to one": 90 epochs.
RESNET50 = ("resnet50", 90 * NUM_IMAGES / (29 * 3600) / 8)


@dataclass(frozen=True)
class Case:
    """A published measurement.

    Attributes:
        system: who published it.
        model: of torchvision, and images/s of one GPU.
        num_gpus: in all.
        gpus_per_node: which share a node's link.
        within: links within a node.
        between: links of the nodes.
        batch_size: of a GPU.
        published: efficiency.
        baseline: GPUs that the efficiency is relative to.
    """

    system: str
    model: tuple[str, float]
    num_gpus: int
    published: float
    gpus_per_node: int = 4
    within: str = PCI_EXPRESS
    between: str = "25Gbit"
    batch_size: int = 64
    baseline: int = 1

    @property
    def name(self) -> str:
        return f"{self.system}: {self.model[0]}, {self.num_gpus} GPUs, {self.between}"


CASES = (
    Case("Horovod", INCEPTION, 128, 0.90),
    Case("Horovod", INCEPTION, 512, 0.90),
    Case("Horovod", RESNET101, 128, 0.90),
    Case("Horovod", RESNET101, 512, 0.90),
    Case("Horovod", VGG16, 128, 0.79),
    Case("Horovod", VGG16, 512, 0.68),
    Case("Facebook", RESNET50, 256, 0.90, 8, NVLINK, "50Gbit", batch_size=32, baseline=8),
    Case("case study, 27", ("resnet50", 218 / 8), 1024, 0.992, 8, between="100Gbit", baseline=8),
    Case("case study, 246", ("resnet50", 246.0), 1024, 0.992, 8, between="100Gbit", baseline=8),
)


def layers_of(model: str) -> tuple[LayerCost, ...]:
    size = 299 if model == "inception_v3" else 224
    config: dict[str, Value] = {"architecture": model, "image_size": size, "num_classes": NUM_CLASSES}
    study = Study(workload=resnet, name="published", config={**config, "num_images": NUM_CLASSES})
    return layer_costs(resnet, study.trial({}, 0).config)


def efficiency(case: Case, calibration: Calibration) -> float:
    """Return the predicted throughput over that of the same number of baselines."""
    network = Topology(case.gpus_per_node, parse_network(case.within), parse_network(case.between))
    job = JobSpec(Scaling.WEAK, case.batch_size, NUM_IMAGES)
    sweep = predict(calibration, job, communication_of({}, network), [case.baseline, case.num_gpus])
    base, many = sweep.predictions
    return many.efficiency.value / base.efficiency.value


def predicted(case: Case, layers: tuple[LayerCost, ...]) -> tuple[float, float]:
    """Return the efficiency with the least and with the most usual variation."""
    step_s = case.batch_size / case.model[1]
    calibration = calibrate([ObservedPoint(1, case.batch_size, (step_s,))], layers)
    few, many = (efficiency(case, replace(calibration, variation=v)) for v in USUAL_VARIATIONS)
    return few, many


def is_missed(case: Case, efficiency: float) -> bool:
    return abs(efficiency - case.published) > MISSED


def main() -> None:
    begin(parser_for(__doc__))
    layers = {model: layers_of(model) for model in dict.fromkeys(case.model[0] for case in CASES)}
    num_missed = 0
    for case in CASES:
        few, many = predicted(case, layers[case.model[0]])
        verdict = f"MISSED, {100 * (few - case.published):+.0f} points" if is_missed(case, few) else "within 5 points"
        num_missed += is_missed(case, few)
        at_best = f"at best {units.percent(few, 1)} ({units.percent(many, 1)} with 3 %)"
        print_row(case.name, f"{at_best}, published {units.percent(case.published, 1)}: {verdict}")
    errors = [predicted(case, layers[case.model[0]])[0] - case.published for case in CASES]
    print_row("missed", f"{num_missed} of {len(CASES)}; median {100 * np.median(errors):+.0f} points")


if __name__ == "__main__":
    main()
