"""Files that a command writes at its end, and tries when it begins."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from smp_tf.command.output import UsageError, put

#: A pipe that nobody reads is an error, and the command does not wait for it.
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK


class OutputFiles:
    """Files that a command writes at its end. They are tried when it begins, since their content may take long.

    Args:
        files: the files by their options, where they are given.
        read: the files that the command reads.

    Raises:
        UsageError: a file cannot be written, two are the same, or one is also read.
    """

    def __init__(self, files: Mapping[str, Path | None], read: Iterable[str | Path | None]) -> None:
        self._given = {option: file for option, file in files.items() if file is not None}
        self._files: dict[str, Path] = {}
        inputs = {os.path.realpath(file) for file in read if file is not None and os.path.isfile(file)}
        for option, file in self._given.items():
            named = f"{option} {file}"
            try:
                # The script may change the folder.
                file = self._files[option] = file.absolute()
                _require_writable(named, file)
            except OSError as error:
                raise UsageError(f"{named} cannot be written: {error.strerror}.") from error
            if os.path.realpath(file) in inputs:
                raise UsageError(f"{named} is a file that is read. Name another one.")
        for (one, file), (other, second) in itertools.combinations(self._files.items(), 2):
            if os.path.realpath(file) == os.path.realpath(second):
                raise UsageError(f"{one} and {other} would be written to one file: {self._given[one]}. Give them two.")

    def write(self, option: str, text: str) -> None:
        """Writes one of the files, and says so.

        Args:
            option: the option that names the file.
            text: its content.

        Raises:
            UsageError: the file cannot be written any more.
        """
        try:
            with os.fdopen(
                os.open(self._files[option], _FLAGS, 0o666), "w", encoding="utf-8", errors="replace"
            ) as file:
                # The command waits for a slow reader.
                os.set_blocking(file.fileno(), True)
                file.write(text)
        except OSError as error:
            raise UsageError(f"{option} {self._given[option]} cannot be written: {error.strerror}.") from error
        put(f"wrote {self._given[option]}", sys.stderr)


def _require_writable(named: str, file: Path) -> None:
    """Requires that a file can be written. It changes no file, and leaves none.

    Args:
        named: the file as it was given, with its option.
        file: the file.

    Raises:
        UsageError: the file's folder does not exist, or the file is a folder.
        OSError: the file cannot be written.
    """
    try:
        is_folder = stat.S_ISDIR(os.stat(file.parent).st_mode)
    except FileNotFoundError:
        raise UsageError(f"There is no folder {str(file.parent)!r} to write {file.name} to.") from None
    if not is_folder:
        raise UsageError(f"{named} cannot be written: {str(file.parent)!r} is a file, not a folder.")
    try:
        mode = os.stat(file).st_mode
    except FileNotFoundError:
        # Perhaps it is a link to a file that does not exist.
        new = os.path.realpath(file)
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.unlink(new)
        return
    if stat.S_ISDIR(mode):
        raise UsageError(f"{named} cannot be written: it is a folder.")
    if stat.S_ISREG(mode):
        os.close(os.open(file, os.O_WRONLY))
    elif not os.access(file, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
