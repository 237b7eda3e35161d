"""The secret of a job. It proves to a rank that another process belongs to the job.

    SMP_TF_SECRET, SMP_TF_SECRET_FILE ── the launcher, or a file that its owner alone reads ──┐
    a random part of every rank ── over Horovod, in the clear ────────────────────────────────┴─▶ the secret

Before ranks are connected, their messages go through Horovod, unencrypted. So without a part that comes another way, a
listener on the network between hosts knows the secret, too. With this part, nobody can compute the secret from what was
sent. All ranks have the same part and prove that to each other, but no rank sends it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence

from smp_tf.errors import EnvironmentSetupError, RankMismatchError

_GIVEN = "SMP_TF_SECRET"
_FILE = "SMP_TF_SECRET_FILE"
#: The variables of which one tells the part of the secret that does not come over the network.
SECRETS = (_GIVEN, _FILE)
_LEAST, _MOST = 16, 4096
_PART_BYTES = 32
_CHECK_BYTES = 32

NOTE = (
    "Ranks are on several hosts, and all that proves who they are was told over the network between these. Whoever can "
    "listen there can pass for a rank, and run code on all hosts: that network must be trusted. Otherwise start with "
    f'{_GIVEN}="$(openssl rand -hex 32)" horovodrun ..., or name a file that only its owner reads in {_FILE}.'
)


def given(environment: Mapping[str, str] = os.environ) -> bytes:
    """Returns the part of the secret that did not come over the network; empty where there is none.

    Args:
        environment: The variables to look at.

    Raises:
        EnvironmentSetupError: The part is too short, or is in a file that others may read or change.
    """
    text, path = environment.get(_GIVEN, ""), environment.get(_FILE, "")
    if text and path:
        raise EnvironmentSetupError(f"{_GIVEN} and {_FILE} are both set. Set one of them.")
    found = _read(path) if path else os.fsencode(text).strip()
    if (text or path) and len(found) < _LEAST:
        raise EnvironmentSetupError(
            f"{_FILE if path else _GIVEN} holds the job's secret, of {_LEAST} bytes or more. Received: {len(found)} "
            f"bytes. Make one with: openssl rand -hex 32"
        )
    return found


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise EnvironmentSetupError(f"{_FILE}={path} cannot be read: {error.strerror}.") from error
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_mode & 0o077 or about.st_uid not in (0, os.geteuid()):
            raise EnvironmentSetupError(
                f"{_FILE} names a file that this user owns and nobody else may read or change. Received: {path}, of "
                f"user {about.st_uid}, mode {stat.S_IMODE(about.st_mode):o}. Change it with: chmod 600 {path}"
            )
        content = file.read(_MOST + 1)
    if len(content) > _MOST:
        raise EnvironmentSetupError(f"{_FILE} holds {_MOST} bytes at most. Received: {path}, which has more.")
    return content.strip()


def agree(
    own: bytes,
    address: bytes,
    exchange: Callable[[bytes, str], list[bytes]],
    describe: Callable[[int], str],
) -> tuple[bytes, list[bytes]]:
    """Exchanges the ranks' addresses, and makes the job's secret. Every rank calls it.

    Args:
        own: The result of `given`.
        address: The address of this rank.
        exchange: Gives every rank what every rank says, in rank order.
        describe: Names a rank for messages.

    Returns:
        The secret, and the addresses in rank order.

    Raises:
        RankMismatchError: Ranks were given other parts of the secret.
    """
    part = secrets.token_bytes(_PART_BYTES)
    said = exchange(part + _check(own, part) + address, "smp_tf.addresses")
    parts = [text[:_PART_BYTES] for text in said]
    checks = [text[_PART_BYTES : _PART_BYTES + _CHECK_BYTES] for text in said]
    unlike = [r for r in range(len(said)) if not hmac.compare_digest(checks[r], _check(own, parts[r]))]
    if unlike:
        raise RankMismatchError(
            f"All ranks must be given one secret, or none. This one was given {'one' if own else 'none'}, and not so "
            f"{' and '.join(describe(rank) for rank in unlike[:3])}. Let the launcher hand {_GIVEN} to all ranks, as "
            f"horovodrun does, or put the same file ({_FILE}) on every host."
        )
    return made_of(own, parts), [text[_PART_BYTES + _CHECK_BYTES :] for text in said]


def made_of(own: bytes, parts: Sequence[bytes]) -> bytes:
    """Makes the secret of a job.

    Args:
        own: The part that all ranks were given another way; empty where there is none.
        parts: The parts that the ranks have drawn, in rank order.
    """
    return hmac.digest(own, b"smp_tf: the secret of a job\n" + b"".join(parts), hashlib.sha256)


def _check(own: bytes, part: bytes) -> bytes:
    """Returns a proof that a rank was given the same part, without telling the part."""
    return hmac.digest(own, b"smp_tf: was given the same\n" + part, hashlib.sha256) if own else bytes(_CHECK_BYTES)
