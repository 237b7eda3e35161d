"""These tests compare in float64: what differs by more than rounding is seen."""

from __future__ import annotations

import pytest
import tf_keras


@pytest.fixture(autouse=True)
def _in_float64(keras_defaults: None) -> None:
    tf_keras.backend.set_floatx("float64")
    tf_keras.mixed_precision.set_global_policy("float64")
