"""What this thread is doing with models, which a model's call depends on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from smp_tf.variables.guarded import tracing_step


class _InThread(threading.local):
    trace: Any = None
    saving = False
    writing = False
    loop = False


_in_thread = _InThread()


def step_being_traced() -> Any:
    """Returns the trace of the step that this thread is tracing, or None."""
    return _in_thread.trace


def set_step_being_traced(trace: Any) -> Any:
    """Sets the step that is being traced, and returns the one before."""
    before = _in_thread.trace
    _in_thread.trace = trace
    return before


def is_saving() -> bool:
    """Returns whether the structure of a model is being written in this thread."""
    return _in_thread.saving


@contextlib.contextmanager
def save_structure() -> Iterator[None]:
    """Lets models be called and variables without storage be read within its context, where nothing runs."""
    _in_thread.saving = True
    try:
        with tracing_step():
            yield
    finally:
        _in_thread.saving = False


@contextlib.contextmanager
def writing_model() -> Iterator[None]:
    """Notes that smp_tf has Keras write a file of a model, for which it fetches the weights of other ranks."""
    before = is_writing()
    _in_thread.writing = True
    try:
        yield
    finally:
        _in_thread.writing = before


def is_writing() -> bool:
    """Returns whether smp_tf has Keras write a file of a model in this thread."""
    return _in_thread.writing


@contextlib.contextmanager
def keras_loop() -> Iterator[None]:
    """Notes that a loop such as `fit` runs. Keras calls a model on the first batch of a generator, to build it."""
    before = in_keras_loop()
    _in_thread.loop = True
    try:
        yield
    finally:
        _in_thread.loop = before


def in_keras_loop() -> bool:
    """Returns whether `fit` or a similar loop runs in this thread."""
    return _in_thread.loop
