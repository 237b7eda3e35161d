"""Which of the tensors of a batch are parts of composite ones, such as ragged and sparse tensors.

(scores [2], ragged rows, labels [2, 3])      0: scores | 1, 2: parts of the ragged rows | 3: labels
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def composite_parts(values: Iterable[Any]) -> set[int]:
    """Returns the numbers of the tensors that are parts of ragged or sparse ones.

    Args:
        values: tensors, or their types. Anything else is no tensor, and has no number.
    """
    found: set[int] = set()
    count = 0
    for value in values:
        if not isinstance(value, (tf.Tensor, tf.__internal__.CompositeTensor, tf.TypeSpec)):
            continue
        parts = len(tf.nest.flatten(value, expand_composites=True))
        if not isinstance(value, (tf.Tensor, tf.TensorSpec)):
            found.update(range(count, count + parts))
        count += parts
    return found
