"""A hand-written training loop on tensors in memory: one process, one thread.

Only the model and the bytes of the images are raypar's. Only the steps are timed, as in raypar: an epoch's order is
drawn before, and nothing is evaluated.
"""

import time

import torch
from common import send_result, training_parser
from torch.nn import functional

from raypar import workloads
from raypar.study.options import resolve

MEAN, STD = 0.1307, 0.3081
NUM_WARMUP_STEPS = 10


def main():
    args = training_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = getattr(workloads, args.workload)
    config = resolve(workload, {})
    train = workload.data(config).train
    images, labels = train.inputs[: args.num_samples], train.targets[: args.num_samples]
    model = workload.model(config)
    momentum = 0.9 if config["optimizer"] == "momentum" else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=momentum)
    scale, shift = 1 / (255 * STD), MEAN / STD

    def train_on(order):
        for indices in order.split(args.batch_size):
            x = images.index_select(0, indices).float().mul_(scale).sub_(shift)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), labels.index_select(0, indices))
            loss.backward()
            optimizer.step()

    train_on(torch.randperm(len(labels))[: NUM_WARMUP_STEPS * args.batch_size])
    seconds = 0.0
    for _ in range(args.epochs):
        order = torch.randperm(len(labels))
        begun_s = time.perf_counter()
        train_on(order)
        seconds += time.perf_counter() - begun_s
    send_result({"samples_per_s": args.epochs * len(labels) / seconds, "seconds": seconds})


if __name__ == "__main__":
    main()
