"""A folder with what each rank prints, a file per rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TextIO

from smp_tf.launch.errors import LaunchError


class LogFolder:
    """Writes what each rank prints into a file of its own, `rank_0.log` and so on. It adds to files that are there.

    Args:
        folder: the folder, which is made.
        size: number of ranks.

    Raises:
        LaunchError: a file cannot be written.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._paths = [folder / f"rank_{rank}.log" for rank in range(size)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._files: list[TextIO] = [
                path.open("a", encoding="utf-8", errors="replace", buffering=1) for path in self._paths
            ]
        except OSError as error:
            raise LaunchError(f"--log-dir {folder} cannot be written: {error.strerror}.") from error

    def path(self, rank: int) -> Path:
        """Returns the file of a rank."""
        return self._paths[rank]

    def begin(self, rank: int, about: str) -> None:
        """Writes a line that a process begins.

        Args:
            rank: the rank.
            about: words for the process.
        """
        self.add(rank, f"──── {time.strftime('%Y-%m-%d %H:%M:%S')}: {about} ────")

    def add(self, rank: int, line: str) -> None:
        """Writes a line of a rank.

        Raises:
            LaunchError: it cannot be written, such as on a full disk.
        """
        try:
            self._files[rank].write(f"{line}\n")
        except OSError as error:
            raise LaunchError(f"{self._paths[rank]} cannot be written: {error.strerror}.") from error

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.close()
