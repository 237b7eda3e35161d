"""Errors of the transport and its ops."""

from __future__ import annotations

from smp_tf.ops.plain_text import plain_text

__all__ = [
    "LibraryError",
    "NotDifferentiableError",
    "PeerError",
    "TransportCancelledError",
    "TransportError",
    "TransportTimeoutError",
]


class LibraryError(ImportError):
    """A compiled library of smp_tf is missing or was built against something else."""


class TransportError(RuntimeError):
    """The transport refused or failed an operation."""

    def __str__(self) -> str:
        """Returns the message, which may repeat what other ranks have said."""
        return plain_text(super().__str__())


class PeerError(TransportError, ConnectionError):
    """A rank was lost, left early, or ended the job; the message is the first cause."""


class TransportTimeoutError(TransportError, TimeoutError):
    """A peer did not answer in the given time."""


class TransportCancelledError(TransportError):
    """An operation was cancelled before it was done."""


class NotDifferentiableError(LookupError):
    """A gradient was asked for through a send or a receive."""
