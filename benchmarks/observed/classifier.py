"""Training of a classifier in four shapes, clean or with one of the mistakes that `script_bugs.py` plants."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--shape", choices=("plain", "torchrun", "lightning", "hf"), default="plain")
parser.add_argument("--bug", default="")
args = parser.parse_args()
bug = args.bug
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
EPOCHS, BATCH = 3, 32 if bug == "different_batches" else 32 // world
NUM_LOADERS = {"more_loaders_than_cores": 6, "slow_start_of_epochs": 1}.get(bug, 0)
IS_PERSISTENT = bug == "more_loaders_than_cores"
torch.set_num_threads(8 if bug == "more_threads_than_cores" else 1)
torch.manual_seed(rank if bug == "different_parameters" else 0)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(960, 64, generator=generator), torch.randint(0, 10, (960,), generator=generator))
held_out = TensorDataset(*data[: 960 if bug == "long_evaluation" else 64])


def network() -> nn.Module:
    norm = nn.BatchNorm1d(256) if bug == "batch_norm_of_ranks" else nn.LayerNorm(256)
    return nn.Sequential(nn.Linear(64, 256), norm, nn.ReLU(), nn.Linear(256, 10))


def loader_of(data: Dataset, **options: object) -> DataLoader:
    return DataLoader(data, BATCH, num_workers=NUM_LOADERS, persistent_workers=IS_PERSISTENT, **options)


def save_often(model: nn.Module) -> None:
    """Save many checkpoints, if that is the mistake."""
    if bug == "long_checkpoints" and rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            for i in range(500):
                torch.save(model.state_dict(), f"{folder}/{i}.pt")


def loop() -> None:
    is_parallel = args.shape == "torchrun"  # with one process, too
    if is_parallel:
        dist.init_process_group("gloo")
    sampler = DistributedSampler(data) if is_parallel and bug != "same_samples_on_ranks" else None
    loader = loader_of(data, sampler=sampler, shuffle=sampler is None)
    model = network()
    if is_parallel and bug != "different_parameters":
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=bug == "needless_search")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        if sampler and bug != "same_order_in_epochs":
            sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for _ in range(20 if bug == "long_evaluation" else 1):
                for x, _ in DataLoader(held_out, BATCH):
                    model(x)
        save_often(model)


def lightning() -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch, index):
            return cross_entropy(self.network(batch[0]), batch[1])

        def validation_step(self, batch, index):
            for _ in range(100 if bug == "long_evaluation" else 1):
                self.network(batch[0])

        def on_train_epoch_end(self):
            save_often(self.network)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    ddp = "ddp_find_unused_parameters_true" if bug == "needless_search" else "ddp"
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=world,
        strategy=ddp if world > 1 else "auto",
        use_distributed_sampler=bug != "same_samples_on_ranks",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader_of(data, shuffle=True), DataLoader(held_out, BATCH))


def hugging_face() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x=None, labels=None):
            for _ in range(100 if bug == "long_evaluation" and not self.training else 1):
                logits = self.network(x)
            return {"loss": cross_entropy(logits, labels), "logits": logits}

    class Samples(Dataset):
        def __init__(self, data: Dataset) -> None:
            self.data = data

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index):
            x, y = self.data[index]
            return {"x": x, "labels": y}

    class Saves(TrainerCallback):
        def on_epoch_end(self, args, state, control, model=None, **kwargs):
            save_often(model)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            num_train_epochs=EPOCHS,
            use_cpu=True,
            report_to=[],
            eval_strategy="epoch",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_num_workers=NUM_LOADERS,
            dataloader_persistent_workers=IS_PERSISTENT,
            ddp_find_unused_parameters=bug == "needless_search",
        )
        trainer = Trainer(Model(), arguments, train_dataset=Samples(data), eval_dataset=Samples(held_out))
        trainer.add_callback(Saves())
        trainer.train()


{"plain": loop, "torchrun": loop, "lightning": lightning, "hf": hugging_face}[args.shape]()
