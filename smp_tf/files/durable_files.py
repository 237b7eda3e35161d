"""Writes files and folders that exist whole or not at all, even after the machine has lost its power.

    a name that nobody can guess ──▶ written ──▶ fsync ──▶ renamed into its place ──▶ fsync of the folder

A process that is killed leaves the old file or the new one. It may also leave a name that begins with ".writing-",
which is not complete, or with ".replaced-", which is the old one, whole. Only the writer deletes such a name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator

from smp_tf.announce import tell

_WRITING, _REPLACED = ".writing-", ".replaced-"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: The errors of file systems that cannot sync a folder, or cannot exchange two names.
_CANNOT = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def is_temporary(name: str) -> bool:
    """Returns whether a name is that of a file or folder that is being written, or whose writer died."""
    return name.startswith((_WRITING, _REPLACED))


def temporary_name(path: str | os.PathLike[str]) -> str:
    """Returns a path next to another one. Nobody can guess it, and it ends as the other does."""
    folder, name = os.path.split(os.fspath(path))
    return os.path.join(folder, f"{_WRITING}{secrets.token_hex(8)}-{name}")


def original_name(name: str) -> str:
    """Returns the name for which `temporary_name` made a temporary one; "" where it did not."""
    kind, _, rest = name.removeprefix(".").partition("-")
    return rest.partition("-")[2] if f".{kind}-" == _WRITING else ""


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file in one piece and for good. Whoever reads it finds the earlier file or the new one, whole.

    A link of this name is replaced. What it points to stays as it is.

    Args:
        path: path of the file. Its folder is made if it does not exist.
        content: its content. Text is written as UTF-8.

    Raises:
        OSError: it cannot be written, synced or renamed. The earlier file is unchanged.
    """
    path = os.path.abspath(path)
    folder = os.path.dirname(path)
    make_folder(folder)
    building = temporary_name(path)
    try:
        with os.fdopen(os.open(building, _NEW, 0o666), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(building, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(building)
        raise
    sync(folder)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Makes a folder and those above it, where they do not exist, and waits until the disk has them.

    Raises:
        OSError: a folder cannot be made, or there is a file of this name.
    """
    missing = []
    above = os.path.abspath(path)
    while not os.path.isdir(above):
        above, name = os.path.split(above)
        missing.append(os.path.join(above, name))
        if not name:
            break
    os.makedirs(path, exist_ok=True)
    for folder in reversed(missing):
        sync(os.path.dirname(folder))


def sync(path: str | os.PathLike[str]) -> None:
    """Waits until the disk has a file's content, or a folder's names.

    Raises:
        OSError: the disk cannot take it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no folders that can be synced.
        if error.errno not in _CANNOT or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def sync_tree(path: str | os.PathLike[str]) -> None:
    """Waits until the disk has a file, or a folder and all that is in it."""
    if os.path.isdir(path):
        for folder, _, files in os.walk(path, topdown=False):
            for name in files:
                file = os.path.join(folder, name)
                if not os.path.islink(file):
                    sync(file)
            sync(folder)
    else:
        sync(path)


@contextlib.contextmanager
def building(path: str | os.PathLike[str]) -> Iterator[str]:
    """Gives a path for a new file or folder, in a temporary folder that is deleted when the context ends.

    Args:
        path: where the result is to be. The temporary folder is next to it, and the given path has the same name.

    Yields:
        The path. `put_in_place` moves what was written there to its place.

    Raises:
        OSError: the temporary folder cannot be made.
    """
    folder, name = os.path.split(os.path.abspath(path))
    make_folder(folder)
    own = os.path.join(folder, f"{_WRITING}{secrets.token_hex(8)}")
    os.mkdir(own, 0o700)
    try:
        yield os.path.join(own, name)
    finally:
        remove(own)


def put_in_place(
    built: str, path: str | os.PathLike[str], before_removal: Callable[[str, str], None] | None = None
) -> None:
    """Puts a file or folder in its place, for good. It replaces what is there, but a file replaces no folder.

    Until then, what was there before is whole. If this fails, what was there before is unchanged.

    Args:
        built: what was written, completely, in a folder that `building` made.
        path: its place.
        before_removal: called when a folder has been replaced, with the replaced folder's new path and with `path`.
            What it leaves in the replaced folder is deleted.

    Raises:
        OSError: it cannot be synced or renamed.
    """
    path = os.path.abspath(path)
    sync_tree(built)
    if os.path.isdir(path) and os.path.isdir(built):
        _replace_folder(built, path, before_removal or (lambda earlier, path: None))
    else:
        os.replace(built, path)
        sync(os.path.dirname(path))


def _replace_folder(built: str, path: str, before_removal: Callable[[str, str], None]) -> None:
    folder, name = os.path.split(path)
    if _exchange(built, path):
        try:
            sync(folder)
        except BaseException:
            _exchange(built, path)
            raise
        # What was there before now lies where the new one was built, and is deleted with that folder.
        before_removal(built, path)
        return
    old = os.path.join(folder, f"{_REPLACED}{secrets.token_hex(8)}-{name}")
    try:
        os.rename(path, old)
        os.rename(built, path)
        sync(folder)
    except BaseException as error:
        if os.path.lexists(old):
            _bring_back(old, path, built, error)
        raise
    before_removal(old, path)
    remove(old)


def _bring_back(old: str, path: str, built: str, error: BaseException) -> None:
    try:
        if os.path.lexists(path) and not os.path.lexists(built):
            os.rename(path, built)
        os.rename(old, path)
    except OSError:
        tell(f"smp_tf: {path} could not be replaced ({error}). What was there before is whole, in {old}.")


def _exchange(first: str, second: str) -> bool:
    """Exchanges two names at once. Returns False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if not rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE):
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), first, None, second)


def remove(path: str) -> None:
    """Deletes a file or folder that this process has made or replaced. If it cannot, it only prints a message."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.remove(path)
    except FileNotFoundError:
        return
    except OSError as error:
        tell(f"smp_tf: {path} is no longer needed and could not be deleted: {error.strerror}. Delete it by hand.")
