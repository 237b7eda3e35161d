"""The seeds of Python, NumPy, TensorFlow and Keras: equal on all ranks, and the script's own where it sets them.

before smp.init    tf.random.set_seed(7)     rank 0's is taken for all, where the configuration has no seed
after it           tf.random.set_seed(7)     Keras's initial weights follow it, as they did until TensorFlow 2.6, and so
                                             do random ops in steps, where rank 0 has given it before the first one
                   tf.keras.utils.set_random_seed(7)   Keras's own way, which needs no help
"""

from __future__ import annotations

import random
import secrets
from typing import Any

import numpy as np
import tensorflow as tf

from smp_tf import tf_internals
from smp_tf.keras import adapter

#: TensorFlow's generator since `seed_everything`. Where it is another one, the script has set a seed.
_ours: Any = None


def script_seed() -> int:
    """Returns the seed that the script has given to TensorFlow, else a drawn one. It is from 0 to 2**32 - 1."""
    given = tf_internals.global_seed()
    if given is None or tf_internals.global_seed_generator() is _ours:
        return secrets.randbits(32)
    return given % 2**32


def seed_set_since() -> int | None:
    """Returns the seed that the script has given to TensorFlow after `smp.init`; None where it has not."""
    given = tf_internals.global_seed()
    return None if given is None or tf_internals.global_seed_generator() is _ours else given % 2**32


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy, TensorFlow and Keras.

    All ranks of the world get the same seed, not only those of a replica. A script may shuffle a data set before each
    replica takes its share, or split off test data, and must do so in the same way on all ranks. Random ops in the step
    differ between replicas all the same, since their keys hold the dp rank.

    Args:
        seed: from 0 to 2**32 - 1.
    """
    global _ours
    random.seed(seed)
    np.random.seed(seed)
    tf.random.set_seed(seed)
    _ours = tf_internals.global_seed_generator()
    adapter.layers().seed_initializers(_FollowingGenerator(seed))


class _FollowingGenerator(random.Random):
    """Draws the seeds of Keras's initializers. It begins anew whenever the script calls `tf.random.set_seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._followed: Any = _ours

    def randint(self, a: int, b: int) -> int:
        """Draws as `random.Random.randint` does."""
        current = tf_internals.global_seed_generator()
        if current is not self._followed:
            self._followed = current
            self.seed(tf_internals.global_seed())
        return super().randint(a, b)
