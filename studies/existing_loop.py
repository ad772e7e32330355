"""What does a second worker gain for an existing Ray Train loop (from Ray's PyTorch guide)?

It runs unchanged on one worker and on two. Expect well below 2x: loading the data is part of its steps.
"""

import ray.train.torch
import torch
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import FashionMNIST
from torchvision.models import resnet18
from torchvision.transforms import Compose, Normalize, ToTensor

from raypar import Study, Workload, grid
from raypar.workloads.datasets import ensure_image_set


def train_func(config):
    model = resnet18(num_classes=10)
    model.conv1 = torch.nn.Conv2d(1, 64, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False)
    model = ray.train.torch.prepare_model(model)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    transform = Compose([ToTensor(), Normalize((0.28604,), (0.32025,))])
    train_data = FashionMNIST(root=ensure_image_set("FashionMNIST"), train=True, transform=transform)
    train_loader = DataLoader(Subset(train_data, range(config["num_images"])), batch_size=128, shuffle=True)
    train_loader = ray.train.torch.prepare_data_loader(train_loader)
    for epoch in range(config["num_epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            train_loader.sampler.set_epoch(epoch)
        for images, labels in train_loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ray.train.report({"loss": loss.item(), "epoch": epoch})


config = {"lr": 0.001, "num_epochs": 2, "num_images": 1280}
workload = Workload.from_train_loop(train_func, prepare=lambda _: ensure_image_set("FashionMNIST"))
study = Study(workload=workload, space={"num_workers": grid(1, 2)}, baseline={"num_workers": 1}, config=config)
