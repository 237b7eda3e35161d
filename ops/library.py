"""Loads the compiled libraries: the transport (without TensorFlow) and the TensorFlow ops."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from smp_tf.ops.errors import LibraryError

__all__ = ["tf_ops_library", "transport_library"]

HERE = Path(__file__).resolve().parent
TRANSPORT_ABI = 5
OPS = (
    "smp_begin",
    "smp_end",
    "smp_send",
    "smp_recv",
    "smp_mark",
    "smp_call",
    "smp_at_run_time",
    "smp_sum_over_replicas",
    "smp_keep",
    "smp_take_kept",
)
REBUILD = "Build them again: python ops/build.py (in a checkout), or reinstall smp_tf."

# UCX reads these once, when it is loaded. Python's faulthandler reports a crash, and smp_tf reports a lost peer, in one
# message. The user's environment variables win. UCX_MEM_EVENTS=n is not set. It would spare the one-page System V
# segment on which UCX tries its memory hooks, and which others must remove when a process is killed in that moment. But
# with it UCX 1.20 crashes when a TCP connection breaks.
UCX_LOAD_SETTINGS = {
    "UCX_HANDLE_ERRORS": "none",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}


@functools.cache
def transport_library() -> ctypes.CDLL:
    """Loads UCX and the transport library.

    Raises:
        LibraryError: libucx is not installed, or the library is missing or of another version.
    """
    path = _existing("_transport.so")
    try:
        libucx: Any = importlib.import_module("libucx")
    except ImportError as error:
        raise LibraryError(
            "smp_tf's transport needs UCX, but the package libucx is not installed. Run: pip install libucx-cu13"
        ) from error
    with _environment(UCX_LOAD_SETTINGS):
        libucx.load_library()
        try:
            library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise LibraryError(f"{path} could not be loaded: {error}. {REBUILD}") from error
    found = library.smp_transport_abi()
    if found != TRANSPORT_ABI:
        raise LibraryError(f"{path} has interface version {found}, expected {TRANSPORT_ABI}. {REBUILD}")
    return library


@functools.cache
def tf_ops_library() -> ModuleType:
    """Loads the TensorFlow ops and returns the module of their raw wrappers.

    Raises:
        LibraryError: The ops are missing, or were built against another TensorFlow.
    """
    import tensorflow as tf

    path = _existing("_tf_ops.so")
    check_tensorflow_version(tf.__version__, HERE / "_build.json")
    transport_library()
    try:
        module: ModuleType = tf.load_op_library(str(path))
    except (OSError, tf.errors.OpError) as error:
        raise LibraryError(f"{path} could not be loaded: {error}. {REBUILD}") from error
    check_ops(module, path)
    return module


def check_ops(module: ModuleType, path: Path) -> None:
    """Checks that a library, which may be older than these sources, has all ops.

    Args:
        module: The wrappers of the loaded ops.
        path: The library's file.

    Raises:
        LibraryError: It lacks some ops.
    """
    lacking = [name for name in OPS if not hasattr(module, name)]
    if lacking:
        raise LibraryError(f"{path} is older than smp_tf: it has no {', '.join(lacking)}. {REBUILD}")


def check_tensorflow_version(running: str, stamp: Path) -> None:
    """Compares the TensorFlow that runs with the one the ops were built against.

    Args:
        running: The version of TensorFlow in this process.
        stamp: The file that the build wrote next to the ops.

    Raises:
        LibraryError: They differ, or the stamp cannot be read.
    """
    try:
        built = json.loads(stamp.read_text())["tensorflow"]
    except (OSError, ValueError, KeyError) as error:
        raise LibraryError(f"{stamp} does not say what the ops were built against. {REBUILD}") from (error)
    if built != running:
        raise LibraryError(
            f"smp_tf's ops were built against TensorFlow {built}, but TensorFlow {running} is "
            f"running: their C++ interfaces differ. {REBUILD}"
        )


def _existing(name: str) -> Path:
    path = HERE / name
    if not path.exists():
        raise LibraryError(f"The compiled library {path} is missing. {REBUILD}")
    return path


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Sets environment variables that are not set, within its context, where C code sees them."""
    added = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
