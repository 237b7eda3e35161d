"""Runs a script's functions once its model is partitioned, before the first forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from smp_tf.job_state import JobState

_hooks: JobState[list[Callable[[], Any]]] = JobState(list)


def register_post_partition_hook(hook: Callable[[], Any]) -> Callable[[], Any]:
    """Runs a function after the model is partitioned and before its first forward pass.

    Args:
        hook: a function without arguments. It runs eagerly, once, on every rank.

    Returns:
        The function itself, so this serves as a decorator.

    Raises:
        TypeError: the hook cannot be called.

    Example:
        >>> @smp.register_post_partition_hook
        ... def show():
        ...     print(len(model.local_variables), "variables are here")
        >>> predictions = smp.step(lambda x: model(x))(images)
        4 variables are here
    """
    if not callable(hook):
        raise TypeError(f"A post-partition hook is a function without arguments. Received: {hook!r}")
    _hooks().append(hook)
    return hook


def run() -> bool:
    """Runs the functions that are registered, each once.

    Returns:
        Whether there were any.
    """
    hooks = _hooks()
    any_there = bool(hooks)
    with tf.init_scope():
        while hooks:
            hooks.pop(0)()
    return any_there
