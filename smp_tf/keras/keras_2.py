"""Keras 2 (tf_keras) with its answers to what `protocols.py` asks, one module for each subject."""

from __future__ import annotations

from smp_tf.keras import archives, layers, loops, losses, optimizer_slots, optimizers
from smp_tf.keras.protocols import Adapter

ADAPTER = Adapter(
    layers=layers,
    slots=optimizer_slots,
    optimizers=optimizers,
    losses=losses,
    loops=loops,
    archives=archives,
)
