"""A small bidirectional transformer that learns to sort digits; nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypar.errors import DataError
from raypar.study.strategy import tensor_size
from raypar.study.workload import Config, Data, Split, Workload, whole_number

if TYPE_CHECKING:
    from torch import Tensor, nn

MLP_RATIO = 4  # of the hidden layer's width to the block's, as in Vaswani et al. 2017 (arXiv:1706.03762)
EMBEDDING_STD = 0.02
TRAIN_SEED, VAL_SEED = 1, 2
# Attention is split by heads and the perceptron by hidden units, after Megatron-LM (Shoeybi et al. 2019,
# arXiv:1909.08053): two sums over the workers per block.
TENSOR_PLAN = {"q": "column", "k": "column", "v": "column", "out": "row", "up": "column", "down": "row"}


def build(config: Config) -> nn.Module:
    """Build embeddings, pre-norm blocks (Xiong et al. 2020, arXiv:2002.04745) and head, all of ``(batch, T, width)``.

    Tokens ``(batch, T)``, int64, to scores ``(batch, T, num_tokens)``. Blocks' linear layers are named as in
    `TENSOR_PLAN`. A strategy may replace q, k, v and up by layers that return part of the features, in whole heads, and
    out and down by layers that sum over all workers: the number of heads follows from the output of q.
    """
    import torch
    from torch import nn
    from torch.nn.functional import gelu, scaled_dot_product_attention

    width, num_tokens = config["width"], config["num_tokens"]
    head_width = width // config["num_heads"]

    def by_head(features: Tensor) -> Tensor:
        """Reshape ``(batch, T, heads * head_width)`` to ``(batch, heads, T, head_width)``."""
        batch, length, width = features.shape
        return features.view(batch, length, width // head_width, head_width).transpose(1, 2)

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(num_tokens, width)
            self.position = nn.Parameter(torch.empty(config["sequence_length"], width))
            for table in (self.token.weight, self.position):
                nn.init.normal_(table, std=EMBEDDING_STD)

        def forward(self, tokens: Tensor) -> Tensor:
            embedded: Tensor = self.token(tokens) + self.position
            return embedded

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm = nn.LayerNorm(width)
            self.q = nn.Linear(width, width)
            self.k = nn.Linear(width, width)
            self.v = nn.Linear(width, width)
            self.out = nn.Linear(width, width)
            self.mlp_norm = nn.LayerNorm(width)
            self.up = nn.Linear(width, MLP_RATIO * width)
            self.down = nn.Linear(MLP_RATIO * width, width)

        def forward(self, x: Tensor) -> Tensor:
            normed = self.attention_norm(x)
            q, k, v = (by_head(project(normed)) for project in (self.q, self.k, self.v))
            x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            summed: Tensor = x + self.down(gelu(self.up(self.mlp_norm(x))))
            return summed

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.scores = nn.Linear(width, num_tokens)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.scores(self.norm(x))
            return scores

    return nn.Sequential(Embedding(), *(Block() for _ in range(config["num_blocks"])), Head())


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """Return the split of each block's linear layers; embedding and head are not split."""
    names = [name for name, _ in model.named_modules()]
    return {name: TENSOR_PLAN[layer] for name in names if (layer := name.rpartition(".")[2]) in TENSOR_PLAN}


def data(config: Config) -> Data:
    """Return uniform random tokens, ``(num_samples, T)``, int64; the targets are the same tokens sorted.

    Deterministic. ``val`` has a quarter as many sequences as ``train``; with 10^16 possible sequences of the default
    length, none is in both.
    """
    num_train = config["num_sequences"]
    return Data(train=_sequences(num_train, config, TRAIN_SEED), val=_sequences(-(-num_train // 4), config, VAL_SEED))


def _sequences(num_samples: int, config: Config, seed: int) -> Split:
    import torch

    shape = (num_samples, config["sequence_length"])
    tokens = torch.randint(config["num_tokens"], shape, generator=torch.Generator().manual_seed(seed))
    return Split(tokens, tokens.sort(dim=1).values)


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all positions of all sequences.

    Args:
        outputs: shape ``(batch, T, num_tokens)``.
        targets: token numbers, shape ``(batch, T)``.
    """
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def token_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of correct positions per sequence; shape ``(batch,)``."""
    return (outputs.argmax(-1) == targets).float().mean(1)


def sequence_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1.0 per sequence where every position is correct; shape ``(batch,)``."""
    return (outputs.argmax(-1) == targets).all(1).float()


def prepare(config: Config) -> None:
    width, num_heads = config["width"], config["num_heads"]
    if width % num_heads:
        raise DataError(
            f"width={width} is not divisible by num_heads={num_heads}",
            hint=f"use --set width={-(-width // num_heads) * num_heads}, or another multiple of num_heads",
        )
    if num_heads % (splits := tensor_size(config)):
        raise DataError(
            f"num_heads={num_heads} is not divisible by the {splits} workers that split each layer",
            hint=f"use a num_heads that is a multiple of {splits} and divides width={width}, or fewer workers",
        )


transformer = Workload(
    name="transformer",
    model=build,
    data=data,
    num_train_samples=lambda config: config["num_sequences"],
    loss=token_loss,
    metrics={"accuracy": token_accuracy, "sequence_accuracy": sequence_accuracy},
    options={
        "num_blocks": whole_number(4, "each with attention and a perceptron"),
        "num_heads": whole_number(4, "of attention; has to divide width"),
        "width": whole_number(64, "features of a token; four times as many in the perceptron"),
        "sequence_length": whole_number(16, "tokens of a sample", at_least=2),
        "num_tokens": whole_number(10, "different tokens", at_least=2),
        "num_sequences": whole_number(8192, "training samples; a quarter as many for validation"),
    },
    defaults={"optimizer": "adamw", "lr": 0.001, "batch_size": 64, "epochs": 4},
    prepare=prepare,
    tensor_plan=tensor_plan,
    description="transformer that learns to sort digits",
    dataset="made-up sequences of 16 digits, 8,192 + 2,048, embedded",
)
