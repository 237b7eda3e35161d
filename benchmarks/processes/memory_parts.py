"""Says what the memory of this process is made of, as far as its allocators and the system count it."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import tempfile

from harness.answers import resident

#: What the GNU C library says of itself, in the order of its `struct mallinfo2`.
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def parts() -> dict[str, int]:
    """Returns bytes by part. Resident memory is anonymous, of files, or shared; the other parts are anonymous."""
    from smp_tf import tf_internals

    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Heap
    heap = library.mallinfo2()
    return {
        "resident": resident("VmRSS"),
        "files": resident("RssFile"),
        "shared": resident("RssShmem"),
        "python": _python_arenas(),
        "c_heap": heap.uordblks,
        "c_heap_free": heap.fordblks,
        # Of 256 KiB and more; 0 where TensorFlow does not count them, without oneDNN.
        "tensors": tf_internals.memory_in_use(),
        "tensors_peak": tf_internals.peak_memory() or 0,
    }


def graphs() -> dict[str, int]:
    """Returns how many graphs of functions Python holds, and how many ops they have together."""
    import tensorflow as tf

    held = [found for found in gc.get_objects() if type(found) is tf.__internal__.FuncGraph]
    return {"graphs": len(held), "ops": sum(int(graph.version) for graph in held)}


def return_free_memory() -> None:
    """Gives memory of the C library that is free back to the system, where the library can do so."""
    from smp_tf.steps.free_memory import returning_function

    if give_back := returning_function():
        give_back()


def forget_tensors_peak() -> None:
    """Begins anew to count the most bytes of large tensors."""
    import tensorflow as tf

    tf.config.experimental.reset_memory_stats("CPU:0")


def _python_arenas() -> int:
    """Returns the bytes that Python has taken for its small objects. It prints them, and no function returns them."""
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            sys._debugmallocstats()
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        text = file.read().decode(errors="replace")
    [found] = re.findall(r"^\d+ arenas \* \d+ bytes/arena += +([\d,]+)", text, re.MULTILINE)
    return int(found.replace(",", ""))
