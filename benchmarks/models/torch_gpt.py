"""The GPT of `gpt.py` in PyTorch, as pieces that follow each other, with an output layer of its own.

    Embeddings, (Attention, Network) x depth, Head

Layers, shapes and operations are the same. The pieces hold their weights in Keras's order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

#: What Keras's LayerNormalization adds to the variance.
EPSILON = 1e-3


class Embeddings(nn.Module):
    """Tokens and their positions become vectors."""

    def __init__(self, size: Mapping[str, int]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size["vocabulary"], size["width"])
        self.positions = nn.Embedding(size["length"], size["width"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns what the first block takes."""
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))


class Attention(nn.Module):
    """The first half of a block: causal attention."""

    def __init__(self, size: Mapping[str, int]) -> None:
        super().__init__()
        width = size["width"]
        self.heads = size["heads"]
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sequence plus what each position attended to."""
        y = self.norm(x)
        query, key, value = (self._by_head(layer(y)) for layer in (self.query, self.key, self.value))
        scores = torch.matmul(query / math.sqrt(query.shape[-1]), key.transpose(-2, -1))
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        attended = torch.matmul(functional.softmax(scores.masked_fill(later, -1e9), dim=-1), value)
        return x + self.out(attended.transpose(1, 2).flatten(2))

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Network(nn.Module):
    """The second half of a block: a small network at each position."""

    def __init__(self, size: Mapping[str, int]) -> None:
        super().__init__()
        width = size["width"]
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sequence plus the network's output."""
        return x + self.narrow(functional.gelu(self.wide(self.norm(x))))


class Head(nn.Module):
    """The last norm, and the output layer."""

    def __init__(self, size: Mapping[str, int]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size["width"], eps=EPSILON)
        self.out = nn.Linear(size["width"], size["vocabulary"], bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logits of every position."""
        return self.out(self.norm(x))


def kinds(depth: int) -> list[type[nn.Module]]:
    """Returns the pieces of a GPT of so many blocks, in order."""
    return [Embeddings, *([Attention, Network] * depth), Head]


def chunk(size: Mapping[str, int], pieces: range, weights: torch.Tensor) -> nn.Sequential:
    """Returns some pieces of the GPT, one after the other.

    Args:
        size: the numbers of `gpt.Size`.
        pieces: numbers of the pieces.
        weights: weights of the whole GPT, flat, each as Keras has it.

    Returns:
        The pieces, with copies of their weights.

    Raises:
        ValueError: the number of weights is not the GPT's.
    """
    chosen = nn.Sequential()
    at = 0
    for number, kind in enumerate(kinds(size["depth"])):
        # For pieces of other ranks only shapes.
        with torch.device("cpu" if number in pieces else "meta"):
            piece = kind(size)
        for parameter, is_kernel in _parameters(piece):
            if number in pieces:
                given = weights[at : at + parameter.numel()]
                # Keras's kernels have their inputs first.
                value = given.view(parameter.shape[::-1]).T if is_kernel else given.view(parameter.shape)
                with torch.no_grad():
                    parameter.copy_(value)
            at += parameter.numel()
        if number in pieces:
            chosen.append(piece)
    if at != len(weights):
        raise ValueError(f"the GPT of PyTorch has {at} parameters, and that of Keras {len(weights)}")
    return chosen


def _parameters(piece: nn.Module) -> Iterator[tuple[nn.Parameter, bool]]:
    for layer in piece.children():
        for name, parameter in layer.named_parameters():
            yield parameter, isinstance(layer, nn.Linear) and name == "weight"


def loss_of(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def flops_of(model: nn.Module, batch: Sequence[torch.Tensor]) -> int:
    """Returns the floating-point operations of the matrix products of a forward and a backward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    counter: Any = FlopCounterMode(display=False)
    with counter:
        loss_of(model(batch[0]), batch[1]).backward()
    model.zero_grad()
    return int(counter.get_total_flops())
