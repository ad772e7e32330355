"""What does a larger batch gain for PyTorch's MNIST example, and what does it cost in accuracy?

The script is not part of raypar; it runs unchanged, and downloads MNIST into its own clone:

    git clone --depth 1 https://github.com/pytorch/examples studies/foreign/examples
"""

from foreign_scripts import cloned

from raypar import Study, Workload, grid

EXAMPLES = "https://github.com/pytorch/examples"
mnist = Workload.from_command(
    "python main.py --epochs {epochs} --batch-size {batch_size} --lr {lr} --seed {seed}",
    folder="examples/mnist",  # it reads ../data
    name="mnist/main.py",
    metrics={
        "loss": r"\tLoss: ([-+\d.e]*\d|nan|inf)",
        "test_loss": r"Average loss: ([-+\d.e]*\d|nan|inf)",
        "test_accuracy_percent": r"Accuracy: \d+/\d+ \((\d+)%\)",
    },
    metric="test_loss",
    prepare=cloned(EXAMPLES, "examples/mnist/main.py"),
)
study = Study(
    workload=mnist,
    space={"batch_size": grid(64, 256)},
    baseline={"batch_size": 64},
    config={"epochs": 1, "lr": 1.0},
)
