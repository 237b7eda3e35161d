"""Lets one job at a time write to a folder of checkpoints, and says which one, even where locks are not seen.

    <directory>/.ckpt.in-use       locked by rank 0 (flock) from its first save until it ends; tells host and pid

The kernel frees the lock when the process ends, however it ends. A job that finds the folder locked is told by whom,
and does not wait. Where a file system has no such locks, or shows them to only one host, the file's content is used. It
is emptied when a job ends in good order. Reading a checkpoint takes no lock.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import socket
import stat
import time
from pathlib import Path

from smp_tf.announce import announce
from smp_tf.errors import CheckpointError, PlacementError
from smp_tf.job import runtime
from smp_tf.job.at_shutdown import on_shutdown
from smp_tf.partition.plan.json_record import record_from

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_BUSY = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES})
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_MOST_BYTES = 4096
#: Seconds after which a lock is reported. A job that only looks whether there is one has it for a moment.
_PATIENCE, _PAUSE = 1.0, 0.05
#: How often others may delete the file while it is being locked.
_TRIES = 100
_END = ".in-use"
_BOOT, _SPACE = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"


@dataclasses.dataclass(frozen=True)
class Holder:
    """A process that holds a folder, or held it when it wrote this.

    Args:
        host: its host.
        pid: number of the process on its host.
        system: the running system that the process belongs to, and the space of its number, from `_system`.
        began: when the process began, in the kernel's ticks since the system was started.
        since: when it took the folder, in seconds since 1970.
    """

    host: str
    pid: int
    system: str
    began: int
    since: float


class Hold:
    """A folder that this process holds.

    Args:
        path: of the lock's file.
        descriptor: of the file, open.
        is_locked: whether other jobs see the lock, so that there is no other holder.
    """

    def __init__(self, path: str, descriptor: int, is_locked: bool) -> None:
        self._path, self.descriptor, self.is_locked = path, descriptor, is_locked

    def is_in_place(self) -> bool:
        """Returns whether the file's name still leads to it. The folder may have been deleted and made anew."""
        try:
            there, here = os.lstat(self._path), os.fstat(self.descriptor)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def now(self) -> float:
        """Returns the time, in seconds since 1970, by the clock that the file system uses for its files."""
        os.utime(self.descriptor)
        return os.fstat(self.descriptor).st_mtime

    def release(self) -> None:
        """Gives the folder back, and says so to jobs that do not see locks."""
        # Where this fails, the next job says that this one has not told of its end.
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, 0)
        os.close(self.descriptor)


_held: dict[str, Hold] = {}


def is_lock_file(name: str) -> bool:
    """Returns whether a file with this name says who uses a folder, and so belongs to no checkpoint."""
    return name.startswith(".") and name.endswith(_END)


def current(directory: str, series: str) -> Hold | None:
    """Returns the hold of this process on a folder, if it has one.

    Args:
        directory: of the checkpoints.
        series: common name of the checkpoints, such as "ckpt". Each name has its own lock.
    """
    hold = _held.get(_path(directory, series))
    return hold if hold is not None and hold.is_in_place() else None


def take(directory: str, series: str) -> Hold:
    """Holds a folder, which this process does not hold yet, until `smp.shutdown` or the end.

    Args:
        directory: the folder of the checkpoints, which exists.
        series: common name of the checkpoints, such as "ckpt".

    Raises:
        CheckpointError: another live job holds the folder; the message names its host and process. Or what should be
            the lock's file is something else.
        OSError: the lock's file cannot be made.
    """
    path = _path(directory, series)
    stale = _held.pop(path, None)
    if stale is not None:
        os.close(stale.descriptor)
    for _ in range(_TRIES):
        descriptor = _opened(path)
        try:
            is_locked = _lock(descriptor, directory, series)
            hold = Hold(path, descriptor, is_locked)
            # Otherwise somebody has deleted the file meanwhile, and nobody sees the lock.
            if hold.is_in_place():
                _look_at_last(_holder(descriptor), is_locked, directory, series)
                _write(descriptor)
                break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    else:
        raise CheckpointError(
            f"{path} says which job uses its folder, and was another file each of the {_TRIES} times that it was "
            f"opened: something deletes it all the time, or its file system does not tell one file from another. Stop "
            f"what deletes it, or give smp.CheckpointManager a folder of another file system."
        )
    if not _held:
        on_shutdown(_release_all)
    _held[path] = hold
    return hold


