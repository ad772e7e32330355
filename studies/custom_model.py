"""How wide should a small convolutional network on 8x8 digits be, and does a second worker pay off for it?

An example of a custom workload: model and data are two functions of the trial's config. Expect the wider network to be
somewhat more accurate and to gain more from the second worker: its steps take longer, its gradients hardly grow.
"""

from raypar import Data, Split, Study, Workload, grid


def model(config):
    from torch import nn

    channels = config["channels"]
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(channels * 8 * 8, 10),
    )


def data(_):
    import torch
    from sklearn.datasets import load_digits

    pixels, targets = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = pixels.float().reshape(-1, 1, 8, 8) / 16
    return Data(train=Split(images[:1500], targets[:1500]), val=Split(images[1500:], targets[1500:]))


study = Study(
    workload=Workload(name="small_cnn", model=model, data=data, num_train_samples=1500, options={"channels": 16}),
    space={"channels": grid(8, 32), "num_workers": grid(1, 2)},
    baseline={"num_workers": 1},
    config={"epochs": 30, "batch_size": 250, "optimizer": "adam", "lr": 0.005},
)
