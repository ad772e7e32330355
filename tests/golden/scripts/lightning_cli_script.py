"""A Lightning module with Lightning's own command line."""

import lightning
import torch
from lightning.pytorch.cli import LightningCLI


class Module(lightning.LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch, _):
        loss = self.layer(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    LightningCLI(Module, trainer_defaults={"max_epochs": 3})
