"""Trains a line with Lightning and its MLFlowLogger."""

import argparse
import os

import lightning
import torch
from lightning.pytorch.loggers import MLFlowLogger


class Line(lightning.LightningModule):
    """Linear model."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("val_loss", (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

lightning.seed_everything(0)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4)), batch_size=8)
logger = MLFlowLogger("lines", tracking_uri=os.environ.get("MLFLOW_TRACKING_URI"))
trainer = lightning.Trainer(
    max_epochs=3,
    accelerator="cpu",
    devices=1,
    logger=logger,
    log_every_n_steps=4,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Line(args.lr), data, data)