def require_unused(directory: str, series: str) -> None:
    """Raises an error where another live job holds a folder. This call does not hold it.

    Args:
        directory: of the checkpoints; it need not exist.
        series: common name of the checkpoints.

    Raises:
        CheckpointError: another job holds it. The message names its host and process.
    """
    if current(directory, series) is not None:
        return
    try:
        descriptor = os.open(_path(directory, series), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return
    try:
        holder = _holder(descriptor)
        if holder is None or _is_of_this_job(holder):
            return
        if holder.system == _myself().system and _is_alive(holder):
            raise _in_use(holder, directory, series)
        # For another host the lock tells, where it is seen.
        _lock(descriptor, directory, series, fcntl.LOCK_SH, patience=0.0)
    finally:
        os.close(descriptor)


def _is_of_this_job(holder: Holder) -> bool:
    running = runtime.current_or_none()
    return running is not None and (holder.host, holder.pid) in zip(
        running.topology.hosts, running.topology.pids, strict=True
    )


def give_up(directory: str, series: str) -> None:
    """Deletes the lock's file of a folder that this process holds, and so ends the hold.

    Args:
        directory: the folder of the checkpoints, which has none any more.
        series: common name that they had.
    """
    path = _path(directory, series)
    hold = _held.pop(path)
    try:
        os.remove(path)
    finally:
        hold.release()


def _path(directory: str, series: str) -> str:
    return os.path.join(os.path.realpath(directory), f".{series}{_END}")


def _opened(path: str) -> int:
    try:
        descriptor = os.open(path, _FLAGS, 0o666)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    raise CheckpointError(
        f"{path} says which job uses its folder, and must be a file, no link and no folder. Remove it."
    )


def _lock(
    descriptor: int, directory: str, series: str, kind: int = fcntl.LOCK_EX, patience: float | None = None
) -> bool:
    """Locks the file. Returns False where its file system has no locks."""
    deadline = time.monotonic() + (_PATIENCE if patience is None else patience)
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            if error.errno not in _BUSY:
                raise
            if time.monotonic() >= deadline:
                raise _in_use(_holder(descriptor), directory, series) from None
        time.sleep(_PAUSE)


def _look_at_last(last: Holder | None, is_locked: bool, directory: str, series: str) -> None:
    """Returns what is known of a job that has not said that it ended, where no lock tells."""
    mine = _myself()
    if last is not None and last.system == mine.system and last.pid != mine.pid and not is_locked and _is_alive(last):
        raise _in_use(last, directory, series)
    if last is not None and last.system != mine.system and last.host != mine.host:
        announce(
            f"the last job that saved {series!r} into {directory}, that of {_described(last)}, has not said that it "
            f"ended. Perhaps it was killed. If it still runs, stop it, or take another folder: not every file system "
            f"tells one host what another one has locked.",
            rank=0,
        )
    elif not is_locked:
        announce(
            f"the file system of {directory} has no locks (flock), so a second job that saves {series!r} there would "
            f"not be noticed. What interrupted saves of other jobs have left there is not deleted.",
            rank=0,
        )


def _in_use(holder: Holder | None, directory: str, series: str) -> CheckpointError:
    by = _described(holder) if holder is not None else "a process that it does not name"
    ended = ""
    # It wrote 0 where it was not shown when it began.
    if holder is not None and holder.began and holder.system == _myself().system and not _is_alive(holder):
        ended = (
            f" That process has ended, but one that it has started still holds the folder: 'fuser "
            f"{_path(directory, series)}' names it. End it."
        )
    return CheckpointError(
        f"The folder {directory!r} is in use: the job of {by} saves {series!r} there. Two jobs would delete each "
        f"other's files.{ended} Wait until that job has ended, stop it, or give smp.CheckpointManager another folder "
        f"or checkpoint_name."
    )


def _described(holder: Holder) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    return f"host {holder.host} (process {holder.pid}, since {since})"


def _holder(descriptor: int) -> Holder | None:
    """Returns the holder in the file; None where it names nobody, or is not in our format."""
    try:
        found: Holder = record_from(Holder, json.loads(os.pread(descriptor, _MOST_BYTES, 0)), "a folder's lock")
        time.localtime(found.since)
    except (ValueError, OverflowError, OSError, RecursionError, PlacementError):
        return None
    return found if found.host.isprintable() else None


def _write(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(dataclasses.asdict(_myself())).encode(), 0)
    except OSError as error:
        # The disk is full. The lock holds without the text, and what is about to be deleted may make room.
        if error.errno not in _FULL:
            raise


def _myself() -> Holder:
    return Holder(socket.gethostname(), os.getpid(), _system(), _began(os.getpid()) or 0, time.time())


def _system() -> str:
    """Returns what distinguishes processes of this host from those of others, and of containers of one host."""
    try:
        return f"{Path(_BOOT).read_text(encoding='ascii').strip()} {os.readlink(_SPACE)}"
    except OSError:
        # Some containers hide these. A container has its own host name.
        return socket.gethostname()


def _is_alive(holder: Holder) -> bool:
    """Returns whether a process of this system exists and is the one that is meant."""
    return _began(holder.pid) == holder.began


def _began(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def _release_all() -> None:
    while _held:
        _held.popitem()[1].release()


def _forget_in_child() -> None:
    """Closes the file in a forked child, which would otherwise hold the folder after its parent has ended."""
    while _held:
        os.close(_held.popitem()[1].descriptor)


os.register_at_fork(after_in_child=_forget_in_child)
# Many scripts end without smp.shutdown.
atexit.register(_release_all)
