"""The C functions of the transport, as `cc/transport/smp_transport.h` declares them."""

from __future__ import annotations

import ctypes
from typing import Any

from smp_tf.ops.errors import PeerError, TransportCancelledError, TransportError, TransportTimeoutError
from smp_tf.ops.library import transport_library

#: How an operation ended, with the numbers of `absl::StatusCode`.
OK, CANCELLED, INVALID_ARGUMENT, DEADLINE_EXCEEDED = 0, 1, 3, 4
ABORTED, UNAVAILABLE = 10, 14


class Options(ctypes.Structure):
    """The C structure `smp_options`, for `TransportOptions`."""

    _fields_ = [
        ("struct_bytes", ctypes.c_uint64),
        ("single_host", ctypes.c_int32),
        ("local_size", ctypes.c_int32),
        ("spin_us", ctypes.c_int32),
        ("watch_launcher", ctypes.c_int32),
        ("watch_signals", ctypes.c_int32),
        ("end_process", ctypes.c_int32),
        ("read_memory", ctypes.c_int32),
        ("huge_pages", ctypes.c_int32),
        ("stall_report_s", ctypes.c_double),
        ("stall_timeout_s", ctypes.c_double),
        ("grace_s", ctypes.c_double),
        ("network_devices", ctypes.c_char_p),
    ]


class MessageKey(ctypes.Structure):
    """The C structure `smp_key`, which distinguishes the messages of a rank."""

    _fields_ = [
        ("program", ctypes.c_uint64),
        ("step", ctypes.c_int64),
        ("edge", ctypes.c_uint64),
        ("microbatch", ctypes.c_uint64),
    ]


def raise_for(code: int, message: bytes) -> None:
    """Raises the error that a code of the library stands for; none for `OK`."""
    if code == OK:
        return
    text = message.decode(errors="replace")
    if code in (ABORTED, UNAVAILABLE):
        raise PeerError(text)
    if code == DEADLINE_EXCEEDED:
        raise TransportTimeoutError(text)
    if code == CANCELLED:
        raise TransportCancelledError(text)
    raise TransportError(text)


_declared = False


def functions() -> ctypes.CDLL:
    """Returns the library with the types of its functions declared."""
    global _declared
    library = transport_library()
    if _declared:
        return library
    handle, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    u32, u64, i64, real = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_double
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "smp_options_init": (None, [handle]),
        "smp_transport_create": (handle, [u32, u32, handle, text, size]),
        "smp_transport_watch_signals": (None, [handle]),
        "smp_transport_address": (handle, [handle, handle]),
        "smp_transport_connect": (
            ctypes.c_int,
            [handle, handle, handle, size, text, size, text, size],
        ),
        "smp_transport_wait_connected": (ctypes.c_int, [handle, real, text, size]),
        "smp_transport_begin_step": (None, [handle, u64, i64]),
        "smp_transport_end_step": (None, [handle, u64]),
        "smp_transport_await_step": (ctypes.c_int, [handle, u64, i64, ctypes.c_int, real]),
        "smp_transport_stop_awaiting": (None, [handle]),
        "smp_transport_set_activity": (None, [handle, text]),
        "smp_transport_set_program_ranks": (None, [handle, u64, handle, size]),
        "smp_transport_set_averaging_ranks": (None, [handle, u64, handle, size]),
        "smp_transport_goodbye": (ctypes.c_int, [handle, real]),
        "smp_transport_await_goodbyes": (ctypes.c_int, [handle, handle, size, real]),
        "smp_transport_abort": (ctypes.c_int, [handle, text, ctypes.c_int, real]),
        "smp_transport_hold_words": (None, [handle, real]),
        "smp_transport_cause": (size, [handle, text, size]),
        "smp_transport_stats": (size, [handle, text, size]),
        "smp_transport_lanes": (size, [handle, u32, text, size]),
        "smp_transport_ask": (ctypes.c_int, [handle, u32, real, text, size]),
        "smp_transport_cancel_all": (None, [handle, text]),
        "smp_transport_shutdown": (None, [handle]),
        "smp_transport_release": (None, [handle]),
        "smp_transport_make_current": (None, [handle]),
        "smp_operation_send": (handle, [handle, u32, MessageKey, text, handle, u64]),
        "smp_operation_recv": (handle, [handle, u32, MessageKey, text]),
        "smp_operation_wait": (ctypes.c_int, [handle, real]),
        "smp_operation_cancel": (None, [handle]),
        "smp_operation_withdraw": (None, [handle]),
        "smp_operation_message": (text, [handle]),
        "smp_operation_take": (handle, [handle, handle]),
        "smp_operation_released": (ctypes.c_int, [handle]),
        "smp_operation_free": (None, [handle]),
        "smp_bytes_free": (None, [handle]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    _declared = True
    return library
