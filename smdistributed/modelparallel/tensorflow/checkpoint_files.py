"""A folder of files from one rank to another, such as a checkpoint to a host that does not have it.

    sender                                    receiver
    {"path": "mp_rank_0/a", "bytes": 9}  ──▶  opens <dst>/.receiving-*/mp_rank_0/a
    b"..." (4 MiB at most)               ──▶  writes
    ...
    {"sha256": "..."}                    ──▶  compares, syncs
    {"files": 1}                         ──▶  renames every file into its place

Only regular files travel. Paths are relative, and the receiver makes sure of it: a path that is absolute, has "..", or
leads through a symbolic link is refused before anything is written there. A transfer that ends early leaves the folder
as it was.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import smp_tf
from smp_tf.errors import MessageError

_CHUNK = 4 << 20
_PREFIX = ".receiving-"


def send_checkpoint_files(src_dir: str | os.PathLike[str], dest_rank: int) -> None:
    """Sends all files of a folder, and of the folders in it, to a rank, which must call `receive_checkpoint_files`.

    Args:
        src_dir: The folder.
        dest_rank: World rank of the receiver.

    Raises:
        NotADirectoryError: There is no such folder.
        MessageError: It holds something other than files and folders, or the receiver is this rank.
        PeerError: The receiver ended.

    Example:
        >>> if smp.rank() == 0:
        ...     smp.utils.send_checkpoint_files("checkpoints", 1)
        >>> elif smp.rank() == 1:
        ...     smp.utils.receive_checkpoint_files("checkpoints", 0)
    """
    root = Path(src_dir)
    if not root.is_dir():
        raise NotADirectoryError(f"send_checkpoint_files was given {str(root)!r}, which is not a folder.")
    files = list(_files(root))
    for path in files:
        _send_file(root, path, dest_rank)
    smp_tf.send({"files": len(files)}, dest_rank)


def _files(root: Path) -> Iterator[Path]:
    """The files below a folder, in order of their paths; what another process is receiving there is left out."""
    for path in sorted(root.iterdir()):
        if path.name.startswith(_PREFIX):
            continue
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise MessageError(
                f"send_checkpoint_files sends files and folders. {str(path)!r} is neither, or a symbolic link: leave "
                f"it out, or put a copy of what it points to in its place."
            )
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _send_file(root: Path, path: Path, dest_rank: int) -> None:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size
        smp_tf.send({"path": path.relative_to(root).as_posix(), "bytes": left}, dest_rank)
        while left:
            chunk = file.read(min(_CHUNK, left))
            if not chunk:
                raise MessageError(f"{str(path)!r} became shorter while it was sent. Send files nobody writes to.")
            digest.update(chunk)
            smp_tf.send(chunk, dest_rank)
            left -= len(chunk)
    smp_tf.send({"sha256": digest.hexdigest()}, dest_rank)


def receive_checkpoint_files(dst_dir: str | os.PathLike[str], src_rank: int) -> None:
    """Receives the files of a folder that a rank sends with `send_checkpoint_files`.

    Args:
        dst_dir: The folder to put them in; made if it is not there. Files of the same path are replaced, others stay.
        src_rank: World rank of the sender.

    Raises:
        MessageError: A path would leave the folder, a file arrived damaged, or the sender sent something else.
        PeerError: The sender ended; the folder is as it was.
    """
    target = Path(dst_dir)
    target.mkdir(parents=True, exist_ok=True)
    # Within the folder, so that renaming does not copy.
    staging = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=target))
    try:
        received: list[PurePosixPath] = []
        while "files" not in (header := _message(src_rank)):
            path = _checked(header.get("path"), target)
            _receive_file(staging / path, header, src_rank)
            received.append(path)
        if header["files"] != len(received):
            raise MessageError(f"Rank {src_rank} sent {len(received)} files and says it sent {header['files']}.")
        for path in received:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / path, target / path)
        for folder in {(target / path).parent for path in received}:
            _sync_folder(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _message(src_rank: int) -> dict[str, Any]:
    message = smp_tf.recv_from(src_rank)
    if not isinstance(message, dict) or not {"path", "files", "sha256"} & message.keys():
        raise MessageError(
            f"receive_checkpoint_files got a message of type {type(message).__name__} from rank {src_rank}, which is "
            f"not part of a folder. Rank {src_rank} must call send_checkpoint_files at the same point of the script."
        )
    return message


def _checked(text: Any, target: Path) -> PurePosixPath:
    """A peer's path, which stays within the folder."""
    path = PurePosixPath(text) if isinstance(text, str) and text and "\0" not in text else PurePosixPath("..")
    if path.is_absolute() or ".." in path.parts or not path.parts or path.parts[0].startswith(_PREFIX):
        raise MessageError(f"A received path must stay within {str(target)!r}. Received: {text!r}")
    at = target
    for part in path.parts:
        at = at / part
        if at.is_symlink():
            raise MessageError(
                f"The received path {text!r} leads through {str(at)!r}, a symbolic link, which may leave "
                f"{str(target)!r}. Remove the link first."
            )
    return path


def _receive_file(path: Path, header: dict[str, Any], src_rank: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, left = hashlib.sha256(), int(header["bytes"])
    with open(path, "xb") as file:
        while left:
            chunk = smp_tf.recv_from(src_rank)
            if not isinstance(chunk, bytes) or not 0 < len(chunk) <= left:
                raise MessageError(f"Rank {src_rank} sent something else in the middle of {header['path']!r}.")
            file.write(chunk)
            digest.update(chunk)
            left -= len(chunk)
        file.flush()
        os.fsync(file.fileno())
    if _message(src_rank).get("sha256") != digest.hexdigest():
        raise MessageError(f"{header['path']!r} from rank {src_rank} arrived damaged. Send it again.")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
