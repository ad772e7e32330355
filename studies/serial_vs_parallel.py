"""What does a second worker bring to a convolutional network on MNIST, and does it cost accuracy?

After the document "Accelerating training by data parallelisation": 749 s serial and 222 s with two processes on a cloud
CPU, and the highest accuracy, 99.11 %, in the serial run. Expect less, about 1.2 on two cores: with 32 images each, a
step is short against the exchange of its gradients, and the document's 3.4 can't come from a second process alone.
`--set batch_size=512` comes to almost 2. The accuracies are alike: the global batch is the same.
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
