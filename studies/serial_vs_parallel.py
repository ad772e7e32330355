"""What speedup does a second worker bring to a convolutional network on MNIST, and does it cost accuracy?

"Accelerating training by data parallelisation" measured 749 s in serial and 222 s with two processes on a cloud CPU,
with the highest accuracy, 99.11 %, in serial. Expect less, about 1.2x on two cores: with 32 images per worker a step is
short compared with its gradient exchange, and a second process alone can't explain the document's 3.4x.
`--set batch_size=512` reaches almost 2x. The accuracies are alike, since the global batch is the same.
"""

from raypar import Study, grid
from raypar.workloads import mnist_cnn

study = Study(
    workload=mnist_cnn,
    space={"num_workers": grid(1, 2)},
    baseline={"num_workers": 1},
    num_repeats=3,
    config={"batch_size": 64, "epochs": 5},
)
