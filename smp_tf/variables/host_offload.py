"""Keeps gradients, and updates of weights, in the host's memory instead of the device's.

    device     B0 ─ g ─┐   B1 ─ g ─┐                                            ┌──▶ weights -= change
    host               ▼           ▼                                            │
               sum = 0 + g ─────── + g ──▶ average over the replicas ──▶ optimizer, slots

With gradient_offload, every microbatch's gradient is copied to the host as it is made, and added to the sum there.
Processors average the sum in equal parts (`equal_parts`). With optimizer_offload, the average stays on the host. Slots
are there, too, the optimizer computes there, and the change of a weight is sent to the device. Where an optimizer reads
the weight itself, for its decay or average, the weight is copied to the host. TensorFlow makes the copies from a
device, most likely in ordinary memory, as for messages (docs/gpu.md).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from smp_tf.announce import announce
from smp_tf.job import runtime
from smp_tf.pipeline.run.host import HOST, on_device
from smp_tf.variables import store

#: Whether the slots of each optimizer are on the host, noted when they were first built.
_slots_on_host: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def device_of_gradients() -> str | None:
    """Returns the device where gradients are added up; None for where they are made."""
    running = runtime.current_or_none()
    return HOST if running is not None and running.config.gradient_offload else None


def beside_gradients() -> contextlib.AbstractContextManager[object]:
    """Returns a context whose ops are placed where gradients are added up."""
    return on_device(device_of_gradients())


def are_updates_offloaded() -> bool:
    """Returns whether optimizers have their slots on the host, and compute there."""
    running = runtime.current_or_none()
    return running is not None and running.config.optimizer_offload


def are_slots_on_host(optimizer: Any) -> bool:
    """Returns whether the slots of an optimizer are on the host, as it was when this was first asked."""
    return _slots_on_host.setdefault(optimizer, are_updates_offloaded())


@contextlib.contextmanager
def update_on_host(updated: Iterable[Any]) -> Iterator[None]:
    """Puts ops and variables on the host within its context, even where Keras wants them next to a weight.

    Without optimizer_offload, and for variables that no distributed model has, it does nothing.

    Args:
        updated: the variables that are updated, or get slots.
    """
    if not are_updates_offloaded() or all(store.store_of(variable) is None for variable in updated):
        yield
        return
    if tf.executing_eagerly():
        with tf.device(HOST):
            yield
        return
    graph = tf.compat.v1.get_default_graph()
    with graph.colocate_with(None, ignore_existing=True), tf.device(HOST):
        yield


@contextlib.contextmanager
def uncompiled(optimizer: Any) -> Iterator[None]:
    """Lets an optimizer on the host compute op by op within its context, since XLA compiles for one device.

    Args:
        optimizer: an optimizer of Keras. Without optimizer_offload it is left as it is.
    """
    if not are_updates_offloaded() or not getattr(optimizer, "jit_compile", False):
        yield
        return
    announce(
        f"jit_compile of {type(optimizer).__name__} (Keras's default where there is a GPU) is not used: with "
        f"optimizer_offload weights are on the device and slots on the host, and XLA compiles for one of them.",
        runtime.current().topology.rank,
    )
    optimizer.jit_compile = False
    try:
        yield
    finally:
        optimizer.jit_compile = True
