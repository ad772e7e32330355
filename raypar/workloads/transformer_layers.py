"""A small transformer that looks both ways, as layers in a row; its linear layers can be split among workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

MLP_RATIO = 4  # of the hidden layer's width to the block's, as in Vaswani et al. 2017 (arXiv:1706.03762)
EMBEDDING_STD = 0.02


def embedding(num_tokens: int, sequence_length: int, width: int) -> nn.Module:
    """A learnt vector for each token plus one for its place: ``(batch, T)`` whole numbers to ``(batch, T, width)``."""
    import torch
    from torch import nn

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(num_tokens, width)
            self.position = nn.Parameter(torch.empty(sequence_length, width))
            for table in (self.token.weight, self.position):
                nn.init.normal_(table, std=EMBEDDING_STD)

        def forward(self, tokens: Tensor) -> Tensor:
            embedded: Tensor = self.token(tokens) + self.position
            return embedded

    return Embedding()


def blocks(num_blocks: int, width: int, num_heads: int) -> list[nn.Module]:
    """Attention and a perceptron, each on the normalised input and added to it (pre-norm, Xiong et al. 2020,
    arXiv:2002.04745); ``(batch, T, width)`` in and out.

    A block's linear layers are named as `TENSOR_PLAN` has them. q, k, v and up may be replaced by layers that give
    some of the features only, in whole heads, and out and down by layers that take those and give the sum over all
    workers: how many heads there are is seen from what q gives.
    """
    from torch import nn
    from torch.nn.functional import gelu, scaled_dot_product_attention

    head_width = width // num_heads

    def by_head(features: Tensor) -> Tensor:
        """``(batch, T, features of some heads)`` to ``(batch, heads, T, head_width)``."""
        batch, length, some = features.shape
        return features.view(batch, length, some // head_width, head_width).transpose(1, 2)

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

    return [Block() for _ in range(num_blocks)]


# Attention is split by heads and the perceptron by hidden units, after Megatron-LM (Shoeybi et al. 2019,
# arXiv:1909.08053): a block adds up over the workers twice.
TENSOR_PLAN = {"q": "column", "k": "column", "v": "column", "out": "row", "up": "column", "down": "row"}


def head(width: int, num_tokens: int) -> nn.Module:
    """Scores of every token: ``(batch, T, width)`` to ``(batch, T, num_tokens)``."""
    from torch import nn

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.scores = nn.Linear(width, num_tokens)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.scores(self.norm(x))
            return scores

    return Head()
