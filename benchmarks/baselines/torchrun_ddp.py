"""Plain torchrun + DistributedDataParallel: one thread and one core per rank.

The model, the bytes of the images and the global batches are raypar's; every rank takes its slice of each batch. The
number of samples is a multiple of the batch size.
"""

import os
import time

import torch
import torch.distributed as dist
from common import send_result, training_parser
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from raypar import workloads
from raypar.study.options import resolve

MEAN, STD = 0.1307, 0.3081
NUM_WARMUP_STEPS = 10


def main():
    parser = training_parser(__doc__)
    parser.add_argument("--cores", type=int, nargs="+", required=True)
    args = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.sched_setaffinity(0, [args.cores[rank]])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = getattr(workloads, args.workload)
    config = resolve(workload, {})
    train = workload.data(config).train
    images, labels = train.inputs[: args.num_samples], train.targets[: args.num_samples]
    torch.manual_seed(0)
    model = DistributedDataParallel(workload.model(config))
    momentum = 0.9 if config["optimizer"] == "momentum" else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=momentum)
    scale, shift = 1 / (255 * STD), MEAN / STD

    def train_on(order):
        for batch in order.split(args.batch_size):
            indices = batch.chunk(world_size)[rank]
            x = images.index_select(0, indices).float().mul_(scale).sub_(shift)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), labels.index_select(0, indices))
            loss.backward()
            optimizer.step()

    generator = torch.Generator().manual_seed(0)
    train_on(torch.randperm(len(labels), generator=generator)[: NUM_WARMUP_STEPS * args.batch_size])
    seconds = 0.0
    for _ in range(args.epochs):
        order = torch.randperm(len(labels), generator=generator)
        dist.barrier()
        begun_s = time.perf_counter()
        train_on(order)
        seconds += time.perf_counter() - begun_s
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        send_result({"samples_per_s": args.epochs * len(labels) / slowest.item(), "seconds": slowest.item()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
