"""What ships with raypar to be trained: ``from raypar.workloads import mnist_mlp``."""

from raypar.workloads.digits import digits
from raypar.workloads.mnist_cnn import mnist_cnn
from raypar.workloads.mnist_mlp import mnist_mlp

__all__ = ["digits", "mnist_cnn", "mnist_mlp"]
