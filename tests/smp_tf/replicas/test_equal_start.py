"""What replicas begin with, where they do not have the same weights at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from smp_tf.errors import StepError
from smp_tf.replicas import equal_start


def test_replicas_with_different_numbers_of_weights_are_told_of_a_model_that_was_let_go() -> None:
    """Seen where Python had freed a model on one replica alone: an index was out of range."""
    topology: Any = SimpleNamespace(replica=0)
    with pytest.raises(StepError, match=r"different numbers of new weights: 2, 1, by replica.*call gc.collect\(\)"):
        equal_start._take([], [[1, 2], [1]], topology, speaks=True)
