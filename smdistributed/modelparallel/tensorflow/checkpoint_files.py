"""A folder of files from one rank to another, such as a checkpoint to a host that does not have it.

    sender                                    receiver
    {"path": "mp_rank_0/a", "bytes": 9}  ──▶  opens <dst>/.writing-*/received/mp_rank_0/a
    b"..." (4 MiB at most)               ──▶  writes
    ...
    {"sha256": "..."}                    ──▶  compares, syncs
    {"files": 1}                         ──▶  renames every file into its place, manifests last

Only regular files travel. Paths are relative, and the receiver makes sure of it: a path that is absolute, has "..", or
leads through a symbolic link is refused before anything is written there. A transfer that ends early or fails leaves
the folder's files as they were. Where a file cannot be put back, that is told, and what was there before is whole in
<dst>/.replaced-*. A receiver that is killed while it renames has perhaps some of the files, but no manifest of a
checkpoint before the files that it names; what it had replaced by then is in <dst>/.replaced-*, too.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import smp_tf
from smp_tf.announce import tell
from smp_tf.checkpoint import folder_lock
from smp_tf.errors import MessageError
from smp_tf.files import contained_path, durable_files

_CHUNK = 4 << 20
#: The manifest of a checkpoint; the name of its series is a group.
_MANIFEST = re.compile(r"(.+)-[0-9]+\.json")


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
    """The files below a folder, in order of their paths; what is being written there is left out, and who uses it."""
    for path in sorted(root.iterdir()):
        if _stays_here(path.name):
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
        CheckpointError: Checkpoints are received, and another job that still runs saves such ones into the folder.
        OSError: A file cannot be written or renamed.
        PeerError: The sender ended.

        Whichever it is, the folder's files are as they were. Where that itself fails, the files are named, and what
        was there before is in a folder .replaced-* there.
    """
    target = Path(dst_dir).absolute()
    # Within the folder, so that renaming does not copy.
    with durable_files.building(target / "received") as staging:
        received: list[PurePosixPath] = []
        while "files" not in (header := _message(src_rank)):
            path = _checked(header.get("path"), target)
            _receive_file(Path(staging) / path, header, src_rank)
            received.append(path)
        if header["files"] != len(received):
            raise MessageError(f"Rank {src_rank} sent {len(received)} files and says it sent {header['files']}.")
        _require_unused(target, received)
        _put_in_place(Path(staging), target, received)


def _stays_here(name: str) -> bool:
    """Whether a file belongs to what is going on in a folder, and not to what is in it."""
    return durable_files.is_temporary(name) or folder_lock.is_lock_file(name)


def _require_unused(target: Path, received: Sequence[PurePosixPath]) -> None:
    """Raise where a job that is not this one saves such checkpoints into the folder as were received."""
    series = {match[1] for path in received if len(path.parts) == 1 and (match := _MANIFEST.fullmatch(path.name))}
    for name in sorted(series):
        folder_lock.require_unused(str(target), name)


def _put_in_place(staging: Path, target: Path, received: Sequence[PurePosixPath]) -> None:
    """Rename all files into their places, or none: what was replaced is kept until all have theirs.

    It is kept where nobody deletes it if this process is killed, or cannot put it back.
    """
    manifests = [path for path in received if len(path.parts) == 1 and path.suffix == ".json"]
    others = [path for path in received if path not in manifests]
    kept = target / f".replaced-{secrets.token_hex(8)}"
    begun: list[PurePosixPath] = []
    try:
        for paths in (others, manifests):
            for path in paths:
                place = Path(contained_path.within(target, path.as_posix()))
                durable_files.make_folder(place.parent)
                if place.is_dir():
                    raise MessageError(f"A file {path.as_posix()!r} was received, and {str(place)!r} is a folder.")
                begun.append(path)
                if place.exists():
                    _keep(place, kept / path)
                os.replace(staging / path, place)
            # A manifest counts from when it is there, so all else is on disk by then.
            for folder in sorted({(target / path).parent for path in paths}):
                durable_files.sync(folder)
    except BaseException as error:
        _undo(begun, staging, target, kept, error)
        if isinstance(error, contained_path.PathError):
            raise MessageError(f"A received path {error}") from None
        raise
    durable_files.remove(str(kept))


def _undo(begun: Sequence[PurePosixPath], staging: Path, target: Path, kept: Path, reason: BaseException) -> None:
    """Put every file back, each whether or not another one can be; what cannot be is told, and stays kept."""
    left = []
    for path in reversed(begun):
        try:
            if (kept / path).exists():
                os.replace(kept / path, target / path)
            elif not (staging / path).exists():
                (target / path).unlink(missing_ok=True)
        except OSError as error:
            left.append(f"{path.as_posix()} ({error.strerror})")
    if not left:
        durable_files.remove(str(kept))
        return
    where = f" What was there before is whole, in {kept}: put it back by hand." if kept.exists() else ""
    tell(
        f"smp_tf: the files that were received could not take their places in {target} ({reason}), and these could not "
        f"be put back as they were: {', '.join(left)}.{where} What has nothing there is new: delete it."
    )


def _keep(place: Path, earlier: Path) -> None:
    """Give a file a second name, or another one where a file can have one name only."""
    earlier.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(place, earlier)
    except OSError:
        os.rename(place, earlier)


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
    try:
        path = contained_path.relative(text, target)
        contained_path.within(target, text)
    except contained_path.PathError as error:
        raise MessageError(f"A received path {error}") from None
    if any(map(_stays_here, path.parts)):
        raise MessageError(f"A received path must be that of a file's own name. Received: {text!r}")
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
