"""Reads text files that a user names, up to a size, and without ever waiting for one."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class UnreadableError(Exception):
    """A file is no text that can be read. The message is the end of a sentence that begins with the file."""


def read_text(path: str | os.PathLike[str], most_bytes: int) -> str:
    """Returns the text of a file.

    Args:
        path: path of the file.
        most_bytes: the most bytes that such a file may have.

    Returns:
        Its text.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableError: it is no file, it is too large or not UTF-8, or the system does not let it be read.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise UnreadableError("cannot be read: it is no file, but a device, a pipe or a socket")
        with Path(path).open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise UnreadableError(f"is larger than {most_bytes} bytes, which no such file is")
        return content.decode()
    except NotADirectoryError as error:
        raise FileNotFoundError(*error.args) from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnreadableError(f"is not UTF-8 text: {error}") from error
    except ValueError as error:
        raise UnreadableError(f"is the name of no file: {error}") from error
