"""Where PyTorch's model is cut: between half blocks, as near as can be to where smp_tf's plan cuts its own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

_BLOCK = re.compile(r"[^/]+/block(?:_(\d+))?(?:[/ ]|$)")


def pieces_of(layers: Mapping[str, int], depth: int) -> list[int]:
    """How many pieces of `torch_gpt.py` each chunk has.

    Args:
        layers: chunk of each layer of the Keras model, in order, as the plan has them.
        depth: blocks of the model.

    Returns:
        Pieces of each chunk, in order. A piece goes to the chunk that has most of its layers.

    Raises:
        ValueError: a chunk would have none.

    Example:
        >>> pieces_of({"gpt/embedding": 0, "gpt/block/dense": 0, "gpt/dense_2": 1}, depth=0)
        [1, 1]
    """
    last = 2 * depth + 1
    found: dict[int, Counter[int]] = {piece: Counter() for piece in range(last + 1)}
    piece = 0
    for name, chunk in layers.items():
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
