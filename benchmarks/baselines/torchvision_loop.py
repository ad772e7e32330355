"""The usual training script: torchvision's MNIST and torch's DataLoader, one process, one thread.

Loader processes may use every core.
"""

import os
import time

import torch
from common import send_result, training_parser
from torch.nn import functional
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, transforms

from raypar import workloads
from raypar.study.options import resolve
from raypar.workloads.datasets import ensure_image_set

NUM_WARMUP_BATCHES = 10


def use_every_core(_):
    os.sched_setaffinity(0, range(os.cpu_count()))


def main():
    parser = training_parser(__doc__)
    parser.add_argument("--num-loader-workers", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = getattr(workloads, args.workload)
    config = resolve(workload, {})
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    dataset = datasets.MNIST(ensure_image_set("MNIST"), train=True, transform=transform)
    loader = DataLoader(
        Subset(dataset, range(args.num_samples)),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.num_loader_workers,
        persistent_workers=args.num_loader_workers > 0,
        worker_init_fn=use_every_core,
    )
    model = workload.model(config)
    momentum = 0.9 if config["optimizer"] == "momentum" else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=momentum)

    def step(images, labels):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    for i, batch in enumerate(loader):  # a full epoch would take longer than a warm-up needs
        step(*batch)
        if i + 1 == NUM_WARMUP_BATCHES:
            break
    seconds = 0.0
    for _ in range(args.epochs):
        begun_s = time.perf_counter()
        for images, labels in loader:
            step(images, labels)
        seconds += time.perf_counter() - begun_s
    send_result({"samples_per_s": args.epochs * args.num_samples / seconds, "seconds": seconds})


if __name__ == "__main__":
    main()
