"""Gradients, and updates of weights, in the host's memory instead of the device's.

    device     B0 ─ g ─┐   B1 ─ g ─┐                                            ┌──▶ weights -= change
    host               ▼           ▼                                            │
               sum = 0 + g ─────── + g ──▶ average over the replicas ──▶ optimizer, slots

With gradient_offload every microbatch's gradient is copied to the host as it is made, into the sum that is kept there,
and processors average it in equal parts (`equal_parts`). With optimizer_offload the average does not come back: slots
are on the host, the optimizer computes there, and what it adds to a weight is sent to it. What TensorFlow copies from a
GPU to an op on the host lies in memory that it has pinned and uses again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from smp_tf import runtime
from smp_tf.announce import announce

#: TensorFlow's name of the host's processors and memory.
HOST = "/CPU:0"


def device_of_gradients() -> str | None:
    """Where gradients are added up; None for where they are made."""
    running = runtime.current_or_none()
    return HOST if running is not None and running.config.gradient_offload else None


def are_updates_offloaded() -> bool:
    """Whether optimizers have their slots on the host, and compute there."""
    running = runtime.current_or_none()
    return running is not None and running.config.optimizer_offload


@contextlib.contextmanager
def update_on_host() -> Iterator[None]:
    """A context in which ops and variables are on the host, also where Keras wants them beside a weight.

    Without optimizer_offload it does nothing.
    """
    if not are_updates_offloaded():
        yield
        return
    if tf.executing_eagerly():
        with tf.device(HOST):
            yield
        return
    graph = tf.compat.v1.get_default_graph()
    with graph.colocate_with(None, ignore_existing=True), tf.device(HOST):
        yield


def leave_uncompiled(optimizer: Any) -> None:
    """Have an optimizer that works on the host compute op by op: XLA compiles for one device.

    Args:
        optimizer: of Keras; without optimizer_offload it is left as it is.
    """
    if are_updates_offloaded() and getattr(optimizer, "jit_compile", False):
        optimizer.jit_compile = False
        announce(
            f"jit_compile of {type(optimizer).__name__} is not used: with optimizer_offload weights are on the device "
            f"and slots on the host, and XLA compiles for one of them.",
            runtime.current().topology.rank,
        )
