"""An empty trial for torchrun: join the group, all-reduce once, leave."""

import os

import torch
import torch.distributed as dist

ones = torch.ones(1)
if int(os.environ["WORLD_SIZE"]) > 1:
    dist.init_process_group("gloo")
    dist.all_reduce(ones)
    dist.destroy_process_group()
