"""Workloads that ship with raypar: ``from raypar.workloads import mnist_mlp``.

`WORKLOADS` has those that installed packages add, too.
"""

from raypar.plugins import registered
from raypar.study.workload import AnyWorkload
from raypar.workloads.digits import digits
from raypar.workloads.mnist_cnn import mnist_cnn
from raypar.workloads.mnist_mlp import mnist_mlp
from raypar.workloads.resnet import resnet
from raypar.workloads.transformer import transformer
from raypar.workloads.wide_mlp import wide_mlp

__all__ = [
    "digits",
    "mnist_cnn",
    "mnist_mlp",
    "resnet",
    "transformer",
    "wide_mlp",
]

WORKLOADS = registered("raypar.workloads", AnyWorkload, {name: f"raypar.workloads:{name}" for name in __all__})
