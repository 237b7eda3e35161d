"""Trains with optimizers whose methods are a script's own, and says how far the weights are from plain Keras's."""

from __future__ import annotations

import smp_tf as smp
from tests.own_optimizers import build, difference


def differences(forms: list[str]) -> dict[str, float]:
    return {form: difference(form, smp.DistributedModel(build)) for form in forms}
