"""Notes in which op of Horovod a rank waits, whether the script, a layer or Keras made the op.

    hvd.allreduce, mpi_ops._allreduce, SyncBatchNormalization, ... ──▶ MPI_LIB.horovod_allreduce
                                                                       come_to ─▶ the op ─▶ come_through

All of Horovod's Python code reaches its ops through the functions of one module. They are replaced here. So a rank that
waits long for others says in which call it waits (`watch/replicas.py`). The collectives of smp_tf go through
`collectives/interface.py`, which notes them with their own names.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from smp_tf.job import runtime

#: Horovod's functions over several processes, by the names that scripts use.
_FUNCTIONS = {
    "horovod_allgather": "allgather",
    "horovod_allreduce": "allreduce",
    "horovod_alltoall": "alltoall",
    "horovod_broadcast": "broadcast",
    "horovod_broadcast_inplace": "broadcast_",
    "horovod_broadcast_inplace_resource": "broadcast_",
    "horovod_grouped_allgather": "grouped_allgather",
    "horovod_grouped_allreduce": "grouped_allreduce",
    "horovod_grouped_reducescatter": "grouped_reducescatter",
    "horovod_join": "join",
    "horovod_reducescatter": "reducescatter",
}
#: Where this variable is 1, XLA may compile Horovod's ops, but could not compile the notes next to them.
_XLA_OPS = "HOROVOD_ENABLE_XLA_OPS"

#: The longest name of a collective in what a rank tells of itself (ops/cc/transport/questions.cc).
_MOST_BYTES = 100
#: How much of a longer name is kept. It has room for the call and its process set, which come first.
_KEPT_BYTES = 60
_IN_WORDS = re.compile(r"hvd\.\w+(?: of process set (\d+):)?(?: |$)")


class _Thread(threading.local):
    #: Whether the current call is noted already.
    is_noted = False


_thread = _Thread()


def note_all(library: ModuleType) -> None:
    """Replaces the functions that make Horovod's ops. A second call changes nothing.

    Args:
        library: The module with these functions, `horovod.tensorflow.mpi_ops.MPI_LIB`.
    """
    for attribute, name in _FUNCTIONS.items():
        original = getattr(library, attribute, None)
        if original is not None and not hasattr(original, "smp_original"):
            setattr(library, attribute, _noted(name, original))


@contextlib.contextmanager
def under_a_name_of_its_own() -> Iterator[None]:
    """Leaves out the calls of this thread within its context, since the caller notes them."""
    before = _thread.is_noted
    _thread.is_noted = True
    try:
        yield
    finally:
        _thread.is_noted = before


def members(name: str) -> Sequence[int] | None:
    """Returns the ranks that take part in a noted call of Horovod's.

    Args:
        name: The name under which it was noted.

    Returns:
        World ranks; None if there is no such call, or its process set is gone.
    """
    call = _IN_WORDS.match(name)
    if call is None:
        return None
    from horovod.tensorflow import mpi_ops

    found: dict[int, list[int]] = mpi_ops._basics._get_process_set_ids_and_ranks()
    return found.get(int(call[1] or 0))


def _noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        from smp_tf.ops.collective import come_through, come_to, within

        running = runtime.current_or_none()
        is_alone = running is None or running.transport is None
        if is_alone or _thread.is_noted:
            return original(*args, **kwargs)
        words = _words(name, kwargs.get("name"), kwargs.get("process_set_id", 0))
        if tf.executing_eagerly():
            with within(words):
                return original(*args, **kwargs)
        if os.environ.get(_XLA_OPS) == "1":
            return original(*args, **kwargs)
        given = [t for t in tf.nest.flatten([args, kwargs]) if isinstance(t, tf.Tensor)]
        come = come_to(words, given)
        result = original(*args, **kwargs)
        come_through(words, come, [result] if isinstance(result, tf.Operation) else tf.nest.flatten(result))
        return result

    noted: Any = call
    noted.smp_original = original
    return call


def _words(name: str, called: Any, process_set: int) -> str:
    """Returns words for a call, the same on all ranks that take part."""
    words = f"hvd.{name}"
    if process_set:
        words += f" of process set {process_set}:"
    if called:
        words += f" {called}"
    return _cut(words)


def _cut(words: str) -> str:
    """Shortens a long name to its beginning and a part that distinguishes it from others."""
    whole = words.encode(errors="backslashreplace")
    if len(whole) <= _MOST_BYTES:
        return words
    return f"{whole[:_KEPT_BYTES].decode(errors='ignore')}...{hashlib.sha1(whole).hexdigest()[:12]}"
