"""A Lightning module that is fitted and tested."""

from argparse import ArgumentParser

import pytorch_lightning as pl
import torch


class Module(pl.LightningModule):
    def __init__(self, learning_rate):
        super().__init__()
        self.learning_rate = learning_rate
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch, _):
        loss = self.layer(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch):
        self.log("test_loss", self.layer(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--max-epochs", type=int, default=1)
    parser.add_argument("--root-dir", required=True)
    args = parser.parse_args()
    loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=16)
    trainer = pl.Trainer(max_epochs=args.max_epochs, default_root_dir=args.root_dir)
    trainer.fit(Module(args.learning_rate), loader)
    trainer.test(dataloaders=loader)
