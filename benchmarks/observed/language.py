"""Small transformer on tokens, with AdamW, gradient clipping, and a function that draws batches instead of a loader."""

import sys

import torch
from timing import Stopwatch
from torch import nn
from torch.nn.functional import cross_entropy

VOCABULARY, LENGTH, WIDTH, BATCH = 128, 64, 64, 8
torch.set_num_threads(1)
torch.manual_seed(0)
text = torch.randint(0, VOCABULARY, (100_000,))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, dropout=0.1)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.head(self.layers(self.embedding(tokens), mask, is_causal=True))


def batch():
    starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,))
    return torch.stack([text[i : i + LENGTH] for i in starts]), torch.stack(
        [text[i + 1 : i + LENGTH + 1] for i in starts]
    )


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
watch = Stopwatch("--by-hand" in sys.argv)
watch.resume()
for _ in range(100):
    x, y = batch()
    watch.part("other")  # no loader: getting a batch is the script's own work
    loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
    watch.part("forward")
    loss.backward()
    watch.part("backward")
    watch.batch(loss.item())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    watch.part("other")
    optimizer.step()
    watch.part("optimizer")
    optimizer.zero_grad()
    watch.part("other")
    watch.step()
watch.report(0)
