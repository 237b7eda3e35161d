"""Where PyTorch's model is cut, between half blocks: as near as possible to smp_tf's plan, or balanced by itself."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence

#: Layers that take next to no time, and so say little about where most of a half is.
_LIGHT = ("layer_normalization", "softmax", "dropout")
_BLOCK = re.compile(r"[^/]+/block(?:_(\d+))?(?:[/ ]|$)")


def pieces_of(layers: Mapping[str, int], depth: int) -> list[int]:
    """Returns how many pieces of `torch_gpt.py` each chunk has.

    Args:
        layers: chunk of each layer of the Keras model, in the plan's order.
        depth: number of blocks of the model.

    Returns:
        Number of pieces of each chunk, in order. A piece goes to the chunk that has most of its layers, without
        `_LIGHT` ones.

    Raises:
        ValueError: a chunk would have no piece.

    Example:
        >>> layers = {"gpt/embedding": 0, "gpt/block/attention_output": 0, "gpt/block/dense": 1, "gpt/dense_1": 1}
        >>> pieces_of(layers, depth=1)
        [2, 2]
    """
    last = 2 * depth + 1
    found: dict[int, Counter[int]] = {piece: Counter() for piece in range(last + 1)}
    piece = 0
    for name, chunk in layers.items():
        if name.rpartition("/")[2].startswith(_LIGHT):
            continue
        block = _BLOCK.match(name)
        if block:
            attention = 2 * int(block[1] or 0) + 1
            # What comes after the attention's output layer is the second half.
            piece = max(piece, attention)
            found[piece][chunk] += 1
            if "attention_output" in name:
                piece = attention + 1
        else:
            found[0 if piece == 0 else last][chunk] += 1
    chosen = [most.most_common(1)[0][0] for most in found.values() if most]
    counts = [chosen.count(chunk) for chunk in range(max(layers.values()) + 1)]
    if 0 in counts or len(chosen) != last + 1 or chosen != sorted(chosen):
        raise ValueError(
            f"PyTorch's model is cut between halves of blocks, so every chunk of smp_tf's plan has to have most of at "
            f"least one. Received: {counts} halves for {depth} blocks. Take a model of more blocks, such as "
            f"medium+depth={2 * len(counts)}"
        )
    return counts


def balanced(work: Sequence[float], chunks: int) -> list[int]:
    """Cuts pieces into chunks of nearly equal work: the sum of squares is the least.

    Args:
        work: work of each piece, in order.
        chunks: number of chunks, at most that of the pieces.

    Returns:
        Number of pieces of each chunk, in order.

    Example:
        >>> balanced([0, 1, 2, 1, 2, 3], chunks=3)
        [3, 2, 1]
    """
    until = [0.0, *itertools.accumulate(work)]
    # By the number of pieces in the chunks so far: the sum of squares, and the number of pieces of each chunk.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(chunks):
        best = {
            end: min(
                (squares + (until[end] - until[begin]) ** 2, [*counts, end - begin])
                for begin, (squares, counts) in best.items()
                if begin < end
            )
            for end in range(min(best) + 1, len(until))
        }
    return best[len(work)][1]


def work_of(size: Mapping[str, int]) -> list[float]:
    """Returns the operations of the matrix products of each piece of `torch_gpt.py`, per token, forwards.

    Args:
        size: the numbers of `gpt.Size`.
    """
    width = size["width"]
    attention, network = 8.0 * width**2 + 4.0 * size["length"] * width, 16.0 * width**2
    return [0.0, *([attention, network] * size["depth"]), 2.0 * width * size["vocabulary"]]
