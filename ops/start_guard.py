"""Lets a process that a signal ends while it waits for other ranks say whom it waited for, by the C library.

The main thread may be in Horovod then, where no handler of Python's would run. So a thread of the library hears the
signal. A thread of Python's waits here for it, finds the words, and hands them over.
"""

from __future__ import annotations

import ctypes
import functools
import os

from smp_tf.ops.errors import LibraryError
from smp_tf.ops.library import transport_library

__all__ = ["StartGuard"]


class StartGuard:
    """Watches over SIGINT and SIGTERM, and over exceptions that Horovod's thread does not catch.

    A signal ends the process as soon as there are words, or after some seconds without them. Such an exception ends it
    after some seconds, within which the launcher's signal comes.

    Args:
        about: words for this process, in the line with which it ends.

    Raises:
        LibraryError: The library is missing, of another version, or has no descriptors left.
    """

    def __init__(self, about: str) -> None:
        self._library = _functions()
        self._process = os.getpid()
        error = ctypes.create_string_buffer(256)
        self._handle = self._library.smp_start_guard_create(about.encode(), error, len(error))
        if not self._handle:
            raise LibraryError(f"signals cannot be watched: {error.value.decode(errors='replace')}")

    def wait(self, seconds: float) -> bool:
        """Waits some seconds, hours at most, for a signal that ends the process, or until `close`.

        Returns:
            Whether a signal has come and waits for words.
        """
        return bool(self._library.smp_start_guard_wait(self._handle, seconds))

    def say(self, words: str) -> None:
        """Gives the words after "was ended by SIGTERM in smp.init", and so lets the process end."""
        self._library.smp_start_guard_say(self._handle, words.encode())

    def close(self) -> None:
        """Restores signals as they were, and ends a wait, once. Does nothing in a forked child."""
        if os.getpid() == self._process:
            self._library.smp_start_guard_close(self._handle)

    def free(self) -> None:
        """Frees what it has, once. It must be closed, and nobody may wait."""
        if os.getpid() == self._process:
            self._library.smp_start_guard_free(self._handle)


@functools.cache
def _functions() -> ctypes.CDLL:
    """Returns the library with the types of the functions declared."""
    library, handle, text = transport_library(), ctypes.c_void_p, ctypes.c_char_p
    library.smp_start_guard_create.restype = handle
    library.smp_start_guard_create.argtypes = [text, text, ctypes.c_size_t]
    library.smp_start_guard_wait.restype = ctypes.c_int
    library.smp_start_guard_wait.argtypes = [handle, ctypes.c_double]
    library.smp_start_guard_say.restype = None
    library.smp_start_guard_say.argtypes = [handle, text]
    for name in ("smp_start_guard_close", "smp_start_guard_free"):
        getattr(library, name).restype = None
        getattr(library, name).argtypes = [handle]
    return library
