"""Writes files and folders that are there whole or not at all, also after the machine has lost its power.

    a name that nobody can guess ──▶ written ──▶ fsync ──▶ renamed into its place ──▶ fsync of the folder

A process that is killed leaves what was there before, or what is new, and perhaps something that begins with
".writing-" (it was not complete) or ".replaced-" (what was there before, whole). Nobody but its writer deletes it.
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
#: What file systems say that cannot sync a folder, or cannot exchange two names.
_CANNOT = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def is_temporary(name: str) -> bool:
    """Returns whether a file or folder of this name is one that is being written, or was left when its writer died."""
    return name.startswith((_WRITING, _REPLACED))


def temporary_name(path: str | os.PathLike[str]) -> str:
    """Returns a path next to another one, which nobody can guess, and which ends as the other does."""
    folder, name = os.path.split(os.fspath(path))
    return os.path.join(folder, f"{_WRITING}{secrets.token_hex(8)}-{name}")


def original_name(name: str) -> str:
    """Returns for which name a temporary one was made by `temporary_name`; "" where it was not."""
    kind, _, rest = name.removeprefix(".").partition("-")
    return rest.partition("-")[2] if f".{kind}-" == _WRITING else ""


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file, in one piece and for good: whoever reads it finds the earlier one or the new one, whole.

    A link of this name is replaced, and what it points to stays as it is.

    Args:
        path: of the file; its folder is made if it is not there.
        content: what is to stand in it; text is written as UTF-8.

    Raises:
        OSError: it cannot be written, synced or renamed. The earlier one is as it was.
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
    """Makes a folder and those above it, where they are not there, and waits until the disk has them.

    Raises:
        OSError: one cannot be made, or there is a file of this name.
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
        # Some file systems of networks keep no folders that could be synced.
        if error.errno not in _CANNOT or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def sync_tree(path: str | os.PathLike[str]) -> None:
    """Makes a file last, as `sync` does, or a folder and all that is in it."""
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
    """Gives a path to write a file or folder to, in a new folder that goes when the context ends, with all in it.

    Args:
        path: of what is to come of it, next to which the new folder is; the two have the same name.

    Yields:
        The path. `put_in_place` brings what was written there to where it is to be.

    Raises:
        OSError: the new folder cannot be made.
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
    """Puts a file or folder in its place, for good, where it replaces what is there; a file replaces no folder.

    Until it has its place for good, what was there before is whole; where this fails, it is there as it was.

    Args:
        built: what was written, completely, in a folder that `building` made.
        path: its place.
        before_removal: called when a folder has been replaced, with where that is now, and with the place. Whatever it
            leaves there is deleted.

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
        # What was there before lies where the new one was built, and goes with that.
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
    """Exchanges two names at once; returns False where the system cannot."""
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
    """Deletes a file or folder that this process has made, or has replaced; that it cannot be deleted is only told."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.remove(path)
    except FileNotFoundError:
        return
    except OSError as error:
        tell(f"smp_tf: {path} is no longer needed and could not be deleted: {error.strerror}. Delete it by hand.")
