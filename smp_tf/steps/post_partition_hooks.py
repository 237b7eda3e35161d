"""Functions that a script has run once its model is partitioned, before the first forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from smp_tf.job.at_shutdown import on_shutdown

_hooks: list[Callable[[], Any]] = []


def register_post_partition_hook(hook: Callable[[], Any]) -> Callable[[], Any]:
    """Run a function after the model is partitioned and before its first forward pass.

    Args:
        hook: takes no argument; it runs eagerly, once, on every rank.

    Returns:
        The function itself, so this serves as a decorator.

    Raises:
        TypeError: it cannot be called.

    Example:
        >>> @smp.register_post_partition_hook
        ... def show():
        ...     print(len(model.local_variables), "variables are here")
        >>> predictions = smp.step(lambda x: model(x))(images)
        4 variables are here
    """
    if not callable(hook):
        raise TypeError(f"A post-partition hook is a function without arguments. Received: {hook!r}")
    if not _hooks:
        on_shutdown(_hooks.clear)
    _hooks.append(hook)
    return hook


def run() -> bool:
    """Run the functions that are registered, each once.

    Returns:
        Whether there were any.
    """
    any_there = bool(_hooks)
    with tf.init_scope():
        while _hooks:
            _hooks.pop(0)()
    return any_there
